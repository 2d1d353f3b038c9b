"""How much each token's loss counts, so that the sum over the tokens of the global batch is the batch's loss.

Weights depend on lengths and on the size of the global batch only, never on a rank's or a micro-batch's share of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from aoffpolicy.algorithms.tokens import Tokens, Totals

if TYPE_CHECKING:
    import torch

Aggregation = Callable[[Tokens, Totals], "torch.Tensor"]
"""Weight of each token, [N]."""


def token_mean(tokens: Tokens, totals: Totals) -> torch.Tensor:
    """1 / tokens of the batch: long samples count more (DAPO, arXiv:2503.14476, section 3.3)."""
    return tokens.behaviour_N.new_full(tokens.behaviour_N.shape, 1 / max(1, totals.tokens))


def sequence_mean(tokens: Tokens, totals: Totals) -> torch.Tensor:
    """1 / (samples of the batch * tokens of the sample): samples count the same (GRPO, arXiv:2402.03300)."""
    lengths_S = tokens.lengths_S(tokens.behaviour_N)
    return 1 / (lengths_S * max(1, totals.sequences))[tokens.sequence_N]


def sequence_sum(divisor: int) -> Aggregation:
    """1 / (samples of the batch * a constant): no length bias (Dr. GRPO, arXiv:2503.20783, section 3.2)."""

    def weight(tokens: Tokens, totals: Totals) -> torch.Tensor:
        return tokens.behaviour_N.new_full(tokens.behaviour_N.shape, 1 / (divisor * max(1, totals.sequences)))

    return weight


def aggregations(max_tokens: int) -> Mapping[str, Aggregation]:
    """By the name that the config uses.

    Args:
        max_tokens: The longest completion, which `sequence_budget` divides by.
    """
    return {
        "token_mean": token_mean,
        "sequence_mean": sequence_mean,
        "sequence_sum": sequence_sum(1),
        "sequence_budget": sequence_sum(max_tokens),
    }
