"""Dr. GRPO: GRPO without its two biases, the division by the group's deviation and by the sample's length.

Liu et al., "Understanding R1-Zero-Like Training" (arXiv:2503.20783), section 3.2. Sums over samples are divided by the
longest completion (`rollout.max_tokens`), as in the authors' code: a constant, for the scale of the gradient only.
"""

from __future__ import annotations

from aoffpolicy.algorithms.advantages import group_relative
from aoffpolicy.algorithms.recipe import Recipe, clip_range, own
from aoffpolicy.algorithms.surrogate import clipped_ratio
from aoffpolicy.config import Config


def dr_grpo(config: Config) -> Recipe:
    return Recipe(
        config=config,
        estimator=group_relative(normalize=own(config.algorithm.normalize_std, False)),
        surrogate=clipped_ratio(*clip_range(config, 0.2, 0.2)),
        aggregation="sequence_budget",
    )
