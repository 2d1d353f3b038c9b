from __future__ import annotations

from pathlib import Path

from aoffpolicy.config import Config
from aoffpolicy.plan import make_plan


def config(**sections: dict[str, object]) -> Config:
    base = {"model": {"path": Path("m")}, "data": {"source": "reasoning_gym:chain_sum"}}
    for role in ("trainer", "rollout"):
        sections.setdefault(role, {}).setdefault("device", "cpu")
    return Config.model_validate({**base, **sections})


def test_on_two_cores_trainer_and_rollout_have_one_each() -> None:
    trainer, rollout, reward = make_plan(config(), cores=(4, 7))
    assert (trainer.role, trainer.cores, trainer.threads) == ("trainer", (4,), 1)
    assert (rollout.role, rollout.cores, rollout.threads) == ("rollout", (7,), 1)
    assert (reward.role, reward.cores) == ("reward", ())


def test_more_processes_than_cores_share_them_in_turn() -> None:
    plan = make_plan(config(trainer={"ranks": 2}, rollout={"workers": 2}), cores=(0, 1))
    assert [p.cores for p in plan[:4]] == [(0,), (1,), (0,), (1,)]


def test_asked_for_threads_are_given_and_wrap_around() -> None:
    plan = make_plan(config(trainer={"threads": 2}, rollout={"threads": 2}), cores=(0, 1))
    assert [(p.cores, p.threads) for p in plan[:2]] == [((0, 1), 2), ((0, 1), 2)]


def test_accelerators_go_to_trainer_ranks_first_then_to_engines() -> None:
    plan = make_plan(
        config(trainer={"ranks": 2, "device": "npu"}, rollout={"workers": 2, "tensor_parallel": 4, "device": "npu"}),
        cores=(0, 1),
    )
    assert [p.device for p in plan[:4]] == ["npu:0", "npu:1", "npu:2", "npu:6"]
