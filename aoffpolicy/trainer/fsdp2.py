"""The FSDP2 trainer backend: `fully_shard` over any Hugging Face causal language model folder, one rank or many."""

from __future__ import annotations

import logging
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
from aoffpolicy.algorithms import Tokens, Totals
from aoffpolicy.config import Config
from aoffpolicy.errors import NonfiniteError, TrainerError
from aoffpolicy.samples import SampleGroup
from aoffpolicy.trainer.logprobs import LogprobModel
from aoffpolicy.trainer.metrics import TokenSums
from aoffpolicy.trainer.packing import MicroBatch, Row, empty, group_trained_tokens, pack_group, stack, unstack

logger = logging.getLogger(__name__)


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
        self.algorithm = algorithms.build(config)
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
        self, groups: Sequence[SampleGroup], advantages: Sequence[np.ndarray], temperature: float, version: int
    ) -> dict[str, float]:
        """Train this rank's shard of the batch, in `trainer.passes` optimizer steps.

        The loss is normalised over the global batch, so neither the number of ranks nor the token budget changes the
        gradient.

        Args:
            groups: This rank's groups; may be empty.
            advantages: float32 [N] for each group.
            temperature: What the rollout sampled with.
            version: Policy version that is trained; tokens of an older one are stale.

        Returns:
            Metrics of the global batch in the first pass, the same on every rank; of the last one too, as
            `last_pass_<name>`, where there are several. `nonfinite` counts the updates that were skipped.

        Raises:
            NonfiniteError: The loss or gradient is not finite, and the config says to stop.
        """
        micro_batches = self._micro_batches(self._rows(groups, advantages))
        totals = Totals(
            tokens=self._sum(sum(len(batch.target_N) for batch in micro_batches)),
            sequences=self._sum(sum(batch.sequences for batch in micro_batches)),
        )
        passes = self._config.trainer.passes
        fixed = [self._fixed(batch, temperature) for batch in micro_batches]
        metrics = [self._update(micro_batches, fixed, totals, temperature, version) for _ in range(passes)]
        self.schedule.step()
        last = {f"last_pass_{name}": value for name, value in metrics[-1].items()} if passes > 1 else {}
        return {**metrics[0], **last, "nonfinite": sum(pass_metrics["nonfinite"] for pass_metrics in metrics)}

    @torch.no_grad()
    def _fixed(self, batch: MicroBatch, temperature: float) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Log-probabilities that stay the same in every pass: of the proximal policy, and of the reference.

        With one pass the policy itself is the proximal one, and nothing is computed twice.
        """
        several = self._config.trainer.passes > 1
        proximal_N = self.policy(batch, temperature)[0] if several else None
        in_loss = self._config.algorithm.kl_in == "loss"
        reference_N = self._reference(batch, temperature)[0] if self._reference is not None and in_loss else None
        return proximal_N, reference_N

    def _update(
        self,
        micro_batches: Sequence[MicroBatch],
        fixed: Sequence[tuple[torch.Tensor | None, torch.Tensor | None]],
        totals: Totals,
        temperature: float,
        version: int,
    ) -> dict[str, float]:
        """One optimizer step on all micro-batches; returns its metrics."""
        sums = TokenSums(self._device, self._config.run.max_staleness)
        self.optimizer.zero_grad()
        for number, (batch, (proximal_N, reference_N)) in enumerate(zip(micro_batches, fixed, strict=True), start=1):
            if self._ranks == 1:  # nothing is shared out, so weights stay whole and gradients are reduced once
                self.policy.set_requires_gradient_sync(number == len(micro_batches))
                self.policy.set_reshard_after_backward(number == len(micro_batches))
            logprobs_N, entropy_N = self.policy(batch, temperature)
            tokens = Tokens(
                logprobs_N=logprobs_N,
                behaviour_N=batch.behaviour_N,
                proximal_N=logprobs_N.detach() if proximal_N is None else proximal_N,
                advantage_N=batch.advantage_N,
                sequence_N=batch.sequence_N,
                sequences=batch.sequences,
                reference_N=reference_N,
            )
            loss_N, details = self.algorithm.loss(tokens, totals)
            # FSDP averages gradients over the ranks; the sum over all tokens is wanted.
            (loss_N.sum() * self._ranks).backward()
            sums.add(tokens, entropy_N, version - batch.version_N, loss_N, details, batch.tokens)
        grad_norm = float(_full(nn.utils.clip_grad_norm_(self.policy.parameters(), self._config.trainer.grad_clip)))
        metrics = {**sums.means(), "grad_norm": grad_norm, "lr": float(self.schedule.get_last_lr()[0])}
        finite = math.isfinite(grad_norm) and math.isfinite(metrics["loss"])
        if finite:
            self.optimizer.step()
        elif self._config.trainer.nonfinite == "stop":
            raise NonfiniteError(
                f"the loss is {metrics['loss']} and the gradient norm {grad_norm}; the update was not made"
            )
        else:
            logger.warning(
                "update skipped: the loss is %s and the gradient norm %s, training version %d",
                metrics["loss"],
                grad_norm,
                version,
            )
        return {**metrics, "nonfinite": float(not finite)}

    @torch.no_grad()
    def reference_logprobs(self, groups: Sequence[SampleGroup], temperature: float) -> tuple[np.ndarray, ...]:
        """float32 [N] for each of this rank's groups: the initial model's log-probabilities of its trained tokens."""
        if self._reference is None:
            raise TrainerError("there is no reference model: algorithm.kl_coef is 0")
        counts = [group_trained_tokens(group) for group in groups]
        rows = self._rows(groups, [np.zeros(count, dtype=np.float32) for count in counts])
        scored = [self._reference(batch, temperature)[0].cpu() for batch in self._micro_batches(rows)]
        values_N = unstack(torch.cat(scored).numpy(), rows)
        return tuple(np.split(values_N, np.cumsum(counts)[:-1])) if counts else ()

    def _rows(self, groups: Sequence[SampleGroup], advantages: Sequence[np.ndarray]) -> list[Row]:
        budget = self._config.trainer.token_budget
        return [row for group, ours in zip(groups, advantages, strict=True) for row in pack_group(group, ours, budget)]

    def _micro_batches(self, rows: Sequence[Row]) -> list[MicroBatch]:
        """As many on every rank, since each is a collective; a rank with less to do adds empty ones."""
        batches = stack(rows, self._config.trainer.token_budget, self._device)
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
