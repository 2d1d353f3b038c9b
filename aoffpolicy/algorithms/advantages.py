"""How the rewards of a batch become advantages: one function for each baseline, numpy only.

Shape letters: G samples of a group, N trained tokens of a group (those of its first sample first). Estimators get the
scores of the whole batch and return float32 [N] for each group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from aoffpolicy.samples import SampleGroup

GROUP_STD_FLOOR = 1e-4
"""Added to the deviation of a group's rewards; what is divided is 0 where the deviation is."""
BATCH_STD_FLOOR = 1e-8
"""Added to the deviation over a batch's tokens."""


@dataclass(frozen=True, slots=True)
class Scores:
    """What one group earned."""

    reward_G: np.ndarray
    """float64, shaped."""
    length_G: np.ndarray
    """int64, trained tokens of each sample."""
    penalty_N: np.ndarray
    """float64, what each token loses, for its KL to the reference; zeros where there is none."""

    @property
    def return_G(self) -> np.ndarray:
        """Reward of each whole sample with its tokens' penalties taken off."""
        lost = [own.sum() for own in self.by_sample(self.penalty_N)]
        return np.asarray(self.reward_G - np.array(lost, dtype=np.float64))

    @property
    def return_N(self) -> np.ndarray:
        """Undiscounted return of each token: the sample's reward less the penalties from this token on."""
        ahead = [own[::-1].cumsum()[::-1] for own in self.by_sample(self.penalty_N)]
        return np.asarray(np.repeat(self.reward_G, self.length_G) - np.concatenate([np.zeros(0), *ahead]))

    def by_sample(self, values_N: np.ndarray) -> list[np.ndarray]:
        return np.split(values_N, np.cumsum(self.length_G)[:-1])


Estimator = Callable[[Sequence[Scores]], tuple[np.ndarray, ...]]
Penalty = Callable[[np.ndarray], np.ndarray]
"""What is added to the rewards of samples of these lengths."""


def scores_of(
    groups: Sequence[SampleGroup], reference: Sequence[np.ndarray] | None, kl_coef: float, shaping: Penalty
) -> list[Scores]:
    """Rewards of a batch, shaped by length, and its tokens' penalties.

    Args:
        groups: The whole batch.
        reference: float32 [N] for each group, the reference model's log-probabilities; None: no penalty.
        kl_coef: Weight of k1 = log(behaviour / reference), the unbiased estimate of the behaviour policy's KL.
        shaping: Of the rewards, by length.
    """
    scores = []
    for index, group in enumerate(groups):
        length_G = np.array([sample.completion_tokens for sample in group.samples], dtype=np.int64)
        reward_G = np.array([sample.reward for sample in group.samples], dtype=np.float64)
        penalty_N = np.zeros(length_G.sum())
        if reference is not None:
            behaviour = [sample.behaviour_logprobs_T[sample.loss_mask_T] for sample in group.samples]
            penalty_N = kl_coef * (np.concatenate(behaviour).astype(np.float64) - reference[index])
        scores.append(Scores(reward_G + shaping(length_G), length_G, penalty_N))
    return scores


def overlong(max_tokens: int, cache_tokens: int) -> Penalty:
    """DAPO's soft punishment of long samples (arXiv:2503.14476, equation 13): from 0 down to -1.

    Args:
        max_tokens: Length at which it is -1.
        cache_tokens: Tokens before that over which it falls; 0: no punishment at all.
    """

    def penalty(length_G: np.ndarray) -> np.ndarray:
        if not cache_tokens:
            return np.zeros(len(length_G))
        return np.clip((max_tokens - cache_tokens - length_G) / cache_tokens, -1.0, 0.0)

    return penalty


# --- Estimators ----------------------------------------------------------------------------------------------------


def group_relative(*, normalize: bool) -> Estimator:
    """R - mean of the group, divided by the group's standard deviation (GRPO, arXiv:2402.03300) or not (Dr. GRPO)."""

    def of_group(return_G: np.ndarray) -> np.ndarray:
        centred_G = return_G - return_G.mean()
        return np.asarray(centred_G / (return_G.std() + GROUP_STD_FLOOR) if normalize else centred_G)

    return lambda batch: tuple(_spread(of_group(scores.return_G), scores) for scores in batch)


def leave_one_out(batch: Sequence[Scores]) -> tuple[np.ndarray, ...]:
    """R - mean of the group's other samples (RLOO, arXiv:2402.14740, section 2.3); a group of one has no baseline."""

    def of_group(return_G: np.ndarray) -> np.ndarray:
        return np.asarray(return_G - (return_G.sum() - return_G) / max(1, len(return_G) - 1))

    return tuple(_spread(of_group(scores.return_G), scores) for scores in batch)


def batch_normalised(*, group_baseline: bool) -> Estimator:
    """Each token's return, normalised over all tokens of the batch (REINFORCE++, arXiv:2501.03262).

    Args:
        group_baseline: Take the group's mean reward off first ("REINFORCE++ with baseline").
    """

    def estimate(batch: Sequence[Scores]) -> tuple[np.ndarray, ...]:
        returns = [s.return_N - (s.reward_G.mean() if group_baseline else 0.0) for s in batch]
        tokens = np.concatenate([np.zeros(0), *returns])
        if not len(tokens):
            return tuple(np.zeros(0, np.float32) for _ in batch)
        mean, deviation = tokens.mean(), tokens.std() + BATCH_STD_FLOOR
        return tuple(((own - mean) / deviation).astype(np.float32) for own in returns)

    return estimate


def _spread(advantage_G: np.ndarray, scores: Scores) -> np.ndarray:
    return np.repeat(advantage_G, scores.length_G).astype(np.float32)
