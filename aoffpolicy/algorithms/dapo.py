"""DAPO: GRPO with a higher upper clip, the mean over tokens, dynamic sampling, and punishment of overlong completions.

Yu et al., "DAPO" (arXiv:2503.14476), section 3. Dynamic sampling is the scheduler's filter of groups whose rewards are
all equal (by their rewards before shaping, as in the paper). Its formula's token mean is one prompt's; like the
authors' code we take it over the whole batch. The last fifth of `rollout.max_tokens` is punished, as in the paper
(4,096 of 20,480).
"""

from __future__ import annotations

from aoffpolicy.algorithms.advantages import group_relative
from aoffpolicy.algorithms.recipe import Recipe, clip_range, own
from aoffpolicy.algorithms.surrogate import clipped_ratio
from aoffpolicy.config import Config


def dapo(config: Config) -> Recipe:
    return Recipe(
        config=config,
        estimator=group_relative(normalize=own(config.algorithm.normalize_std, True)),
        surrogate=clipped_ratio(*clip_range(config, 0.2, 0.28)),
        aggregation="token_mean",
        dynamic_sampling=True,
        overlong_share=0.2,
    )
