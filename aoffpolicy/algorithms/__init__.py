"""Algorithms: how rewards become advantages, and how advantages become a loss. One file each, with its paper.

Each is a `Recipe` of parts: `advantages`, `surrogate`, `aggregation`, `correction`. docs/algorithms.md lists them all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from aoffpolicy.algorithms.tokens import Tokens, Totals
from aoffpolicy.config import Config
from aoffpolicy.registry import load
from aoffpolicy.samples import SampleGroup

if TYPE_CHECKING:
    import torch

__all__ = ["Algorithm", "Tokens", "Totals", "build"]


class Algorithm(Protocol):
    """Made from the resolved config; the controller uses `advantages`, trainer ranks use `loss`."""

    @property
    def filter_zero_variance(self) -> bool:
        """Whether the scheduler leaves out groups whose rewards are all equal."""
        ...

    @property
    def wants_reference(self) -> bool:
        """Whether `advantages` needs the reference model's log-probabilities."""
        ...

    def advantages(
        self, groups: Sequence[SampleGroup], reference: Sequence[np.ndarray] | None = None
    ) -> tuple[np.ndarray, ...]:
        """Advantages of the whole batch (numpy only).

        Args:
            groups: The batch.
            reference: float32 [N] for each group, if asked for by `wants_reference`.

        Returns:
            float32 [N] for each group: one for each trained token, those of the first sample first.
        """
        ...

    def loss(self, tokens: Tokens, totals: Totals) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """Loss of a micro-batch's tokens.

        Args:
            tokens: The micro-batch.
            totals: What to divide by, of the global batch.

        Returns:
            [N], whose sum over the global batch is the loss, and by name what is to be reported as a mean over tokens
            ([N] each, without gradient; bool for a fraction).
        """
        ...


def build(config: Config) -> Algorithm:
    """The algorithm that the config names: a name in the registry, or package.module:callable.

    Raises:
        ConfigError: There is none of this name, or its keys contradict each other.
    """
    algorithm: Algorithm = load("algorithm.name", config.algorithm.name)(config)
    return algorithm
