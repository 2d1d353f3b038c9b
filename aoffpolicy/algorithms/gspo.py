"""GSPO: the ratio and its clipping belong to the whole sequence, as the reward does.

Zheng et al., "Group Sequence Policy Optimization" (arXiv:2507.18071), equations 5 to 7; clipping range of section 5.1.
"""

from __future__ import annotations

from aoffpolicy.algorithms.advantages import group_relative
from aoffpolicy.algorithms.recipe import Recipe, clip_range, own
from aoffpolicy.algorithms.surrogate import clipped_sequence_ratio
from aoffpolicy.config import Config


def gspo(config: Config) -> Recipe:
    return Recipe(
        config=config,
        estimator=group_relative(normalize=own(config.algorithm.normalize_std, True)),
        surrogate=clipped_sequence_ratio(*clip_range(config, 3e-4, 4e-4)),
        aggregation="sequence_mean",
    )
