"""REINFORCE++: no critic and no group; returns are normalised over all tokens of the batch, and the ratio is clipped.

Hu et al., "REINFORCE++" (arXiv:2501.03262). Its KL belongs in the reward (`algorithm.kl_in = "reward"`), where each
token's return holds the penalties from there on. The variant with a baseline takes the group's mean off first.
"""

from __future__ import annotations

from aoffpolicy.algorithms.advantages import batch_normalised
from aoffpolicy.algorithms.recipe import Recipe, clip_range, without
from aoffpolicy.algorithms.surrogate import clipped_ratio
from aoffpolicy.config import Config


def reinforce_plus_plus(config: Config) -> Recipe:
    return _recipe(config, group_baseline=False)


def reinforce_plus_plus_baseline(config: Config) -> Recipe:
    return _recipe(config, group_baseline=True)


def _recipe(config: Config, *, group_baseline: bool) -> Recipe:
    without(config, "normalize_std")
    return Recipe(
        config=config,
        estimator=batch_normalised(group_baseline=group_baseline),
        surrogate=clipped_ratio(*clip_range(config, 0.2, 0.2)),
        aggregation="token_mean",
    )
