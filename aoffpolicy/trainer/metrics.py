"""Metrics over the trained tokens of a global batch: how far the trainer is from the behaviour policy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist

from aoffpolicy.algorithms import Tokens

OFF_POLICY = (
    "importance_ratio_mean",
    "importance_ess",
    "kl_rollout_trainer",
    "clip_fraction",
    "masked_fraction",
    "weight_truncated_fraction",
)
"""Also told by staleness, as `<name>_staleness_<s>`, with `importance_ratio_max` and `train_tokens`."""

_SQUARES = "importance_ratio_squares"


class TokenSums:
    """Sums over the tokens of all micro-batches and ranks, by staleness, turned into means at the end.

    Args:
        device: Where the sums are kept.
        max_staleness: Tokens that are more versions behind count as this many.
    """

    def __init__(self, device: torch.device, max_staleness: int) -> None:
        self._device = device
        self._kinds = max_staleness + 1
        self._sums: dict[str, torch.Tensor] = {}
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        self._packed_tokens = 0
        self._ratio_max = torch.zeros(self._kinds, dtype=torch.float64, device=device)

    def add(
        self,
        tokens: Tokens,
        entropy_N: torch.Tensor,
        staleness_N: torch.Tensor,
        loss_N: torch.Tensor,
        details: Mapping[str, torch.Tensor],
        packed_tokens: int,
    ) -> None:
        """Add a micro-batch.

        Args:
            tokens: Its trained tokens.
            entropy_N: Nats.
            staleness_N: int64, versions behind.
            loss_N: What the algorithm made of each token; their sum is the loss.
            details: What the algorithm tells of each token.
            packed_tokens: Tokens computed, prompts included.
        """
        gap_N = (tokens.logprobs_N.detach() - tokens.behaviour_N).double()
        ratio_N = gap_N.exp()
        values = {
            "entropy": entropy_N,
            "logprob_abs_diff": gap_N.abs(),
            # k3 of Schulman, "Approximating KL Divergence" (2020), on samples of the behaviour policy.
            "kl_rollout_trainer": ratio_N - 1 - gap_N,
            "importance_ratio_mean": ratio_N,
            _SQUARES: ratio_N.square(),
            "train_tokens": torch.ones_like(ratio_N),
            **details,
        }
        kind_N = staleness_N.clamp(0, self._kinds - 1)
        for name, value_N in values.items():
            zeros = torch.zeros(self._kinds, dtype=torch.float64, device=self._device)
            sums = zeros.index_add(0, kind_N, value_N.detach().double())
            self._sums[name] = self._sums[name] + sums if name in self._sums else sums
        self._loss += loss_N.detach().double().sum()
        self._packed_tokens += packed_tokens
        self._ratio_max = self._ratio_max.scatter_reduce(0, kind_N, ratio_N, "amax")

    def means(self) -> dict[str, float]:
        """The same on every rank; a collective. What is not finite is nan."""
        names = sorted(self._sums)
        scalars = torch.tensor([self._packed_tokens], dtype=torch.float64, device=self._device)
        total = torch.cat([*(self._sums[name] for name in names), self._loss[None], scalars])
        dist.all_reduce(total)
        dist.all_reduce(self._ratio_max, dist.ReduceOp.MAX)
        *_, loss, packed_tokens = total.tolist()
        sums = dict(zip(names, total[:-2].view(len(names), self._kinds).tolist(), strict=True))
        maxima = self._ratio_max.tolist()
        figures = dict(_figures({name: sum(by_kind) for name, by_kind in sums.items()}, max(maxima)))
        figures |= {"loss": loss, "packed_tokens": packed_tokens}
        for staleness in range(self._kinds):
            own = {name: by_kind[staleness] for name, by_kind in sums.items()}
            if own["train_tokens"]:
                told = dict(_figures(own, maxima[staleness]))
                kept = (*OFF_POLICY, "importance_ratio_max", "train_tokens")
                figures |= {f"{name}_staleness_{staleness}": told[name] for name in kept if name in told}
        return {name: value if math.isfinite(value) else math.nan for name, value in figures.items()}


def _figures(sums: Mapping[str, float], ratio_max: float) -> Iterator[tuple[str, float]]:
    """Means of sums over the same tokens, and the effective sample size of their importance ratios."""
    tokens = sums["train_tokens"]
    for name, value in sums.items():
        if name not in (_SQUARES, "train_tokens"):
            yield name, value / max(1.0, tokens)
    # (sum w)^2 / sum w^2 of the ratios w, as a share of the tokens: Kong, "A Note on Importance Sampling" (1992).
    yield "importance_ess", sums["importance_ratio_mean"] ** 2 / (sums[_SQUARES] * tokens) if sums[_SQUARES] else 0.0
    yield "importance_ratio_max", ratio_max
    yield "train_tokens", tokens
