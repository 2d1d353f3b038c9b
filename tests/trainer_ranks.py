"""FSDP2 ranks in processes of their own, without a controller."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from aoffpolicy.config import Algorithm, Config
from aoffpolicy.controller import balance, group_tokens
from aoffpolicy.samples import SampleGroup
from aoffpolicy.trainer import checkpoint
from aoffpolicy.trainer.fsdp2 import Fsdp2
from tests.groups import batch

TIMEOUT_S = 90
Weights = dict[str, torch.Tensor]
Outcome = dict[str, Any]


def on_ranks(ranks: int, job: Callable[..., Outcome], *arguments: Any) -> list[Outcome]:
    """Run `job(*arguments)` on every rank of a gloo group of spawned processes; returns what each rank returned."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_be_rank, args=(rank, ranks, Path(folder), job, arguments)) for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(TIMEOUT_S)
            if process.is_alive():
                process.kill()
        assert [process.exitcode for process in processes] == [0] * ranks
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


def _be_rank(rank: int, ranks: int, folder: Path, job: Callable[..., Outcome], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), ranks), rank=rank, world_size=ranks)
    torch.save(job(*arguments), folder / f"{rank}.pt")
    dist.barrier()


def config(model: Path, **trainer: Any) -> Config:
    """Keys of [trainer] and [algorithm], which share no name."""
    algorithm = {name: trainer.pop(name) for name in set(trainer) & set(Algorithm.model_fields)}
    return Config.model_validate(
        {
            "model": {"path": model},
            "data": {"source": "reasoning_gym:x"},
            "trainer": {"lr": 1e-3, **trainer},
            "algorithm": algorithm,
        }
    )


def train_steps(
    settings: Config,
    steps: int,
    *,
    groups: tuple[SampleGroup, ...] | None = None,
    save_to: Path | None = None,
    resume_from: Path | None = None,
) -> Outcome:
    """Train this rank's shard of the same batch again and again; returns metrics and the whole weights."""
    backend = Fsdp2(settings, torch.device("cpu"))
    state = checkpoint.load(backend, resume_from) if resume_from else b""
    groups = batch() if groups is None else groups
    advantages = backend.algorithm.advantages(groups)
    mine = balance([group_tokens(group) for group in groups], backend.shards)[backend.shard]
    ours = [groups[i] for i in mine], [advantages[i] for i in mine]
    metrics = [backend.train(*ours, temperature=1.0, version=1) for _ in range(steps)]
    if save_to is not None:
        checkpoint.save(backend, save_to, b"the scheduler's state")
    weights = {name: tensor.clone() for name, tensor in backend.export_weights()}
    return {"metrics": metrics, "weights": weights, "state": state}
