"""Weights for tokens that another policy sampled: truncated importance sampling, and masks of extreme ratios.

A ratio here is (corrected policy) / (behaviour policy), without gradient. A masked token counts nothing, and the
loss is still divided by all tokens, so that what a batch is divided by is known before its ratios are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from aoffpolicy.algorithms.tokens import Tokens

if TYPE_CHECKING:
    import torch

Level = Callable[[Tokens, "torch.Tensor"], "torch.Tensor"]
"""From the tokens' log-ratios [N] to the ratio that each is judged by [N]."""


def of_token(tokens: Tokens, gap_N: torch.Tensor) -> torch.Tensor:
    """The token's own ratio."""
    return gap_N.exp()


def of_sequence(tokens: Tokens, gap_N: torch.Tensor) -> torch.Tensor:
    """The product of the ratios of the token's sequence."""
    return tokens.sum_by_sequence(gap_N).exp()[tokens.sequence_N]


def of_sequence_mean(tokens: Tokens, gap_N: torch.Tensor) -> torch.Tensor:
    """The geometric mean of the ratios of the token's sequence, which does not grow with its length."""
    return tokens.mean_by_sequence(gap_N).exp()[tokens.sequence_N]


LEVELS: Mapping[str, Level] = {"token": of_token, "sequence": of_sequence, "sequence_mean": of_sequence_mean}


def truncated(ratio_N: torch.Tensor, cap: float) -> tuple[torch.Tensor, torch.Tensor]:
    """min(ratio, cap), and which were truncated (Ionides 2008; V-trace, arXiv:1802.01561, equation 1).

    Args:
        ratio_N: Of any level.
        cap: 0: none, the whole ratio.
    """
    weight_N = ratio_N.clamp(max=cap) if cap else ratio_N
    return weight_N, weight_N != ratio_N


def outside(ratio_N: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Which ratios lie outside [low, high], both ends allowed (IcePop, arXiv:2510.18855)."""
    return (ratio_N < low) | (ratio_N > high)
