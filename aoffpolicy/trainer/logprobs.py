"""Log-probabilities of chosen tokens, without ever holding the [tokens, vocabulary] logits whole."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from aoffpolicy.trainer.packing import MicroBatch


class LogprobModel(nn.Module):
    """A causal language model whose forward gives log-probabilities of the trained tokens only.

    The whole computation is one forward of one module, so that FSDP gathers the embedding and the output layer around
    it. Logits exist for `chunk` tokens at a time and are computed again in backward.

    Args:
        model: A Hugging Face causal language model.
        chunk: Trained tokens whose logits are held at once.
    """

    def __init__(self, model: PreTrainedModel, chunk: int) -> None:
        super().__init__()
        self.model = model
        self._chunk = chunk

    def forward(self, batch: MicroBatch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Score a micro-batch.

        Args:
            batch: Packed rows.
            temperature: Logits are divided by it, as the rollout did.

        Returns:
            logprobs_N: float32 [N], natural log, with gradient.
            entropy_N: float32 [N], nats, without gradient.
        """
        hidden_RTH = self.model.base_model(
            input_ids=batch.token_ids_RT,
            position_ids=batch.position_ids_RT,
            attention_mask=batch.mask_R1TT,
            use_cache=False,  # with a cache, or without the mask, packed sequences see each other
        ).last_hidden_state
        hidden_NH = hidden_RTH.flatten(0, 1)[batch.source_N]
        chunks = list(zip(hidden_NH.split(self._chunk), batch.target_N.split(self._chunk), strict=True))
        if len(chunks) == 1:
            return self._score(*chunks[0], temperature)
        scored = [checkpoint(self._score, *chunk, temperature, use_reentrant=False) for chunk in chunks]
        return torch.cat([logprobs for logprobs, _ in scored]), torch.cat([entropy for _, entropy in scored])

    def _score(
        self, hidden_nH: torch.Tensor, target_n: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits_nV = self.model.get_output_embeddings()(hidden_nH).float() / temperature
        logsumexp_n = logits_nV.logsumexp(-1)
        logprobs_n = logits_nV.gather(-1, target_n[:, None]).squeeze(-1) - logsumexp_n
        with torch.no_grad():
            entropy_n = logsumexp_n - (torch.softmax(logits_nV, -1) * logits_nV).sum(-1)
        return logprobs_n, entropy_n
