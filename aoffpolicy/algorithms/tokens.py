"""What a loss sees: the trained tokens of one micro-batch, and the size of the whole batch that they belong to.

Shape letters: N trained tokens of a micro-batch, S its sequences. A sequence lies whole in one micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Tokens:
    """Trained tokens; log-probabilities are natural, and only `logprobs_N` has a gradient."""

    logprobs_N: torch.Tensor
    """Of the policy being trained."""
    behaviour_N: torch.Tensor
    """Of the policy that sampled the token, as the rollout logged it."""
    proximal_N: torch.Tensor
    """Of the trainer's policy at the start of the step."""
    advantage_N: torch.Tensor
    sequence_N: torch.Tensor
    """int64, the sequence that the token belongs to: 0 to S - 1."""
    sequences: int
    """S; sequences without a trained token may be among them."""
    reference_N: torch.Tensor | None = None
    """Of the initial model; None without a KL term in the loss."""

    def sum_by_sequence(self, values_N: torch.Tensor) -> torch.Tensor:
        """Sums over each sequence's tokens, [S]; 0 for a sequence without any."""
        return values_N.new_zeros(self.sequences).index_add(0, self.sequence_N, values_N)

    def mean_by_sequence(self, values_N: torch.Tensor) -> torch.Tensor:
        """Means over each sequence's tokens, [S]; 0 for a sequence without any."""
        return self.sum_by_sequence(values_N) / self.lengths_S(values_N)

    def lengths_S(self, like: torch.Tensor) -> torch.Tensor:
        """Trained tokens of each sequence, at least 1, in the dtype of `like`."""
        return self.sum_by_sequence(like.new_ones(len(self.sequence_N))).clamp(min=1)


@dataclass(frozen=True, slots=True)
class Totals:
    """Of the global batch: over all micro-batches and ranks, so that neither changes the loss."""

    tokens: int
    """Trained tokens."""
    sequences: int
    """Samples, those without a trained token included."""
