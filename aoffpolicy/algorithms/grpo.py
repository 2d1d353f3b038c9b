"""GRPO: advantages relative to the group, a clipped importance ratio, the token mean over the whole batch.

Shao et al., "DeepSeekMath" (arXiv:2402.03300), section 4.1; the ratio is taken against the behaviour policy that
sampled the tokens, which in one-step-off-policy training is an older version. The KL estimator is k3 of Schulman,
"Approximating KL Divergence" (2020).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from aoffpolicy.config import Algorithm as AlgorithmConfig
from aoffpolicy.samples import SampleGroup

if TYPE_CHECKING:
    import torch

STD_FLOOR = 1e-4
"""Added to the deviation of a group's rewards."""


class Grpo:
    def __init__(self, config: AlgorithmConfig) -> None:
        self._config = config

    def advantages(self, groups: Sequence[SampleGroup]) -> tuple[np.ndarray, ...]:
        """(reward - group mean) / (group standard deviation + 1e-4), or without the division; float32 [G] each."""
        return tuple(self._advantages_of(group) for group in groups)

    def _advantages_of(self, group: SampleGroup) -> np.ndarray:
        rewards_G = np.array([sample.reward for sample in group.samples], dtype=np.float64)
        centred_G = rewards_G - rewards_G.mean()
        if self._config.normalize_std:
            centred_G /= rewards_G.std() + STD_FLOOR
        return np.asarray(centred_G, dtype=np.float32)

    def loss(
        self,
        logprobs_N: torch.Tensor,
        behaviour_N: torch.Tensor,
        advantage_N: torch.Tensor,
        reference_N: torch.Tensor | None,
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        import torch

        low, high = 1 - self._config.clip_low, 1 + self._config.clip_high
        ratio_N = torch.exp(logprobs_N - behaviour_N)
        clipped_N = ratio_N.clamp(low, high)
        surrogate_N = torch.minimum(ratio_N * advantage_N, clipped_N * advantage_N)
        loss_N = -surrogate_N
        metrics = {"clip_fraction": (clipped_N * advantage_N < ratio_N * advantage_N).float()}
        if reference_N is not None:
            gap_N = reference_N - logprobs_N
            kl_N = torch.exp(gap_N) - gap_N - 1
            loss_N = loss_N + self._config.kl_coef * kl_N
            metrics["kl_reference"] = kl_N
        return loss_N, {name: values.detach().sum() for name, values in metrics.items()}
