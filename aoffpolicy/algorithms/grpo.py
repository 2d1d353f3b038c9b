"""GRPO: rewards relative to their group, in units of its deviation; a clipped ratio; samples weigh the same.

Shao et al., "DeepSeekMath" (arXiv:2402.03300), section 4.1, equation 3, with outcome rewards. The ratio is taken
against the behaviour policy that sampled the tokens, which in one-step-off-policy training is an older version.
"""

from __future__ import annotations

from aoffpolicy.algorithms.advantages import group_relative
from aoffpolicy.algorithms.recipe import Recipe, clip_range, own
from aoffpolicy.algorithms.surrogate import clipped_ratio
from aoffpolicy.config import Config


def grpo(config: Config) -> Recipe:
    return Recipe(
        config=config,
        estimator=group_relative(normalize=own(config.algorithm.normalize_std, True)),
        surrogate=clipped_ratio(*clip_range(config, 0.2, 0.2)),
        aggregation="sequence_mean",
    )
