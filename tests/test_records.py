"""What a record says, and the verdict over many of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aoffpolicy import SchedulerSettings, verdict
from tests.simulated import SimulatedRoles, World, always, drive, prompts, run_virtually

DESIGN_KEYS = {
    *("step", "policy_version", "skipped", "reward_mean", "reward_std", "staleness_max", "staleness_mean", "time_step"),
    *("time_generate", "time_train", "time_sync", "time_load", "time_wait_rollout", "time_wait_trainer"),
    *("overlap_efficiency", "prompt_tokens", "completion_tokens", "truncated_fraction", "loss"),
}


def records(staleness: int = 1, **seconds: float) -> Any:
    settings = SchedulerSettings(steps=6, prompts_per_step=2, max_staleness=staleness)
    roles = SimulatedRoles(World(), always(**seconds))
    return run_virtually(lambda: drive(roles, settings, prompts(100))).records


def test_a_row_has_every_key_of_the_schema_and_is_json() -> None:
    row = records(generate=1.0, train=1.0)[0].as_row()
    assert set(row) >= DESIGN_KEYS
    assert json.loads(json.dumps(row, allow_nan=False)) == row


def test_figures_of_a_batch_are_over_its_samples_and_tokens() -> None:
    row = records(generate=1.0, train=1.0)[2].as_row()
    assert (row["reward_mean"], row["reward_std"]) == (0.5, 0.5)
    assert (row["prompt_tokens"], row["completion_tokens"], row["truncated_fraction"]) == (2 * 3, 2 * 2 * 2, 0.0)
    assert (row["staleness_max"], row["staleness_mean"]) == (1, 1.0)


def test_every_second_of_a_step_is_named() -> None:
    record = records(generate=2.0, train=1.0, send=0.25, load=0.5)[2]
    assert record.time_step == pytest.approx(2.75)
    assert (record.time_train, record.time_sync, record.time_load) == pytest.approx((1.0, 0.25, 0.5))
    assert record.time_wait_rollout == pytest.approx(1.5)
    assert record.time_wait_trainer == pytest.approx(0.0)
    assert record.overlap_efficiency == pytest.approx(2.0 / 2.75)


@pytest.mark.parametrize(
    ("seconds", "staleness", "said"),
    [
        ({"generate": 3.0, "train": 1.0}, 1, "rollout-bound: trainer idle 67%; rollouts twice as fast would save"),
        ({"generate": 1.0, "train": 4.0}, 1, "trainer-bound: rollouts idle 75%; a trainer twice as fast would save"),
        ({"generate": 1.0, "train": 1.0}, 1, "balanced"),
        ({"generate": 1.0, "train": 1.0, "send": 1.0, "load": 1.0}, 1, "sync-bound: sending and loading"),
        ({"generate": 1.0, "train": 1.0}, 0, "sequential: generating 50%, training 50%"),
    ],
)
def test_the_verdict_names_who_is_waited_for(seconds: dict[str, float], staleness: int, said: str) -> None:
    assert verdict(records(staleness, **seconds)).startswith(said)


@pytest.mark.parametrize(("workers", "generate"), [(1, 3.0), (2, 2.0), (4, 1.5)])
def test_the_advice_on_workers_is_what_more_workers_really_save(workers: int, generate: float) -> None:
    """Generation gets faster in proportion to the workers; the prediction is compared with a run that has them."""
    now = records(generate=generate, train=1.0)
    said = verdict(now, rollout_workers=workers)
    more, saving = int(said.split(";")[1].split()[0]), int(said.split("about ")[1].split("%")[0]) / 100
    then = records(generate=generate * workers / (workers + more), train=1.0)
    really = 1 - then[2].time_step / now[2].time_step
    assert saving == pytest.approx(really, abs=0.006)


def test_too_few_steps_give_no_verdict() -> None:
    assert "too few" in verdict(records(generate=1.0)[:1])
