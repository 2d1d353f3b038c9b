"""What a name in the config stands for: a line here for each engine, backend and algorithm that comes with the package.

Users' own are named `package.module:Class` in the config and need no line. Nothing is imported before it is used.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from aoffpolicy.errors import ConfigError

ROLLOUT_ENGINES = {
    "torch": "aoffpolicy.rollout.torch_engine:TorchEngine",
    "vllm": "aoffpolicy.rollout.vllm.engine:VllmEngine",
}
TRAINER_BACKENDS = {"fsdp2": "aoffpolicy.trainer.fsdp2:Fsdp2"}
ALGORITHMS = {"grpo": "aoffpolicy.algorithms.grpo:Grpo"}

REGISTRIES: Mapping[str, Mapping[str, str]] = {
    "rollout.engine": ROLLOUT_ENGINES,
    "trainer.backend": TRAINER_BACKENDS,
    "algorithm.name": ALGORITHMS,
}
"""By config key."""


def fault(key: str, name: str) -> str | None:
    """What is wrong with a name, without importing anything; None where it may be right."""
    if name in REGISTRIES[key] or ":" in name:
        return None
    return f"{key}: {name!r} is none of {', '.join(sorted(REGISTRIES[key]))}, and not package.module:Class"


def load(key: str, name: str) -> Any:
    """The class that a name stands for.

    Args:
        key: The config key.
        name: Its value.

    Raises:
        ConfigError: The name is neither known nor importable.
    """
    if unknown := fault(key, name):
        raise ConfigError([unknown])
    module, _, attribute = REGISTRIES[key].get(name, name).partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError([f"{key}: {name!r} cannot be imported: {error}"]) from error
