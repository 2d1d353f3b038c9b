"""Mixtures of experts: transformers 5 holds the experts of a layer in one tensor, vLLM loads them one by one."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from aoffpolicy.transport.manifest import Named

GATE_UP, DOWN = ".experts.gate_up_proj", ".experts.down_proj"
"""Ends of the names of fused weights: [experts, 2 x intermediate, hidden], gate above up, and
[experts, hidden, intermediate] (transformers 5, `Qwen3MoeExperts`)."""


def split_experts(tensors: Iterator[Named]) -> Iterator[Named]:
    """Replace fused experts by the tensors of the checkpoint format; all else passes through.

    Args:
        tensors: (name, tensor) under the names of transformers' modules.

    Yields:
        (name, tensor) as in a checkpoint: `experts.3.gate_proj.weight`, ..., views of what came.
    """
    for name, tensor in tensors:
        if name.endswith(GATE_UP):
            layer = name.removesuffix("gate_up_proj")
            for index, (gate, up) in enumerate(zip(*_halves(tensor), strict=True)):
                yield f"{layer}{index}.gate_proj.weight", gate
                yield f"{layer}{index}.up_proj.weight", up
        elif name.endswith(DOWN):
            layer = name.removesuffix("down_proj")
            for index, down in enumerate(tensor):
                yield f"{layer}{index}.down_proj.weight", down
        else:
            yield name, tensor


def _halves(gate_up_EIH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    gate_EIH, up_EIH = gate_up_EIH.chunk(2, dim=1)
    return gate_EIH, up_EIH
