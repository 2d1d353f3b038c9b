"""An unmodified Hugging Face causal language model over a slot cache: prefill, decode, weights.

Shape letters: N prompts, L positions, S slots in use, V vocabulary, H hidden size.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from aoffpolicy.errors import EngineError, WeightSyncError
from aoffpolicy.rollout.attention import ATTENTION
from aoffpolicy.rollout.kv_cache import CacheShape, SlotCache
from aoffpolicy.transport.manifest import Named, specs_of
from aoffpolicy.transport.messages import TensorSpec

PROBE_TOKENS = 12
PROBE_TOLERANCE = {torch.float32: 0.01, torch.float16: 0.1, torch.bfloat16: 0.5}
"""Largest difference of log-probabilities that rounding explains, in units of their standard deviation; a wrong mask or
cache gives more than 1."""


class CausalLM:
    """Runs the model over prompts and their completions.

    Args:
        path: Hugging Face model folder.
        dtype: Of weights and cache.
        device: Where they live.
        shape: Sizes of the key/value cache; taken down to the context that the model was built for.

    Raises:
        EngineError: The model keeps another state than the keys and values of full attention.
    """

    def __init__(self, path: Path, dtype: torch.dtype, device: torch.device, shape: CacheShape) -> None:
        self.device = device
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation=ATTENTION
        )
        self.model.train(False).requires_grad_(False).to(device)
        config = self.model.config.get_text_config()
        self.vocab_size: int = config.vocab_size
        wanted = shape.prompt_length + shape.slot_length
        self.context_length = min(wanted, getattr(config, "max_position_embeddings", wanted))
        self.shape = shape.within(self.context_length)
        if fault := unsupported(config, self.context_length):
            raise EngineError(f"{path}: the torch engine cannot run this model: {fault}; use another rollout.engine")
        self.cache = SlotCache(config.num_hidden_layers, self.shape)
        parameters = inspect.signature(self.model.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"  # renamed in transformers 5.24
        self._last_N: torch.Tensor | None = None
        output_layer: torch.nn.Module = self.model.get_output_embeddings()
        output_layer.register_forward_pre_hook(self._keep_last)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """What the generation config ends a completion with."""
        ids = self.model.generation_config.eos_token_id if self.model.generation_config else None
        return frozenset([ids] if isinstance(ids, int) else ids or [])

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[np.ndarray], copies: Sequence[int]) -> torch.Tensor:
        """Take prompts in, each with as many slots as it has copies, after the slots in use and in order.

        Args:
            prompts: int [L] of each; run together, padded on the right, where causal attention never looks.
            copies: Slots of each prompt.

        Returns:
            Logits after each prompt's last token, [N, V].
        """
        lengths = np.array([len(prompt) for prompt in prompts])
        padded_NL = np.zeros((len(prompts), lengths.max()), dtype=np.int64)
        for row, prompt in zip(padded_NL, prompts, strict=True):
            row[: len(prompt)] = prompt
        self.cache.enter(lengths, np.array(copies))
        self._last_N = self._on_device(lengths - 1)
        try:
            positions_1L = torch.arange(padded_NL.shape[1], device=self.device)[None]
            return self._forward(self._on_device(padded_NL), positions_1L)
        finally:
            self._last_N = None

    @torch.inference_mode()
    def decode(self, tokens_S: np.ndarray) -> torch.Tensor:
        """Run the next token, int64, of every slot in use. Returns the logits after each, [S, V]."""
        plan = self.cache.advance(self.device)
        return self._forward(self._on_device(tokens_S)[:, None], plan.positions_S[:, None])

    @torch.inference_mode()
    def keep(self, keep_S: np.ndarray) -> np.ndarray:
        """Free the slots not kept. Returns the order: slot i now holds what slot `order[i]` held."""
        return self.cache.keep(keep_S)

    def _forward(self, tokens_NL: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        cache: dict[str, Any] = {self._cache_name: self.cache, "slot_cache": self.cache}
        output = self.model(tokens_NL, position_ids=positions, use_cache=True, **cache)
        logits_NV: torch.Tensor = output.logits[:, -1]
        return logits_NV

    def _keep_last(self, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        """Before the output layer, keep only the last position of each prompt: [N, L, H] to [N, 1, H]."""
        if self._last_N is None:
            return None
        hidden_NLH, *rest = inputs
        rows_N = torch.arange(len(hidden_NLH), device=hidden_NLH.device)
        return (hidden_NLH[rows_N, self._last_N][:, None], *rest)

    def _on_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    # --- Weights -----------------------------------------------------------------------------------------------------

    def specs(self) -> tuple[TensorSpec, ...]:
        """Every weight in the model's own order; an output layer tied to the embedding is left out."""
        return specs_of(self.model.named_parameters())

    @torch.no_grad()  # not inference mode, which would reach into whatever makes the tensors
    def load(self, tensors: Iterable[Named]) -> Collection[str]:
        """Copy tensors over the model's weights and forget every cached key and value.

        Returns:
            The names loaded: all there are.

        Raises:
            WeightSyncError: A tensor is missing, unknown or of another shape.
        """
        self.cache.clear()
        weights = dict(self.model.named_parameters())
        loaded: set[str] = set()
        for name, tensor in tensors:
            weight = weights.get(name)
            if weight is None:
                raise WeightSyncError(f"tensor {name}: the rollout model has no such weight")
            if weight.shape != tensor.shape:
                raise WeightSyncError(
                    f"tensor {name}: {list(tensor.shape)} was received, the rollout model has {list(weight.shape)}"
                )
            weight.copy_(tensor)
            loaded.add(name)
        if missing := sorted(weights.keys() - loaded):
            shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
            raise WeightSyncError(f"{len(missing)} of {len(weights)} weights were not received: {shown}")
        return loaded

    # --- Fitness -----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def probe(self) -> None:
        """Compare prefill and decode over the cache with a plain forward of the same tokens.

        Raises:
            EngineError: They differ, so this model cannot be run over the cache.
        """
        count = min(PROBE_TOKENS, self.context_length)
        split = count // 2
        tokens = np.random.default_rng(0).integers(0, self.vocab_size, count)
        plain_LV = self.model(self._on_device(tokens)[None], use_cache=False).logits[0].float().log_softmax(-1)
        logits = [self.prefill([tokens[:split]], [2])]
        logits += [self.decode(tokens[[at, at]])[-1:] for at in range(split, count)]
        self.cache.clear()
        worst = (torch.cat(logits).float().log_softmax(-1) - plain_LV[split - 1 :]).abs().max().item()
        worst /= plain_LV.std().item()
        if not worst <= PROBE_TOLERANCE[self.model.dtype]:
            raise EngineError(
                f"the torch engine cannot run {type(self.model).__name__}: over the key/value cache its "
                f"log-probabilities differ from those of a plain forward by {worst:.2g} of their standard deviation; "
                "use another rollout.engine"
            )


def unsupported(config: PretrainedConfig, length: int) -> str | None:
    """What in a model's configuration the slot cache cannot hold, in words; None where there is nothing.

    A sliding window does no harm where no sequence is longer than it.
    """
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kinds = set(getattr(config, "layer_types", None) or (["sliding_attention"] if window else []))
    kinds.discard("full_attention")
    if kinds == {"sliding_attention"} and window is not None:
        return f"sliding window attention over {window} tokens, and sequences of {length}" if window < length else None
    return f"layers of the kinds {', '.join(sorted(kinds))}" if kinds else None
