"""The weight transfer engine that vLLM builds in each of its workers: one class for both generations of its interface.

vLLM 0.32 gives the engine the model and leaves the layer-wise reload to it; 0.23 does the reload itself around
`receive_weights` and gives that `load_weights`. Which one is running is told by what is called, and how.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from aoffpolicy.errors import WeightSyncError
from aoffpolicy.rollout.vllm.experts import split_experts
from aoffpolicy.rollout.vllm.member import EngineWorkerMember, Orders
from aoffpolicy.rollout.vllm.reload_gaps import TiedWeights, repack_experts
from aoffpolicy.transport.manifest import Named


@dataclass(kw_only=True)
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """`member.Orders` as vLLM carries it, and what 0.23 does not tell the engine about the model."""

    control_url: str = ""
    run_id: str = ""
    heartbeat_timeout_s: float = 10.0
    backend: str = "gloo"
    specs: Sequence[tuple[str, str, Sequence[int]]] = ()
    dtype: str = "float32"
    """Of the model."""
    quantized: bool = False


@dataclass(kw_only=True)
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Which update comes now."""

    term: int = 0
    timeout_s: float = 0.0


class TransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """Loads what the weight group brings into the model of one vLLM worker."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._member: EngineWorkerMember | None = None
        self._quantized = False
        self._dtype = torch.float32
        self._tied = TiedWeights(self.model)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Get ready to join weight groups; joining itself happens in another thread, whenever it is asked for."""
        self.shutdown()
        self._quantized, self._dtype = init_info.quantized, getattr(torch, init_info.dtype)
        fields = {name: value for name, value in asdict(init_info).items() if name in Orders.__dataclass_fields__}
        self._member = EngineWorkerMember(Orders(**fields), self.parallel_config.rank, _current_device())

    def start_weight_update(self) -> None:
        """Prepare the layers for new weights (0.32)."""
        with _current_device():
            initialize_layerwise_reload(self.model)

    def receive_weights(
        self, update_info: UpdateInfo, load_weights: Callable[[Iterator[Named]], Any] | None = None
    ) -> None:
        """Load one whole update. After an error the layers are usable again, but only for another whole update.

        Raises:
            WeightSyncError: The update was given up or did not come in time, or weights of the model were not in it.
        """
        if self._member is None:
            raise WeightSyncError("weights are to be received, but init_transfer_engine was never called")

        def use(tensors: Iterator[Named]) -> Collection[str]:
            received: list[str] = []
            load = load_weights or self.model.load_weights
            loaded = load(split_experts(self._tied.watch(_noting(received, tensors))))
            self._tied.load()
            self._refuse_missing(loaded)
            return received

        try:
            self._member.load(update_info.term, use, update_info.timeout_s)
        except BaseException:
            self._finalize()
            raise

    def finish_weight_update(self) -> None:
        """Bring the new weights into the form that the kernels use (0.32)."""
        self._finalize()
        with _current_device():
            repack_experts(self.model)

    def shutdown(self) -> None:
        """Leave the weight group."""
        if self._member is not None:
            self._member.close()
            self._member = None

    def _finalize(self) -> None:
        """Of the model's config only the dtype is used, for attention layers."""
        with _current_device():
            finalize_layerwise_reload(self.model, SimpleNamespace(dtype=self._dtype))

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Named], trainer_args: Any) -> None:
        """Of the interface of 0.23; here trainers send through `aoffpolicy.transport`."""
        raise WeightSyncError("aoffpolicy's trainer ranks send weights, not vLLM's trainer side")

    def _refuse_missing(self, loaded: Collection[str] | None) -> None:
        """vLLM silently keeps the old weights of a layer left out. Quantized layers have other names."""
        if loaded is None or self._quantized:
            return
        names = {name for name, _ in self.model.named_parameters()}
        if missing := names.difference(loaded) - self._tied.names:
            raise WeightSyncError(
                f"{len(missing)} weights of the engine's model were not in the update, {min(missing)} among them"
            )


def _noting(names: list[str], tensors: Iterator[Named]) -> Iterator[Named]:
    for name, tensor in tensors:
        yield name, tensor
        names.append(name)


def _current_device() -> torch.device:
    kind = current_platform.device_type
    return torch.device(kind) if kind == "cpu" else torch.device(kind, getattr(torch, kind).current_device())
