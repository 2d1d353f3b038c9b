"""Checkpoints that are there whole or not at all: written beside their place, then renamed into it.

`<run>/checkpoints/step-<n>/`: the sharded model, optimizer and schedule (torch.distributed.checkpoint, which reshards
on load), `rng-<rank>.pt`, and `scheduler.bin`, the scheduler's state that belongs to exactly these weights.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from aoffpolicy.errors import CheckpointError
from aoffpolicy.trainer.backend import Backend

SCHEDULER_STATE = "scheduler.bin"
_NAME = re.compile(r"step-(\d+)")


def save(backend: Backend, path: Path, scheduler_state: bytes) -> None:
    """Write a checkpoint; a collective of all trainer ranks.

    Args:
        backend: What to store.
        path: The folder that appears when everything is written and on disk.
        scheduler_state: Stored beside the weights.

    Raises:
        CheckpointError: It could not be written; names the folder.
    """
    partial = path.with_name(f".{path.name}.partial")
    rank = dist.get_rank()
    try:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            (partial / SCHEDULER_STATE).write_bytes(scheduler_state)
        dist.barrier()
        dcp.save(_state(backend), checkpoint_id=partial)
        torch.save(torch.get_rng_state(), partial / f"rng-{rank}.pt")
        dist.barrier()
        if rank == 0:
            _sync_to_disk(partial)
            shutil.rmtree(path, ignore_errors=True)
            partial.rename(path)
            _sync_to_disk(path.parent)
        dist.barrier()
    except OSError as error:
        raise CheckpointError(f"{path} could not be written: {error}") from error


def load(backend: Backend, path: Path) -> bytes:
    """Load a checkpoint, also one of another number of ranks; a collective.

    Returns:
        The scheduler's state that was stored with it.

    Raises:
        CheckpointError: It cannot be read; names the folder.
    """
    try:
        state = _state(backend)
        dcp.load(state, checkpoint_id=path)
        set_state_dict(
            backend.policy,
            backend.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        backend.schedule.load_state_dict(state["schedule"])
        rng = path / f"rng-{dist.get_rank()}.pt"
        if rng.exists():
            torch.set_rng_state(torch.load(rng, weights_only=True))
        return (path / SCHEDULER_STATE).read_bytes()
    except (OSError, dcp.CheckpointException) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def latest(folder: Path) -> Path | None:
    """The newest whole checkpoint in a run's `checkpoints` folder."""
    return max(_whole(folder), key=_step, default=None)


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints."""
    for path in sorted(_whole(folder), key=_step)[:-keep]:
        shutil.rmtree(path)


def _whole(folder: Path) -> list[Path]:
    return [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)]


def _step(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def _state(backend: Backend) -> dict[str, Any]:
    model, optimizer = get_state_dict(backend.policy, backend.optimizer)
    return {"model": model, "optimizer": optimizer, "schedule": backend.schedule.state_dict()}


def _sync_to_disk(folder: Path) -> None:
    for path in (*folder.glob("*"), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
