"""Our vLLM engine against what vllm-ascend 0.23 is known to do: `vllm_ascend_0_23`."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aoffpolicy.config import Config
from aoffpolicy.errors import EngineError
from aoffpolicy.rollout.vllm import arguments
from tests.vllm_ascend_0_23 import FACTS, NPUWorker
from tests.vllm_rollouts import config_of

pytest.importorskip("vllm")
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning"),  # by the imports of vLLM's CPU build
]


def test_the_quoted_lines_stand_in_its_source() -> None:
    folder = os.environ.get("VLLM_ASCEND_SOURCE")
    if not folder:
        pytest.skip("VLLM_ASCEND_SOURCE does not name the unpacked source package vllm_ascend-0.23.0.post1")
    for name, line, quoted in FACTS:
        assert (Path(folder) / name).read_text().splitlines()[line - 1].strip() == quoted, f"{name}:{line}"


def test_the_transfer_engine_takes_its_calls() -> None:
    from aoffpolicy.rollout.vllm.transfer import InitInfo, TransferEngine, UpdateInfo

    inspect.signature(TransferEngine).bind("weight_transfer_config", "parallel_config", "model")
    inspect.signature(TransferEngine.init_transfer_engine).bind("self", InitInfo())
    inspect.signature(TransferEngine.receive_weights).bind("self", UpdateInfo(), load_weights=print)
    inspect.signature(TransferEngine.shutdown).bind("self")
    for info in (InitInfo, UpdateInfo):  # made from the dicts that it is sent
        assert all(
            parameter.kind is parameter.KEYWORD_ONLY for parameter in inspect.signature(info).parameters.values()
        )


def test_its_environment_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "_model_config", lambda config: {})
    config = config_of(tmp_path, rollout={"tensor_parallel": 2})
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "4,5,6,7")
    visible = arguments.visible_devices("npu", 2, 2)
    wanted = arguments.environment(config, "npu", 8, visible)
    assert wanted["ASCEND_RT_VISIBLE_DEVICES"] == "6,7"
    assert wanted["VLLM_ASCEND_ENABLE_NZ"] == "0"
    assert arguments.engine_arguments(config, "npu")["distributed_executor_backend"] == "mp"
    with pytest.raises(EngineError, match="devices 3 to 4 of ASCEND_RT_VISIBLE_DEVICES=4,5,6,7"):
        arguments.visible_devices("npu", 3, 2)


class Llm:
    """vLLM 0.23's `AsyncLLM` over one worker of vllm-ascend."""

    model_config = SimpleNamespace(get_vocab_size=lambda: 96, max_model_len=64)

    def __init__(self) -> None:
        self.happened: list[str] = []
        self.fail = False
        self.worker = NPUWorker(self, self.happened.append)

    def parse_update_info(self, info: dict[str, Any]) -> dict[str, Any]:
        return info

    def receive_weights(self, info: dict[str, Any], load_weights: Any) -> None:
        if self.fail:
            raise ValueError("the trainer is gone")
        self.happened.append(f"load term {info['term']}")

    async def start_weight_update(self, is_checkpoint_format: bool = True) -> None:
        self.worker.start_weight_update(is_checkpoint_format)

    async def update_weights(self, request: Any) -> None:
        self.worker.update_weights(request.update_info)

    async def finish_weight_update(self) -> None:
        self.worker.finish_weight_update()

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        self.happened.append("reset cache")
        return True


async def test_after_a_failed_update_its_worker_takes_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from aoffpolicy.rollout.vllm import engine as module

    llm = Llm()

    def start(config: Config, kind: str) -> Llm:
        return llm

    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(arguments, "_model_config", lambda config: {})
    monkeypatch.setattr(module, "start", start)
    engine = module.VllmEngine(config_of(tmp_path), "npu")
    await engine.update(term=1, version=1, timeout_s=5)
    llm.fail = True
    with pytest.raises(EngineError, match="did not load version 2: ValueError: the trainer is gone"):
        await engine.update(term=2, version=2, timeout_s=5)
    assert engine.version == 1
    llm.fail = False
    await engine.update(term=3, version=2, timeout_s=5)
    whole = ["initialize", "load term {}", "finalize", "reset cache"]
    assert llm.happened == [
        *(step.format(1) for step in whole),
        "initialize",
        "finalize",
        *(step.format(3) for step in whole),
    ]
    assert engine.version == 2
