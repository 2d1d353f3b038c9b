"""Algorithms: how rewards become advantages, and how advantages become a loss. One file each, with its paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from aoffpolicy.config import Algorithm as AlgorithmConfig
from aoffpolicy.registry import load
from aoffpolicy.samples import SampleGroup

if TYPE_CHECKING:
    import torch


class Algorithm(Protocol):
    """Built from the config's [algorithm] section; the controller uses `advantages`, trainer ranks use `loss`."""

    def __init__(self, config: AlgorithmConfig) -> None: ...

    def advantages(self, groups: Sequence[SampleGroup]) -> tuple[np.ndarray, ...]:
        """float32 [G] for each group, from the rewards of the whole batch (numpy only)."""
        ...

    def loss(
        self,
        logprobs_N: torch.Tensor,
        behaviour_N: torch.Tensor,
        advantage_N: torch.Tensor,
        reference_N: torch.Tensor | None,
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """Loss of each trained token [N], and sums over tokens to be reported as means, without gradient."""
        ...


def build(config: AlgorithmConfig) -> Algorithm:
    """The algorithm that the config names: a name in the registry, or package.module:Class.

    Raises:
        ConfigError: There is none of this name.
    """
    algorithm: Algorithm = load("algorithm.name", config.name)(config)
    return algorithm
