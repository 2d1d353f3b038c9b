"""Whole runs from the command line, on a tiny random model with real processes."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from aoffpolicy.samples.index import SampleIndex
from tests.launching import ROOT, TinyRun, assert_gone, children_of, descendants, tiny_run

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300)]

METRICS_KEYS = {
    "step",
    "policy_version",
    "skipped",
    "reward_mean",
    "reward_std",
    "staleness_max",
    "staleness_mean",
    "time_step",
    "time_generate",
    "time_train",
    "time_sync",
    "time_load",
    "time_wait_rollout",
    "time_wait_trainer",
    "overlap_efficiency",
    "prompt_tokens",
    "completion_tokens",
    "loss",
    "grad_norm",
    "kl_rollout_trainer",
    "logprob_abs_diff",
    "importance_ratio_mean",
    "clip_fraction",
    "truncated_fraction",
}


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_small_run_finishes_with_control_weights_store_and_status_on_one_address(tmp_path: Path, host: str) -> None:
    run = tiny_run(tmp_path, control={"host": host})
    done = run.run()
    assert done.returncode == 0, done.stderr
    rows = run.metrics()
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    for row in rows:
        assert set(row) >= METRICS_KEYS
    assert rows[0]["staleness_max"] == 0
    assert all(row["staleness_max"] <= 1 for row in rows)
    assert any(row["staleness_max"] == 1 for row in rows)
    assert rows[0]["logprob_abs_diff"] < 1e-4
    assert rows[0]["grad_norm"] > 0
    assert {"config.toml", "metrics.jsonl", "summary.json", "timeline.json", "logs"} <= set(os.listdir(run.folder))
    assert json.loads((run.folder / "status.json").read_text())["address"].startswith(
        "[::1]:" if host == "::1" else "127.0.0.1:"
    )
    assert_samples_are_those_trained(run.folder, rows)
    assert_every_worker_has_a_track(run.folder)


def assert_samples_are_those_trained(folder: Path, rows: list[dict[str, Any]]) -> None:
    with SampleIndex(folder, purpose="train") as index:
        groups = list(index)
    for row in rows:
        rewards = [c.reward for group in groups if group.step == row["step"] for c in group.completions]
        assert len(rewards) == 16
        assert math.isclose(sum(rewards) / 16, row["reward_mean"])
    assert all(group.rollout == 0 and group.generate_s > 0 and "+" in group.prompt for group in groups)
    assert any(completion.advantage for group in groups for completion in group.completions)


def assert_every_worker_has_a_track(folder: Path) -> None:
    spans = json.loads((folder / "timeline.json").read_text())["traceEvents"]
    tracks = {span["tid"]: span["args"]["name"] for span in spans if span["name"] == "thread_name"}
    drawn = {tracks[span["tid"]] for span in spans if span["ph"] == "X"}
    assert drawn >= {"generate", "train", "weights", "trainer 0", "rollout 0", "reward 0"}


def test_a_sink_that_always_fails_is_told_and_stops_nothing(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, run={"steps": 2}, metrics={"sinks": ["tests.broken_sink:BrokenSink"]})
    done = run.run()
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in run.metrics()] == [0, 1]
    assert "tests.broken_sink:BrokenSink: ConnectionError: no route to host" in done.stdout


def test_with_learning_rate_zero_trainer_and_engine_stay_together(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, run={"steps": 5}, trainer={"lr": 0.0})
    done = run.run()
    assert done.returncode == 0, done.stderr
    for row in run.metrics():
        assert row["logprob_abs_diff"] < 1e-4
        assert abs(row["importance_ratio_mean"] - 1) < 1e-3
        assert abs(row["importance_ratio_max"] - 1) < 1e-3


def test_two_trainer_ranks_and_two_rollout_workers_finish_a_run(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, trainer={"ranks": 2}, rollout={"workers": 2}, checkpoint={"every": 2})
    done = run.run()
    assert done.returncode == 0, done.stderr
    rows = run.metrics()
    assert len(rows) == 4
    assert rows[0]["logprob_abs_diff"] < 1e-4
    assert (run.folder / "checkpoints" / "step-4").is_dir()


def test_without_curve_a_run_on_loopback_works_too(tmp_path: Path) -> None:
    done = tiny_run(tmp_path, control={"curve": False}, run={"steps": 1}).run()
    assert done.returncode == 0, done.stderr


def test_evaluation_of_the_initial_and_final_weights_is_recorded(tmp_path: Path) -> None:
    evaluation = {"every": 2, "source": str(tmp_path / "sums.jsonl"), "prompts": 5}
    run = tiny_run(tmp_path, eval=evaluation)
    done = run.run()
    assert done.returncode == 0, done.stderr
    evaluated = {row["eval_version"] for row in run.metrics() if row.get("eval_reward_mean") is not None}
    assert 4 in evaluated


@pytest.fixture
def long_run(tmp_path: Path) -> TinyRun:
    """A run that is still busy when a test interferes."""
    return tiny_run(
        tmp_path,
        run={"steps": 500},
        reward={"function": "tests.tiny_rewards:slow_digit_fraction"},
        supervisor={"stop_timeout_s": 3.0},
    )


@pytest.mark.parametrize("role", ["trainer", "rollout", "reward"])
def test_a_killed_child_ends_the_run_with_its_role_rank_and_signal(long_run: TinyRun, role: str) -> None:
    process = long_run.start("--supervisor.max_restarts", "0")
    long_run.wait_for_rows(2, process)
    family = descendants(process.pid)
    os.kill(children_of(process.pid)[role], signal.SIGKILL)
    killed = time.monotonic()
    _, stderr = process.communicate(timeout=15)
    assert process.returncode == 1, stderr
    assert time.monotonic() - killed < 15
    last = stderr.strip().splitlines()[-1]
    assert f"{role} 0" in last
    assert "SIGKILL" in last
    assert_gone(family, within_s=1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_checkpoints_leaves_no_process_and_can_be_resumed(
    long_run: TinyRun, number: signal.Signals
) -> None:
    process = long_run.start()
    long_run.wait_for_rows(3, process)
    family = descendants(process.pid)
    os.killpg(process.pid, number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert_gone(family, within_s=1)
    trained = len(long_run.metrics())
    assert (long_run.folder / "checkpoints" / f"step-{trained}").is_dir()

    resumed = long_run.run("--resume", "auto", "--run.steps", str(trained + 2))
    assert resumed.returncode == 0, resumed.stderr
    assert [row["step"] for row in long_run.metrics()] == list(range(trained + 2))


def test_a_second_interrupt_ends_the_run_at_once(long_run: TinyRun) -> None:
    process = long_run.start()
    long_run.wait_for_rows(1, process)
    family = descendants(process.pid)
    for _ in range(2):
        os.kill(process.pid, signal.SIGINT)
        time.sleep(0.01)
    _, stderr = process.communicate(timeout=15)
    assert process.returncode == 130, stderr
    assert_gone(family, within_s=1)


def test_an_interrupt_before_the_first_step_leaves_no_process(long_run: TinyRun) -> None:
    process = long_run.start()
    deadline = time.monotonic() + 60
    while not descendants(process.pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    family = descendants(process.pid)
    os.kill(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130, stderr
    assert_gone(family, within_s=1)


def test_a_run_whose_steps_are_all_trained_ends_at_once_when_resumed(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, run={"steps": 1}, checkpoint={"every": 1})
    for resume in ("never", "auto"):
        done = run.run("--resume", resume)
        assert done.returncode == 0, done.stderr
        assert [row["step"] for row in run.metrics()] == [0]


def test_no_child_survives_a_launcher_killed_with_sigkill(long_run: TinyRun) -> None:
    process = long_run.start()
    long_run.wait_for_rows(1, process)
    family = descendants(process.pid)
    assert len(family) >= 3
    process.kill()
    process.communicate(timeout=10)
    assert_gone(family, within_s=5)


def test_a_failing_reward_function_ends_the_run_when_asked_to(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, reward={"function": "tests.tiny_rewards:always_raises", "on_error": "fail"})
    done = run.run()
    assert done.returncode == 1
    assert "reward 0" in done.stderr.splitlines()[-1]
    assert "no reward today" in done.stderr.splitlines()[-1]


def test_a_reward_that_does_not_exist_is_reported_before_work_starts(tmp_path: Path) -> None:
    done = tiny_run(tmp_path, reward={"function": "tests.tiny_rewards:absent"}).run()
    assert done.returncode in (1, 2)
    assert "absent" in done.stderr


def test_a_bad_config_names_every_wrong_key_and_exits_2(tmp_path: Path) -> None:
    done = tiny_run(tmp_path).run("--run.stepz", "3", "--trainer.lr", "-1")
    assert done.returncode == 2
    assert [line.split(":")[0] for line in done.stderr.strip().splitlines()] == ["run.stepz", "trainer.lr"]


def test_a_dry_run_prints_config_and_plan_and_starts_nothing(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    done = run.run("--dry-run", "--run.steps", "77")
    assert done.returncode == 0, done.stderr
    assert "steps = 77" in done.stdout
    for role in ("launch", "trainer", "rollout", "reward"):
        assert role in done.stdout
    assert not run.folder.exists()


def test_help_lists_every_key_without_importing_torch() -> None:
    script = (
        "import sys; from aoffpolicy.launch import main; code = main(['--help']); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--weights.bucket_bytes" in done.stdout
    assert "versions a trained token may be behind" in done.stdout


def test_the_rewards_of_the_first_step_do_not_depend_on_staleness(tmp_path: Path) -> None:
    rewards = []
    for staleness in (0, 1):
        (tmp_path / str(staleness)).mkdir()
        run = tiny_run(tmp_path / str(staleness), run={"max_staleness": staleness, "steps": 1, "deterministic": True})
        done = run.run()
        assert done.returncode == 0, done.stderr
        rewards.append(run.metrics()[0]["reward_mean"])
    assert math.isclose(*rewards, abs_tol=1e-9)
