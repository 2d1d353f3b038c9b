"""What a trainer backend is: one rank's model, optimizer and schedule behind one small protocol."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from aoffpolicy.config import Config
from aoffpolicy.registry import load
from aoffpolicy.samples import SampleGroup


class Backend(Protocol):
    """Built as `Class(config, device)` once the default process group of the trainer ranks exists.

    Every rank calls every method in the same order: each may be a collective.
    """

    policy: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: LRScheduler

    @property
    def shard(self) -> int:
        """Which part of a batch this rank takes; ranks of one model-parallel group share one."""
        ...

    @property
    def shards(self) -> int: ...

    def train(
        self, groups: Sequence[SampleGroup], advantages: Sequence[np.ndarray], temperature: float, version: int
    ) -> dict[str, float]:
        """Train this shard; returns metrics of the global batch.

        Args:
            groups: The shard; may be empty.
            advantages: float32 [N] for each group, one for each trained token.
            temperature: What the rollout sampled with.
            version: Policy version that is trained.

        Raises:
            NonfiniteError: The loss or gradient is not finite, and the config says to stop; raised on every rank.
        """
        ...

    def reference_logprobs(self, groups: Sequence[SampleGroup], temperature: float) -> tuple[np.ndarray, ...]:
        """float32 [N] for each group: the initial model's log-probabilities of its trained tokens.

        Raises:
            TrainerError: There is no reference model.
        """
        ...

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, tensor with the whole shape) in the order of `export_weights`; moves nothing."""
        ...

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, whole tensor), layer by layer."""
        ...


def build(config: Config, device: torch.device) -> Backend:
    """The backend that the config names: a name in the registry, or package.module:Class."""
    backend: Backend = load("trainer.backend", config.trainer.backend)(config, device)
    return backend
