"""RLOO: REINFORCE on whole completions, with the mean reward of the group's other samples as the baseline.

Ahmadian et al., "Back to Basics" (arXiv:2402.14740), section 2.3. Its loss knows no ratio, so samples of an older
policy get truncated importance weights unless `algorithm.correction = "none"`; on-policy all of them are 1.
"""

from __future__ import annotations

from aoffpolicy.algorithms.advantages import leave_one_out
from aoffpolicy.algorithms.recipe import Recipe, without
from aoffpolicy.algorithms.surrogate import log_likelihood
from aoffpolicy.config import Config


def rloo(config: Config) -> Recipe:
    without(config, "normalize_std", "clip_low", "clip_high")
    return Recipe(
        config=config,
        estimator=leave_one_out,
        surrogate=log_likelihood,
        aggregation="sequence_sum",
        correction="token",
    )
