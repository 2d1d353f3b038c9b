"""What this project relies on of vllm-ascend 0.23.0.post1, which cannot be installed without its toolchain.

`FACTS` quotes its source package on PyPI; `NPUWorker` behaves as its worker does with weight updates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

WORKER = "vllm_ascend/worker/worker.py"
FACTS = (
    ("vllm_ascend/platform.py", 134, 'device_control_env_var: str = "ASCEND_RT_VISIBLE_DEVICES"'),
    ("vllm_ascend/envs.py", 92, '"VLLM_ASCEND_ENABLE_NZ": lambda: int(os.getenv("VLLM_ASCEND_ENABLE_NZ", 1)),'),
    (WORKER, 288, "def init_weight_transfer_engine(self, init_info: dict) -> None:"),
    (WORKER, 292, "typed_init_info = self.weight_transfer_engine.parse_init_info(init_info)"),
    (WORKER, 293, "self.weight_transfer_engine.init_transfer_engine(typed_init_info)"),
    (WORKER, 296, "if envs_ascend.VLLM_ASCEND_ENABLE_NZ:"),
    (WORKER, 303, "def start_weight_update(self, is_checkpoint_format: bool = True) -> None:"),
    (WORKER, 307, "if self._weight_update_active:"),
    (WORKER, 319, "initialize_layerwise_reload(model)"),
    (WORKER, 322, "self._weight_update_active = True"),
    (WORKER, 324, "def update_weights(self, update_info: dict) -> None:"),
    (WORKER, 333, "if not self._weight_update_active:"),
    (WORKER, 338, "self.weight_transfer_engine.receive_weights("),
    (WORKER, 340, "load_weights=model.load_weights,"),
    (WORKER, 359, "def finish_weight_update(self) -> None:"),
    (WORKER, 363, "if not self._weight_update_active:"),
    (WORKER, 371, "finalize_layerwise_reload(model, self.model_config)"),
    (WORKER, 373, "self._weight_update_active = False"),
    (WORKER, 384, "weight_transfer_engine.shutdown()"),
    (WORKER, 701, "self.vllm_config.weight_transfer_config,"),
    (WORKER, 702, "self.vllm_config.parallel_config,"),
    (WORKER, 703, "self.model_runner.get_model(),"),
)
"""(file, line, what stands there)."""


class NPUWorker:
    """The weight updates of vllm-ascend's worker, with its engine and its layers left to the test.

    Args:
        engine: What stands for the weight transfer engine.
        happen: Told what the worker does to the model's layers.
    """

    def __init__(self, engine: Any, happen: Callable[[str], None]) -> None:
        self._engine = engine
        self._happen = happen
        self._weight_update_active = False

    def start_weight_update(self, is_checkpoint_format: bool = True) -> None:
        if self._weight_update_active:
            raise RuntimeError("start_weight_update called while a weight update is already active.")
        assert is_checkpoint_format
        self._happen("initialize")
        self._weight_update_active = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        typed = self._engine.parse_update_info(update_info)
        if not self._weight_update_active:
            raise RuntimeError("start_weight_update must be called before update_weights.")
        self._engine.receive_weights(typed, load_weights=lambda weights: {name for name, _ in weights})

    def finish_weight_update(self) -> None:
        if not self._weight_update_active:
            raise RuntimeError("start_weight_update must be called before finish_weight_update.")
        self._happen("finalize")
        self._weight_update_active = False
