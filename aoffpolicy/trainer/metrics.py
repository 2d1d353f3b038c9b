"""Metrics over the trained tokens of a global batch: how far the trainer is from the behaviour policy."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from aoffpolicy.trainer.packing import MicroBatch


class TokenSums:
    """Sums over the tokens of all micro-batches and ranks, turned into means at the end."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[str, torch.Tensor] = {}
        self._tokens = 0
        self._packed_tokens = 0
        self._ratio_max = torch.zeros((), dtype=torch.float64, device=device)

    def add(
        self,
        batch: MicroBatch,
        logprobs_N: torch.Tensor,
        entropy_N: torch.Tensor,
        loss_N: torch.Tensor,
        details: Mapping[str, torch.Tensor],
    ) -> None:
        gap_N = logprobs_N - batch.behaviour_N
        ratio_N = gap_N.exp()
        sums = {
            "loss": loss_N.sum(),
            "entropy": entropy_N.sum(),
            "logprob_abs_diff": gap_N.abs().sum(),
            # k3 of Schulman, "Approximating KL Divergence" (2020), on samples of the behaviour policy.
            "kl_rollout_trainer": (ratio_N - 1 - gap_N).sum(),
            "importance_ratio_mean": ratio_N.sum(),
            **details,
        }
        for name, value in sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + value.double()
        self._tokens += len(logprobs_N)
        self._packed_tokens += batch.tokens
        if len(ratio_N):
            self._ratio_max = torch.maximum(self._ratio_max, ratio_N.max().double())

    def means(self) -> dict[str, float]:
        """The same on every rank; a collective."""
        names = sorted(self._sums)
        counts = torch.tensor([self._tokens, self._packed_tokens], dtype=torch.float64, device=self._device)
        total = torch.cat([torch.stack([self._sums[name] for name in names]), counts])
        dist.all_reduce(total)
        dist.all_reduce(self._ratio_max, dist.ReduceOp.MAX)
        *values, tokens, packed_tokens = total.tolist()
        means = {name: value / max(1.0, tokens) for name, value in zip(names, values, strict=True)}
        return {
            **means,
            "importance_ratio_max": float(self._ratio_max),
            "train_tokens": tokens,
            "packed_tokens": packed_tokens,
        }
