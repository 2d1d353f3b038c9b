"""CISPO: the importance weight is clipped, not the token's update, so that every token keeps its gradient.

MiniMax, "MiniMax-M1" (arXiv:2506.13585), section 3.1, equations 4 and 5: no lower bound, and an upper one to be tuned.
The upper one here, 5, lies in the range that Khatri et al., "ScaleRL" (arXiv:2510.13786) found to make no difference.
"""

from __future__ import annotations

from aoffpolicy.algorithms.advantages import group_relative
from aoffpolicy.algorithms.recipe import Recipe, clip_range, own
from aoffpolicy.algorithms.surrogate import clipped_weight
from aoffpolicy.config import Config


def cispo(config: Config) -> Recipe:
    return Recipe(
        config=config,
        estimator=group_relative(normalize=own(config.algorithm.normalize_std, True)),
        surrogate=clipped_weight(*clip_range(config, 1.0, 4.0)),
        aggregation="token_mean",
    )
