"""What a name in the config stands for: a line here for everything that comes with the package.

Users' own are named `package.module:Class` (or a function that makes one) in the config and need no line. Nothing is
imported before it is used.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from typing import Any

from aoffpolicy.errors import ConfigError

ROLLOUT_ENGINES = {
    "torch": "aoffpolicy.rollout.torch_engine:TorchEngine",
    "vllm": "aoffpolicy.rollout.vllm.engine:VllmEngine",
}
TRAINER_BACKENDS = {"fsdp2": "aoffpolicy.trainer.fsdp2:Fsdp2"}
ALGORITHMS = {
    "cispo": "aoffpolicy.algorithms.cispo:cispo",
    "dapo": "aoffpolicy.algorithms.dapo:dapo",
    "dr_grpo": "aoffpolicy.algorithms.dr_grpo:dr_grpo",
    "grpo": "aoffpolicy.algorithms.grpo:grpo",
    "gspo": "aoffpolicy.algorithms.gspo:gspo",
    "reinforce_plus_plus": "aoffpolicy.algorithms.reinforce_plus_plus:reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "aoffpolicy.algorithms.reinforce_plus_plus:reinforce_plus_plus_baseline",
    "rloo": "aoffpolicy.algorithms.rloo:rloo",
}
METRIC_SINKS = {
    "tensorboard": "aoffpolicy.sinks.tensorboard:TensorBoard",
    "wandb": "aoffpolicy.sinks.wandb:WeightsAndBiases",
    "trackio": "aoffpolicy.sinks.trackio:Trackio",
    "prometheus": "aoffpolicy.sinks.prometheus:Prometheus",
}

REGISTRIES: Mapping[str, Mapping[str, str]] = {
    "rollout.engine": ROLLOUT_ENGINES,
    "trainer.backend": TRAINER_BACKENDS,
    "algorithm.name": ALGORITHMS,
    "metrics.sinks": METRIC_SINKS,
}
"""By config key."""

NEEDS = {
    ("metrics.sinks", "tensorboard"): ("tensorboard", "tensorboard"),
    ("metrics.sinks", "wandb"): ("wandb", "wandb"),
    ("metrics.sinks", "trackio"): ("trackio", "trackio"),
    ("metrics.sinks", "prometheus"): ("prometheus_client", "prometheus-client"),
}
"""Module and package that a name needs besides the package's own; each is an extra of the same name."""


def fault(key: str, name: str) -> str | None:
    """What is wrong with a name, without importing anything; None where it may be right."""
    module, package = NEEDS.get((key, name), ("", ""))
    if module and importlib.util.find_spec(module) is None:
        return f"{key}: {name!r} needs a package that is not installed: pip install {package}"
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
