"""What is maximised for each token, by the level of the importance ratio and by what is clipped.

A surrogate gets the tokens and the log-probabilities `old_N` that the ratio is taken against, and returns the objective
of each token [N], with gradient, and which tokens were clipped [N], bool.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from aoffpolicy.algorithms.tokens import Tokens

if TYPE_CHECKING:
    import torch

Surrogate = Callable[[Tokens, "torch.Tensor"], tuple["torch.Tensor", "torch.Tensor"]]


def clipped_ratio(low: float, high: float) -> Surrogate:
    """min(r A, clip(r, 1 - low, 1 + high) A) with the token's ratio r (PPO, arXiv:1707.06347, equation 7)."""

    def surrogate(tokens: Tokens, old_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _pessimistic((tokens.logprobs_N - old_N).exp(), tokens.advantage_N, low, high)

    return surrogate


def clipped_sequence_ratio(low: float, high: float) -> Surrogate:
    """The same with the sequence's ratio, the geometric mean of its tokens' (GSPO, arXiv:2507.18071, equation 7)."""

    def surrogate(tokens: Tokens, old_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ratio_S = tokens.mean_by_sequence(tokens.logprobs_N - old_N).exp()
        return _pessimistic(ratio_S[tokens.sequence_N], tokens.advantage_N, low, high)

    return surrogate


def clipped_weight(low: float, high: float) -> Surrogate:
    """clip(r, 1 - low, 1 + high) A log pi, the clipped ratio without gradient (CISPO, arXiv:2506.13585, equation 4)."""

    def surrogate(tokens: Tokens, old_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ratio_N = (tokens.logprobs_N.detach() - old_N).exp()
        weight_N = ratio_N.clamp(1 - low, 1 + high)
        return weight_N * tokens.advantage_N * tokens.logprobs_N, weight_N != ratio_N

    return surrogate


def log_likelihood(tokens: Tokens, old_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A log pi (REINFORCE); there is no ratio, and nothing to clip."""
    objective_N = tokens.advantage_N * tokens.logprobs_N
    return objective_N, objective_N != objective_N


def _pessimistic(
    ratio_N: torch.Tensor, advantage_N: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    whole_N = ratio_N * advantage_N
    clipped_N = ratio_N.clamp(1 - low, 1 + high) * advantage_N
    return whole_N.minimum(clipped_N), clipped_N < whole_N
