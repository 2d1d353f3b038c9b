"""The FSDP2 trainer backend: `fully_shard` over any Hugging Face causal language model folder, one rank or many."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from aoffpolicy import algorithms
from aoffpolicy.config import Config
from aoffpolicy.samples import SampleGroup
from aoffpolicy.trainer.logprobs import LogprobModel
from aoffpolicy.trainer.metrics import TokenSums
from aoffpolicy.trainer.packing import MicroBatch, empty, pack_group, stack


class Fsdp2:
    """Model, optimizer and schedule of one rank; master weights are float32.

    The default process group must exist; every rank calls every method in the same order.

    Args:
        config: The resolved config.
        device: This rank's device.
    """

    def __init__(self, config: Config, device: torch.device) -> None:
        self._config = config
        self._device = device
        self._ranks = dist.get_world_size()
        self.algorithm = algorithms.build(config.algorithm)
        self.policy = self._build()
        self._reference = self._build().requires_grad_(False) if config.algorithm.kl_coef else None
        self.optimizer = torch.optim.AdamW(
            self.policy.parameters(),
            lr=config.trainer.lr,
            betas=config.trainer.betas,
            weight_decay=config.trainer.weight_decay,
            fused=device.type != "npu",
        )
        warmup_steps = config.trainer.warmup_steps
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / (warmup_steps + 1))
        )

    @property
    def shard(self) -> int:
        """Which part of a batch this rank takes."""
        return dist.get_rank()

    @property
    def shards(self) -> int:
        return self._ranks

    def _build(self) -> Any:
        model = AutoModelForCausalLM.from_pretrained(self._config.model.path, dtype=torch.float32)
        model.config.use_cache = False
        if self._config.trainer.activation_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        policy = LogprobModel(model, self._config.trainer.logprob_chunk).to(self._device)
        # The rollout samples without dropout; only checkpointed layers insist on being in training mode.
        policy.train(self._config.trainer.activation_checkpointing)
        mesh = init_device_mesh(self._device.type, (self._ranks,), mesh_dim_names=("data",))
        layer_classes = model._no_split_modules or ()
        for layer in (module for module in model.modules() if type(module).__name__ in layer_classes):
            fully_shard(layer, mesh=mesh, reshard_after_forward=self._ranks > 1)
        fully_shard(policy, mesh=mesh, reshard_after_forward=False)
        return policy

    # --- Training --------------------------------------------------------------------------------------------------

    def train(
        self, groups: Sequence[SampleGroup], advantages: Sequence[np.ndarray], temperature: float
    ) -> dict[str, float]:
        """One optimizer step on this rank's shard of the batch.

        The loss is the mean over the trained tokens of the global batch, so neither the number of ranks nor the token
        budget changes the gradient.

        Args:
            groups: This rank's groups; may be empty.
            advantages: float32 [G] for each group.
            temperature: What the rollout sampled with.

        Returns:
            Metrics of the global batch, the same on every rank.
        """
        micro_batches = self._micro_batches(groups, advantages)
        tokens = self._sum(sum(len(batch.target_N) for batch in micro_batches))
        sums = TokenSums(self._device)
        self.optimizer.zero_grad()
        for number, batch in enumerate(micro_batches, start=1):
            if self._ranks == 1:  # nothing is shared out, so weights stay whole and gradients are reduced once
                self.policy.set_requires_gradient_sync(number == len(micro_batches))
                self.policy.set_reshard_after_backward(number == len(micro_batches))
            logprobs_N, entropy_N = self.policy(batch, temperature)
            reference_N = None
            if self._reference is not None:
                with torch.no_grad():
                    reference_N, _ = self._reference(batch, temperature)
            loss_N, details = self.algorithm.loss(logprobs_N, batch.behaviour_N, batch.advantage_N, reference_N)
            # FSDP averages gradients over the ranks; the sum over all tokens is wanted.
            (loss_N.sum() * (self._ranks / max(1, tokens))).backward()
            sums.add(batch, logprobs_N.detach(), entropy_N, loss_N.detach(), details)
        grad_norm = float(_full(nn.utils.clip_grad_norm_(self.policy.parameters(), self._config.trainer.grad_clip)))
        if not math.isfinite(grad_norm):
            raise FloatingPointError(f"the gradient norm is {grad_norm}; the weights were left as they are")
        learning_rate = self.schedule.get_last_lr()[0]
        self.optimizer.step()
        self.schedule.step()
        return {**sums.means(), "grad_norm": grad_norm, "lr": float(learning_rate)}

    def _micro_batches(self, groups: Sequence[SampleGroup], advantages: Sequence[np.ndarray]) -> list[MicroBatch]:
        """As many on every rank, since each is a collective; a rank with less to do adds empty ones."""
        budget = self._config.trainer.token_budget
        rows = [row for group, ours in zip(groups, advantages, strict=True) for row in pack_group(group, ours, budget)]
        batches = stack(rows, budget, self._device)
        count = torch.tensor(len(batches), device=self._device)
        dist.all_reduce(count, dist.ReduceOp.MAX)
        return [*batches, *(empty(self._device) for _ in range(max(1, int(count)) - len(batches)))]

    def _sum(self, value: int) -> int:
        total = torch.tensor(value, device=self._device)
        dist.all_reduce(total)
        return int(total)

    # --- Weights ---------------------------------------------------------------------------------------------------

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, sharded tensor) in the order of `export_weights`; a tied output layer is left out."""
        yield from self.policy.model.named_parameters()

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, whole tensor), one after another; every rank must drive it to its end."""
        for name, tensor in self.named_weights():
            yield name, _full(tensor.detach())


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
