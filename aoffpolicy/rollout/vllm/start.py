"""Starting an `AsyncLLM` that receives weights through our transfer engine."""

from __future__ import annotations

from typing import Any

from aoffpolicy.config import Config
from aoffpolicy.devices import DeviceKind
from aoffpolicy.errors import EngineError
from aoffpolicy.rollout.vllm import arguments
from aoffpolicy.rollout.vllm.log_tail import errors_since, position
from aoffpolicy.rollout.vllm.plugin import BACKEND


def start(config: Config, kind: DeviceKind) -> Any:
    """vLLM's `AsyncLLM`; returns when it has loaded the model.

    Raises:
        EngineError: vLLM cannot be imported or started; the message says what to install, or what vLLM said.
    """
    began = position()
    try:
        from vllm.config import WeightTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM
    except ImportError as error:
        raise EngineError(f"vLLM cannot be imported ({error}); on {kind} install {arguments.PACKAGES[kind]}") from error
    given = arguments.engine_arguments(config, kind)
    if unknown := set(given) - set(AsyncEngineArgs.__dataclass_fields__):
        raise EngineError(f"rollout.vllm.{min(unknown)}: this vLLM has no such engine argument")
    try:
        wanted = AsyncEngineArgs(**given, weight_transfer_config=WeightTransferConfig(backend=BACKEND))
        return AsyncLLM.from_engine_args(wanted)
    except Exception as error:
        said = errors_since(began)
        raise EngineError(f"vLLM did not start: {error}" + (f"; it said:\n{said}" if said else "")) from error
