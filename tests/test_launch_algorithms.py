"""Algorithms in whole runs from the command line: what the scheduler, the controller and the trainer ranks share."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from aoffpolicy.trainer import batch_file
from tests.launching import tiny_run

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300)]


def test_dapo_samples_dynamically_until_the_batch_is_full(tmp_path: Path) -> None:
    run = tiny_run(
        tmp_path,
        algorithm={"name": "dapo"},
        reward={"function": "tests.tiny_rewards:digit_fraction_of_small_sums"},
    )
    done = run.run()
    assert done.returncode == 0, done.stderr
    rows = run.metrics()
    assert len(rows) == 4
    assert [row["groups_trained"] for row in rows] == [4] * 4
    assert sum(row["groups_dropped_filtered"] for row in rows) > 0
    assert all(row["reward_std"] > 0 for row in rows)


def test_kl_in_the_reward_comes_from_the_reference_on_every_rank(tmp_path: Path) -> None:
    run = tiny_run(
        tmp_path,
        run={"steps": 2},
        trainer={"ranks": 2, "passes": 2},
        algorithm={"name": "rloo", "kl_coef": 0.1, "kl_in": "reward", "mask": "sequence_mean"},
    )
    done = run.run()
    assert done.returncode == 0, done.stderr
    for row in run.metrics():
        assert row["nonfinite"] == 0
        assert {"correction_weight", "masked_fraction", "last_pass_importance_ess"} <= row.keys()
        assert "kl_reference" not in row  # it is no term of the loss
    assert {"importance_ess_staleness_1", "masked_fraction_staleness_1"} <= run.metrics()[1].keys()


def test_a_batch_that_is_not_finite_stops_the_run_and_is_saved(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, algorithm={"name": "tests.tiny_algorithms:broken_from_the_second_batch"})
    done = run.run()
    assert done.returncode == 1
    last = [line for line in done.stderr.splitlines() if line.startswith("aoffpolicy: ")][-1]
    path = run.folder / "nonfinite" / "step-1-rank-0.bin"
    assert "trainer 0" in last
    assert "step 1: the loss is nan" in last
    assert str(path) in last
    saved = batch_file.load(path)
    assert (saved.step, saved.version, len(saved.groups)) == (1, 1, 4)
    assert not any(np.isfinite(own).any() for own in saved.advantages)
    assert [row["step"] for row in run.metrics()] == [0]


def test_or_its_update_is_skipped_and_counted_and_the_run_goes_on(tmp_path: Path) -> None:
    run = tiny_run(
        tmp_path,
        algorithm={"name": "tests.tiny_algorithms:broken_from_the_second_batch"},
        trainer={"nonfinite": "skip"},
    )
    done = run.run()
    assert done.returncode == 0, done.stderr
    rows = run.metrics()
    assert [row["nonfinite"] for row in rows] == [0, 1, 1, 1]
    assert [row["policy_version"] for row in rows] == [0, 1, 2, 3]
    assert rows[1]["loss"] is None
    assert rows[2]["logprob_abs_diff"] < 1e-4  # the weights are those of version 1 still
    assert json.loads((run.folder / "summary.json").read_text())["nonfinite_steps"] == 3
