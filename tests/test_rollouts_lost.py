"""Real runs whose rollout workers are killed, stopped and lost for good."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.launching import RUN_TIMEOUT_S, TinyRun, assert_gone, children_of, descendants, tiny_run

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(400)]
STEPS = 12


def run_of(tmp_path: Path, **sections: dict[str, Any]) -> TinyRun:
    """A run of 12 steps that takes some seconds."""
    supervisor = {"restart_backoff_s": 0.1, "stop_timeout_s": 3.0, **sections.pop("supervisor", {})}
    return tiny_run(
        tmp_path,
        run={"steps": STEPS},
        reward={"function": "tests.tiny_rewards:slow_digit_fraction"},
        supervisor=supervisor,
        **sections,
    )


@contextmanager
def started(run: TinyRun, *overrides: str) -> Iterator[subprocess.Popen[str]]:
    process = run.start(*overrides)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def finish(run: TinyRun, process: subprocess.Popen[str]) -> dict[str, Any]:
    """Wait for the end; the steps are all there, and trained on the data in order. Returns summary.json."""
    family = descendants(process.pid)
    stdout, stderr = process.communicate(timeout=RUN_TIMEOUT_S)
    assert process.returncode == 0, stdout + stderr
    assert_gone(family, within_s=1)
    assert_trained_in_order(run)
    summary: dict[str, Any] = json.loads((run.folder / "summary.json").read_text())
    return summary


def assert_trained_in_order(run: TinyRun) -> None:
    """Every step once, on the prompts that an undisturbed run trains in it."""
    rows = run.metrics()
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert all(row["groups_trained"] == row["groups_dispatched"] == 4 and row["staleness_max"] <= 1 for row in rows)
    trained = defaultdict(list)
    for line in (run.folder / "samples.jsonl").read_text().splitlines():
        group = json.loads(line)
        if group["purpose"] == "train":
            trained[group["step"]].append(group["uid"])
    assert dict(trained) == {step: list(range(4 * step, 4 * step + 4)) for step in range(STEPS)}


def test_a_killed_rollout_worker_is_replaced_while_training_goes_on(tmp_path: Path) -> None:
    run = run_of(tmp_path, rollout={"workers": 2})
    with started(run) as process:
        run.wait_for_rows(2, process)
        os.kill(children_of(process.pid)["rollout"], signal.SIGKILL)
        assert finish(run, process)["rollout_restarts"] == 1


def test_the_only_rollout_worker_may_die_too(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    with started(run) as process:
        run.wait_for_rows(2, process)
        os.kill(children_of(process.pid)["rollout"], signal.SIGKILL)
        assert finish(run, process)["rollout_restarts"] == 1


def test_a_stopped_worker_is_replaced_and_never_heard_again(tmp_path: Path) -> None:
    run = run_of(tmp_path, rollout={"workers": 2}, control={"heartbeat_timeout_s": 2.0})
    with started(run) as process:
        run.wait_for_rows(2, process)
        stopped = children_of(process.pid)["rollout"]
        os.kill(stopped, signal.SIGSTOP)
        assert_gone([stopped], within_s=10)
        assert finish(run, process)["rollout_restarts"] == 1


def test_a_worker_that_is_lost_too_often_ends_the_run_with_a_checkpoint_from_which_it_goes_on(tmp_path: Path) -> None:
    run = run_of(tmp_path, supervisor={"max_restarts": 1})
    with started(run) as process:
        for rows in (2, 4):
            run.wait_for_rows(rows, process)
            os.kill(children_of(process.pid)["rollout"], signal.SIGKILL)
        _, stderr = process.communicate(timeout=RUN_TIMEOUT_S)
    assert process.returncode == 1
    assert "every rollout worker was lost too often (supervisor.max_restarts = 1)" in stderr.splitlines()[-1]
    trained = len(run.metrics())
    assert (run.folder / "checkpoints" / f"step-{trained}").is_dir()
    resumed = run.run("--resume", "auto")
    assert resumed.returncode == 0, resumed.stderr
    assert_trained_in_order(run)


@pytest.mark.parametrize("seed", range(3))
def test_rollout_workers_lost_at_any_moment_cost_time_and_nothing_else(tmp_path: Path, seed: int) -> None:
    choose = random.Random(seed)
    run = run_of(
        tmp_path,
        rollout={"workers": 2},
        trainer={"ranks": 2},
        control={"heartbeat_timeout_s": 2.0},
        supervisor={"max_restarts": 20},
        eval={"every": 3, "source": str(tmp_path / "sums.jsonl"), "prompts": 4},
        checkpoint={"every": 2},
    )
    faults = 0
    with started(run) as process:
        run.wait_for_rows(1, process)
        while faults < 4 and process.poll() is None and len(run.metrics()) < STEPS - 1:
            time.sleep(choose.uniform(0.0, 1.5))
            rollouts = [pid for name, pid in children_of(process.pid).items() if name.startswith("rollout")]
            if rollouts:
                os.kill(choose.choice(rollouts), choose.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP]))
                faults += 1
        summary = finish(run, process)
    print(f"faults injected / survived: {faults} / {faults}")
    assert summary["rollout_restarts"] >= 1
