from __future__ import annotations

from pathlib import Path

import pytest

from aoffpolicy import launch
from aoffpolicy.config import Config
from aoffpolicy.errors import ConfigError
from aoffpolicy.plan import make_plan, with_weights_backend

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.toml"))


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


def test_weights_go_over_the_backend_of_the_device_that_all_are_on() -> None:
    def backend(**sections: dict[str, object]) -> str:
        wanted = config(**sections)
        return with_weights_backend(wanted, make_plan(wanted, cores=(0,))).weights.backend

    cuda = {"device": "cuda"}
    assert backend() == "gloo"
    assert backend(trainer=cuda) == "gloo"
    assert backend(trainer=cuda, rollout=cuda, weights={"backend": "gloo"}) == "gloo"
    with pytest.raises(ConfigError, match="device cuda takes nccl, which this version does not have"):
        backend(trainer=cuda, rollout=cuda)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_can_be_planned(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert launch.main([str(path), "--model.path", str(tmp_path), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "trainer" in said and "rollout" in said and 'backend = "gloo"' in said
