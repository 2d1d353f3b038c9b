"""Attention for the slot cache: a step's queries meet their shared prompt as one matrix product for each group.

Reading a group's prompt once for all of its completions, and not once for each, is what makes decoding bound by the
model's own matrix products.

Shape letters: N prompts, M completions of the largest group, S slots, H key/value heads, R query heads of each, D head
dimension, P and C positions of prompts and completions.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from aoffpolicy.rollout.kv_cache import DecodePlan, SlotCache, SlotLayer

ATTENTION = "aoffpolicy_slots"
"""Name of this attention in transformers' registry. It has no mask function there, so models build no masks."""


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    slot_cache: SlotCache | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in every layer; `slot_cache` reaches it as a keyword of the model's forward.

    Whole prompts, padded on the right, are plainly causal: no token sees the padding after it.
    """
    if slot_cache is None or not isinstance(slot_cache.plan, DecodePlan):
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        return output, None
    layer = slot_cache.slot_layers[module.layer_idx]  # type: ignore[index]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return decode_attention(query[:, :, 0] * scale, key, value, layer, slot_cache.plan)[:, None], None


def decode_attention(
    query: torch.Tensor, key_SHCD: torch.Tensor, value_SHCD: torch.Tensor, layer: SlotLayer, plan: DecodePlan
) -> torch.Tensor:
    """One softmax over the prompt's positions and the slot's own.

    Args:
        query: [S, H * R, D], scaled.
        key_SHCD: Of the slots.
        value_SHCD: Of the slots.
        layer: Holds the prompts' keys and values.
        plan: Of this step.

    Returns:
        [S, H * R, D].
    """
    slots, heads, _, dim = key_SHCD.shape
    query_SHRD = query.view(slots, heads, -1, dim)
    prompt_keys_NHPD = layer.prompt_keys[: plan.prompts, :, : plan.prompt_positions]
    prompt_values_NHPD = layer.prompt_values[: plan.prompts, :, : plan.prompt_positions]

    grouped = torch.matmul(_to_groups(query_SHRD, plan), prompt_keys_NHPD.transpose(2, 3))
    prompt_scores_SHRP = _to_slots(grouped.masked_fill(~plan.prompt_seen_N11L, -torch.inf), plan, heads)
    scores_SHRC = torch.matmul(query_SHRD, key_SHCD.transpose(2, 3)).masked_fill(~plan.seen_S11L, -torch.inf)
    scores = torch.cat([prompt_scores_SHRP, scores_SHRC], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights_SHRP, weights_SHRC = torch.split(weights, [plan.prompt_positions, plan.visible], dim=-1)
    from_prompt = _to_slots(torch.matmul(_to_groups(weights_SHRP, plan), prompt_values_NHPD), plan, heads)
    output_SHRD = from_prompt + torch.matmul(weights_SHRC, value_SHCD)
    return output_SHRD.reshape(slots, -1, output_SHRD.shape[-1])


def _to_groups(rows_SHRX: torch.Tensor, plan: DecodePlan) -> torch.Tensor:
    """Put the rows of a prompt's slots together: [S, H, R, X] to [N, H, M * R, X]."""
    prompts, members = plan.slot_of_NM.shape
    _, heads, ratio, width = rows_SHRX.shape
    return rows_SHRX[plan.slot_of_NM].transpose(1, 2).reshape(prompts, heads, members * ratio, width)


def _to_slots(rows_NHX: torch.Tensor, plan: DecodePlan, heads: int) -> torch.Tensor:
    """The inverse: [N, H, M * R, X] to [S, H, R, X]."""
    prompts, members = plan.slot_of_NM.shape
    rows = rows_NHX.view(prompts, heads, members, -1, rows_NHX.shape[-1]).transpose(1, 2)
    return rows[plan.place_of_S]


AttentionInterface.register(ATTENTION, slot_attention)
