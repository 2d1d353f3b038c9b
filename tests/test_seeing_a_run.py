"""A real run, seen from outside: what a late subscriber finds, also when a worker is killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from aoffpolicy.status.__main__ import main as status
from aoffpolicy.status.picture import Picture
from aoffpolicy.status.why import explain
from aoffpolicy.transport.events import (
    AnyEvent,
    ErrorEvent,
    FaultEvent,
    PhaseEvent,
    RunEvent,
    StepEvent,
    WorkerEvent,
    subscriber_for,
)
from tests.launching import tiny_run
from tests.recorded import recorded_events

BOUND_S = 60.0


def until(events: Iterator[AnyEvent], picture: Picture, condition: Callable[[AnyEvent], bool]) -> list[AnyEvent]:
    """Everything up to the event that fulfils the condition."""
    seen = []
    for event in events:
        picture.add(event)
        seen.append(event)
        if condition(event):
            break
    return seen


def tells_of_rollout_1(event: AnyEvent, state: str) -> bool:
    return isinstance(event, WorkerEvent) and (event.role, event.rank, event.state) == ("rollout", 1, state)


@pytest.mark.multiprocess
@pytest.mark.timeout(300)
def test_one_who_comes_late_sees_the_run_the_death_of_a_worker_its_restart_and_whom_to_blame(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tiny_run(
        tmp_path,
        run={"steps": 5000},
        rollout={"workers": 2},
        reward={"function": "tests.tiny_rewards:slow_digit_fraction"},
    )
    process = run.start()
    try:
        run.wait_for_rows(3, process)
        picture = Picture()
        with subscriber_for(run.folder, timeout_s=BOUND_S) as subscriber:
            for event in subscriber.snapshot(BOUND_S):
                picture.add(event)
            assert picture.state == "running"
            assert list(picture.rows)[:3] == [0, 1, 2]
            assert {phase.name for phase in picture.phases} >= {"generate", "train", "send", "load"}
            workers = {f"{w.role} {w.rank}": w for w in picture.workers.values()}
            assert set(workers) == {"trainer 0", "rollout 0", "rollout 1", "reward 0"}
            assert all(w.pid and w.host and w.state in ("ready", "busy") for w in workers.values())

            killed_at = time.time()
            os.kill(workers["rollout 1"].pid, signal.SIGKILL)
            events = subscriber.blocking()
            *_, fault = until(events, picture, lambda event: isinstance(event, FaultEvent))
            assert isinstance(fault, FaultEvent)
            assert fault.time - killed_at < 2
            assert (fault.role, fault.rank, fault.restart_in_s) == ("rollout", 1, 1.0)
            assert "SIGKILL" in fault.cause
            assert picture.workers["rollout", 1].state == "lost"
            until(events, picture, lambda event: tells_of_rollout_1(event, "starting"))
            assert "Rollout 1 is being started again" in " ".join(explain(picture, picture.time))
            until(events, picture, lambda event: tells_of_rollout_1(event, "ready"))
            until(events, picture, lambda event: tells_of_rollout_1(event, "busy"))
            back = picture.workers["rollout", 1]
            assert back.version > 0
            assert back.pid != workers["rollout 1"].pid
            assert status(["why", str(run.folder)]) == 0
            told = capsys.readouterr().out
            assert "is running" in told
            assert "The last error came from rollout 1: process" in told
            until(events, picture, lambda event: isinstance(event, StepEvent))
            os.kill(process.pid, signal.SIGINT)
            until(events, picture, lambda event: isinstance(event, RunEvent))
        assert process.wait(BOUND_S) == 130
    finally:
        process.kill()
        process.communicate()
    assert picture.state == "interrupted"
    rows = run.metrics()
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert all(row["groups_trained"] == 4 for row in rows)


@pytest.mark.multiprocess
@pytest.mark.timeout(300)
def test_the_death_of_the_trainer_is_told_to_who_watches_and_to_who_comes_afterwards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tiny_run(tmp_path, run={"steps": 5000})
    process = run.start()
    try:
        run.wait_for_rows(1, process)
        picture = Picture()
        with subscriber_for(run.folder, timeout_s=BOUND_S) as subscriber:
            for event in subscriber.snapshot(BOUND_S):
                picture.add(event)
            os.kill(picture.workers["trainer", 0].pid, signal.SIGKILL)
            until(subscriber.blocking(), picture, lambda event: isinstance(event, RunEvent))
        assert process.wait(BOUND_S) == 1
    finally:
        process.kill()
        process.communicate()
    assert picture.state == "failed"
    assert picture.workers["trainer", 0].state == "lost"
    assert picture.workers["rollout", 0].state == "stopped"
    assert "SIGKILL" in picture.errors[-1].cause
    assert (picture.errors[-1].role, picture.errors[-1].rank) == ("trainer", 0)

    assert status(["why", str(run.folder), "--timeout", "1"]) == 0  # the launcher is gone: from the folder
    told = capsys.readouterr().out
    assert "has failed" in told
    assert "The last error came from trainer 0: ProcessDiedError" in told
    assert status([str(run.folder), "--once", "--timeout", "1"]) == 0
    assert "SIGKILL" in capsys.readouterr().out


def test_the_named_phases_of_a_recorded_run_cover_its_steps() -> None:
    """From the start of a step's training to the start of the next one's, at least 99 % is in a phase with a name."""
    events = recorded_events()
    picture = Picture()
    for event in events:
        picture.add(event)
    begins = sorted(phase.start for phase in picture.phases if phase.name == "train")
    assert len(begins) == 6
    for start, end in pairwise(begins):
        covered, reached = 0.0, start
        for phase in sorted(picture.phases, key=lambda phase: phase.start):
            left, right = max(phase.start, reached), min(phase.end, end)
            covered += max(0.0, right - left)
            reached = max(reached, right)
        assert covered / (end - start) >= 0.99


def test_a_recorded_stream_has_no_gap_and_every_kind_that_it_should() -> None:
    events = recorded_events()
    assert {type(event) for event in events} == {RunEvent, StepEvent, PhaseEvent, WorkerEvent}
    assert not any(isinstance(event, ErrorEvent) for event in events)
    seqs = [event.seq for event in events]
    assert seqs == sorted(set(seqs))
    assert [event.step for event in events if isinstance(event, StepEvent)] == list(range(6))
