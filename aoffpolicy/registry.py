"""Names in the config that stand for classes and functions: a registry's key, or `package.module:name`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any


def load(key: str, name: str, registry: Mapping[str, str]) -> Any:
    """Import what a config key names.

    Args:
        key: The config key, for the error.
        name: Its value.
        registry: Known names and the `package.module:name` that each stands for.

    Raises:
        ConfigError: The name is neither known nor importable.
    """
    from aoffpolicy.errors import ConfigError

    target = registry.get(name, name)
    module, colon, attribute = target.partition(":")
    if not colon:
        raise ConfigError([f"{key}: {name!r} is none of {', '.join(sorted(registry))}, and not package.module:name"])
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError([f"{key}: {name!r} cannot be imported: {error}"]) from error
