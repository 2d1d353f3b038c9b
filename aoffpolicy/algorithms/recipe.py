"""An algorithm put together from its parts: advantages, surrogate, aggregation, correction, KL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from aoffpolicy.algorithms.advantages import Estimator, overlong, scores_of
from aoffpolicy.algorithms.aggregation import aggregations
from aoffpolicy.algorithms.correction import LEVELS, outside, truncated
from aoffpolicy.algorithms.surrogate import Surrogate, log_likelihood
from aoffpolicy.algorithms.tokens import Tokens, Totals
from aoffpolicy.config import Algorithm as Section
from aoffpolicy.config import Config
from aoffpolicy.errors import ConfigError
from aoffpolicy.samples import SampleGroup

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The parts of an algorithm, and what they are where the config leaves a key unset.

    Every key of [algorithm] that is set has its say over the fields with its name.

    Raises:
        ConfigError: Keys contradict each other.
    """

    config: Config
    estimator: Estimator
    surrogate: Surrogate
    aggregation: str
    """Name of an aggregation."""
    correction: str = "none"
    """"none", or the level of the importance weights."""
    dynamic_sampling: bool = False
    """Groups whose rewards are all equal are left out and replaced."""
    overlong_share: float = 0.0
    """Share of the longest completion over which long ones are punished more and more."""

    def __post_init__(self) -> None:
        section = self._section
        has_ratio = self.surrogate is not log_likelihood
        if section.ratio == "proximal" and not has_ratio:
            raise ConfigError([f"algorithm.ratio: {section.name} has no ratio in its loss; leave it out"])
        if self._correction != "none" and has_ratio and section.ratio == "behaviour":
            raise ConfigError(
                [
                    f"algorithm.correction: the ratio of {section.name} already is against the behaviour policy, so "
                    'weights would correct twice; set algorithm.ratio = "proximal" with it'
                ]
            )

    @property
    def _section(self) -> Section:
        return self.config.algorithm

    @property
    def _correction(self) -> str:
        return self._section.correction or self.correction

    # --- Algorithm: what the scheduler and the controller ask --------------------------------------------------------

    @property
    def filter_zero_variance(self) -> bool:
        return own(self._section.filter_zero_variance, self.dynamic_sampling)

    @property
    def wants_reference(self) -> bool:
        return self._section.kl_coef > 0 and self._section.kl_in == "reward"

    def advantages(
        self, groups: Sequence[SampleGroup], reference: Sequence[np.ndarray] | None = None
    ) -> tuple[np.ndarray, ...]:
        max_tokens = self.config.rollout.max_tokens
        cache = own(self._section.overlong_tokens, round(max_tokens * self.overlong_share))
        return self.estimator(scores_of(groups, reference, self._section.kl_coef, overlong(max_tokens, cache)))

    # --- Algorithm: what trainer ranks ask ---------------------------------------------------------------------------

    def loss(self, tokens: Tokens, totals: Totals) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """-(weight * not masked * surrogate) + kl_coef * k3, each token weighted by the aggregation.

        k3 is that of Schulman, "Approximating KL Divergence" (2020), on the tokens as sampled.
        """
        section = self._section
        old_N = tokens.proximal_N if section.ratio == "proximal" else tokens.behaviour_N
        objective_N, clipped_N = self.surrogate(tokens, old_N)
        metrics = {"clip_fraction": clipped_N}

        corrected_N = tokens.proximal_N if section.ratio == "proximal" else tokens.logprobs_N.detach()
        gap_N = corrected_N - tokens.behaviour_N
        weight_N = gap_N.new_ones(gap_N.shape)
        if self._correction != "none":
            weight_N, truncated_N = truncated(LEVELS[self._correction](tokens, gap_N), section.correction_cap)
            metrics |= {"correction_weight": weight_N, "weight_truncated_fraction": truncated_N}
        if section.mask != "none":
            masked_N = outside(LEVELS[section.mask](tokens, gap_N), section.mask_low, section.mask_high)
            weight_N = weight_N.masked_fill(masked_N, 0.0)
            metrics["masked_fraction"] = masked_N

        loss_N = -(objective_N * weight_N)
        if tokens.reference_N is not None:
            gap_N = tokens.reference_N - tokens.logprobs_N
            kl_N = gap_N.exp() - gap_N - 1
            loss_N = loss_N + section.kl_coef * kl_N
            metrics["kl_reference"] = kl_N.detach()
        chosen = own(section.aggregation, self.aggregation)
        return loss_N * aggregations(self.config.rollout.max_tokens)[chosen](tokens, totals), metrics


def own(value: T | None, default: T) -> T:
    """What the config says, or the algorithm's own where it says nothing."""
    return default if value is None else value


def clip_range(config: Config, low: float, high: float) -> tuple[float, float]:
    """Both ends of the clipping range, from the config or the algorithm's own."""
    return own(config.algorithm.clip_low, low), own(config.algorithm.clip_high, high)


def without(config: Config, *keys: str) -> None:
    """Refuse keys of [algorithm] that an algorithm has no use for.

    Raises:
        ConfigError: One is set; all such are named.
    """
    name = config.algorithm.name
    set_keys = [key for key in keys if getattr(config.algorithm, key) is not None]
    if set_keys:
        raise ConfigError([f"algorithm.{key}: {name} has no use for it; leave it out" for key in set_keys])
