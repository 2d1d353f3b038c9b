from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from aoffpolicy.errors import CheckpointError
from aoffpolicy.trainer import checkpoint
from tests.tiny import tiny_llama
from tests.trainer_ranks import Outcome, config, on_ranks, train_steps


@pytest.mark.multiprocess
@pytest.mark.timeout(200)
@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (2, 1), (1, 2)])
def test_a_resumed_trainer_goes_on_as_if_it_had_not_stopped(tmp_path: Path, before: int, after: int) -> None:
    settings = config(tiny_llama(tmp_path / "model"), warmup_steps=10)
    (uninterrupted,) = on_ranks(1, train_steps, settings, 3)
    path = tmp_path / "checkpoints" / "step-2"
    on_ranks(before, partial(train_steps, save_to=path), settings, 2)
    assert [entry.name for entry in path.parent.iterdir()] == ["step-2"]
    resumed = on_ranks(after, partial(train_steps, resume_from=path), settings, 1)

    for outcome in resumed:
        assert outcome["state"] == b"the scheduler's state"
        assert outcome["metrics"][0]["lr"] == uninterrupted["metrics"][2]["lr"]
        assert outcome["metrics"][0]["grad_norm"] == pytest.approx(uninterrupted["metrics"][2]["grad_norm"], rel=1e-4)
        for name, tensor in outcome["weights"].items():
            torch.testing.assert_close(tensor, uninterrupted["weights"][name], atol=1e-5, rtol=1e-4)


@pytest.mark.multiprocess
@pytest.mark.timeout(200)
def test_a_checkpoint_that_fails_half_way_leaves_the_earlier_one_and_no_trace_in_its_place(tmp_path: Path) -> None:
    settings = config(tiny_llama(tmp_path / "model"))
    folder = tmp_path / "checkpoints"
    on_ranks(1, partial(train_steps, save_to=folder / "step-1"), settings, 1)
    (outcome,) = on_ranks(1, save_and_fail, settings, folder / "step-2")
    assert "disk full" in outcome["error"]
    assert checkpoint.latest(folder) == folder / "step-1"
    on_ranks(1, partial(train_steps, save_to=folder / "step-2"), settings, 1)
    assert checkpoint.latest(folder) == folder / "step-2"


def save_and_fail(settings: object, path: Path) -> Outcome:
    def full(folder: Path) -> None:
        raise OSError(28, "disk full")

    checkpoint._sync_to_disk = full
    try:
        train_steps(settings, 1, save_to=path)  # type: ignore[arg-type]
    except CheckpointError as error:
        return {"error": str(error)}
    return {"error": ""}


def test_the_newest_whole_checkpoint_is_found_by_number_and_old_ones_are_pruned(tmp_path: Path) -> None:
    for name in ("step-2", "step-10", "step-9", ".step-11.partial", "step-x"):
        (tmp_path / name).mkdir()
    assert checkpoint.latest(tmp_path) == tmp_path / "step-10"
    checkpoint.prune(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".step-11.partial", "step-10", "step-9", "step-x"]
    assert checkpoint.latest(tmp_path / "absent") is None


@pytest.mark.multiprocess
@pytest.mark.timeout(200)
def test_a_broken_checkpoint_is_named_in_the_error(tmp_path: Path) -> None:
    broken = tmp_path / "step-3"
    broken.mkdir()
    (outcome,) = on_ranks(1, load_and_fail, config(tiny_llama(tmp_path / "model")), broken)
    assert f"{broken} cannot be read" in outcome["error"]


def load_and_fail(settings: object, path: Path) -> Outcome:
    try:
        train_steps(settings, 0, resume_from=path)  # type: ignore[arg-type]
    except CheckpointError as error:
        return {"error": str(error)}
    return {"error": ""}
