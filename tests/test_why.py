from __future__ import annotations

from typing import Any

import pytest

from aoffpolicy.status.picture import Picture, picture_of_folder
from aoffpolicy.status.why import explain
from aoffpolicy.transport.events import AnyEvent, ErrorEvent, PhaseEvent, RunEvent, StepEvent, WorkerEvent
from tests.recorded import group, recorded_events, row, run_folder

NOW = 10_000.0


def picture(*events: AnyEvent, state: str = "running", steps: int = 4, **changes: Any) -> Picture:
    made = Picture()
    made.add(RunEvent(name="sums", state=state, steps=20, run_dir="/r", time=NOW))
    for step in range(steps):
        made.add(StepEvent(step=step, metrics=row(step, **changes), time=NOW - 100 + step))
    for event in events:
        made.add(event)
    return made


def told(made: Picture, now: float = NOW, **kept: Any) -> str:
    return "\n".join(explain(made, now, **kept))


def phase(name: str, step: int, seconds: float = 0.0, time: float = NOW) -> PhaseEvent:
    state = "end" if seconds else "begin"
    return PhaseEvent(name=name, step=step, version=step, state=state, seconds=seconds, time=time)  # type: ignore[arg-type]


def test_it_says_who_waits_for_whom_and_for_how_long() -> None:
    said = told(picture())
    assert "The run sums is running; 4 of 20 steps are recorded." in said
    assert "Trainer-bound: rollouts idle 36%" in said
    assert "Of a step of 10.6 s in the mean, the rollouts wait for new weights 3.8 s (36%)" in said


def test_a_rollout_bound_run_is_told_as_such() -> None:
    said = told(
        picture(time_wait_rollout=6.0, time_wait_trainer=0.0, time_rollout=10.0, time_train=4.0, time_step=10.5)
    )
    assert "Rollout-bound: trainer idle 57%" in said
    assert "the trainer waits for rollouts 6.0 s (57%)" in said


def test_a_phase_in_progress_is_compared_with_those_before_it() -> None:
    before = [phase("train", step, 10.0, NOW - 50 + step) for step in range(3)]
    said = told(picture(*before, phase("train", 4, time=NOW - 12)))
    assert "It has been training step 4 for 12 s; such a phase takes 10.0 s in the median." in said
    assert "stalled" not in said


@pytest.mark.parametrize(("name", "logs"), [("train", "trainer"), ("generate", "rollout"), ("load", "rollout")])
def test_a_stalled_phase_is_named_with_the_logs_to_look_into(name: str, logs: str) -> None:
    before = [phase(name, step, 10.0, NOW - 50 + step) for step in range(3)]
    said = told(picture(*before, phase(name, 4, time=NOW - 95)))
    assert (
        "step 4 for 2 min; such a phase takes 10.0 s in the median, so this one is stalled or 10 times slower" in said
    )
    assert f"see logs/{logs}-*.log" in said


def test_a_short_phase_that_takes_a_few_seconds_is_not_called_stalled() -> None:
    assert "stalled" not in told(picture(phase("load", 3, 0.01, NOW - 50), phase("load", 4, time=NOW - 5)))


def test_a_run_that_waits_for_a_role_to_start_says_which_and_what_it_said_last() -> None:
    workers = [
        WorkerEvent(role="rollout", rank=3, state="starting", detail="compiling", time=NOW),
        WorkerEvent(role="trainer", rank=0, state="ready", time=NOW),
    ]
    said = told(picture(*workers, state="starting", steps=0))
    assert "It is waiting for rollout 3 (compiling) to be ready." in said
    assert "trainer 0" not in said


def test_a_lost_worker_and_the_last_error_come_first() -> None:
    lost = WorkerEvent(role="rollout", rank=1, state="lost", detail="killed by SIGKILL", time=NOW)
    error = ErrorEvent(role="rollout", rank=1, cause="ProcessDiedError: rollout 1: killed by SIGKILL", time=NOW)
    lines = explain(picture(lost, error, state="failed"), NOW)
    assert lines[0] == "The run sums has failed; 4 of 20 steps are recorded."
    assert lines[1] == "Worker rollout 1 is lost: killed by SIGKILL."
    assert lines[2] == "The last error came from rollout 1: ProcessDiedError: rollout 1: killed by SIGKILL."


def test_silence_of_a_run_that_goes_on_is_told_and_of_an_ended_one_is_not() -> None:
    assert "Nothing was heard of it for 2 min" in told(picture(), NOW + 120)
    assert "Nothing was heard" not in told(picture(state="finished"), NOW + 120)


def test_a_slowdown_is_traced_to_the_part_that_grew() -> None:
    made = picture(steps=0)
    for step in range(16):
        late = step >= 10
        times = {"time_step": 20.0, "time_rollout": 18.0, "completion_tokens": 3000} if late else {}
        made.add(StepEvent(step=step, metrics=row(step, **times), time=NOW))
    said = told(made)
    assert "Steps have become slower, from 10.6 to 20.0 s; most of it is generating (+12.0 s)" in said
    assert "with 3.0 times the completion tokens" in said


def test_a_steady_run_is_not_called_slower() -> None:
    assert "slower" not in told(picture(steps=20))


def test_a_slow_rollout_worker_and_a_straggling_group_are_named() -> None:
    speeds = [100.0, 110.0, 30.0]
    workers = [
        WorkerEvent(role="rollout", rank=rank, state="busy", tokens_per_s=speed, time=NOW)
        for rank, speed in enumerate(speeds)
    ]
    said = told(picture(*workers), groups=[group(3, 1.0), group(3, 1.1), group(3, 1.2), group(3, 9.0)])
    assert "Rollout 2 makes 30 tokens a second where the median of all is 100" in said
    assert "the slowest group (prompt 103, up to 8 tokens, rollout 0) took 9.0 s, the median one 1.1 s" in said
    even = told(picture(*workers[:2]), groups=[group(3, 1.0), group(3, 1.1)])
    assert "slowest" not in even and "makes" not in even


def test_a_recorded_run_is_explained_at_every_moment() -> None:
    made = Picture()
    for event in recorded_events():
        made.add(event)
        assert all(sentence.endswith(".") for sentence in explain(made, made.time))


def test_what_a_folder_holds_is_enough_to_explain_a_run_that_is_over(tmp_path: Any) -> None:
    folder = run_folder(tmp_path / "run", 12)
    made = picture_of_folder(folder)
    said = told(made, made.time)
    assert "The run run is finished; 12 of 12 steps are recorded." in said
    assert "Trainer-bound" in said
    assert [p.step for p in made.phases if p.name == "train"] == list(range(12))
    assert max(p.end for p in made.phases) == pytest.approx(made.time)
