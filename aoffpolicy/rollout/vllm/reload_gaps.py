"""What vLLM's layer-wise reload leaves out; found by comparing reloaded engines with fresh ones bit by bit."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import vllm
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.platforms import current_platform

from aoffpolicy.errors import WeightSyncError
from aoffpolicy.transport.manifest import Named


class TiedWeights:
    """Weights with a second name, mostly an output layer tied to the embedding.

    The models' `load_weights` skip the second name. Where its layer keeps a form of the weight of its own, as the
    output layer does on CPU in float32 (vLLM 0.32), that one would stay old.

    Args:
        model: As vLLM has loaded it, before the first reload.

    Attributes:
        names: The second names.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._source_of = _second_names(model)
        self._kept: dict[str, torch.Tensor] = {}
        self.names = frozenset(self._source_of)

    def watch(self, tensors: Iterator[Named]) -> Iterator[Named]:
        """Pass tensors on, keeping those that have a second name."""
        self._kept.clear()
        sources = set(self._source_of.values())
        mapper = getattr(self._model, "hf_to_vllm_mapper", None)
        for name, tensor in tensors:
            for own_name in [name] if mapper is None else mapper.apply_list([name]):
                if own_name in sources:
                    self._kept[own_name] = tensor
            yield name, tensor

    def load(self) -> None:
        """Load what was kept under the second names, too.

        Raises:
            WeightSyncError: A weight that has a second name did not come.
        """
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        for name, source in self._source_of.items():
            if source not in self._kept:
                raise WeightSyncError(f"weight {source}, which {name} is tied to, was not in the update")
            loader = getattr(parameters[name], "weight_loader", default_weight_loader)
            loader(parameters[name], self._kept[source])
        self._kept.clear()


def _second_names(model: torch.nn.Module) -> dict[str, str]:
    """Parameters in the memory of one before them, by name."""
    first: dict[int, str] = {}
    second: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.numel() and name != (source := first.setdefault(parameter.data_ptr(), name)):
            second[name] = source
    return second


def repack_experts(model: torch.nn.Module) -> None:
    """On CPU, vLLM 0.32 brings unquantized experts into the kernels' layout after the first load only.

    Source: vllm 0.32.0, model_executor/layers/fused_moe/unquantized_fused_moe_method.py, `_setup_kernel`: with
    `is_weight_update` it does not call `fused_experts.process_weights_after_loading`.
    """
    if current_platform.device_type != "cpu" or not vllm.__version__.startswith("0.32."):
        return
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(layer)
