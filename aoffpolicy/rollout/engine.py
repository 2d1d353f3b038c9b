"""What a rollout engine is, and how one is found by name."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol, Self, cast

import torch

from aoffpolicy.config import Config
from aoffpolicy.registry import load
from aoffpolicy.samples import Prompt, SampleGroup
from aoffpolicy.transport.manifest import Named
from aoffpolicy.transport.messages import Sampling, TensorSpec


class Engine(Protocol):
    """Samples groups of completions under one set of weights."""

    version: int
    """Policy version of the weights loaded; set by the owner after `load_weights`."""

    @classmethod
    def from_config(cls, config: Config, device: torch.device) -> Self:
        """Load the model and get ready to generate; blocks.

        Raises:
            EngineError: The engine cannot run this model with these settings; the message says why.
        """
        ...

    @property
    def capacity(self) -> int:
        """Groups taken at once, those waiting for their turn included."""
        ...

    @property
    def context_length(self) -> int:
        """Tokens of a prompt and its completion together, at most."""
        ...

    def specs(self) -> tuple[TensorSpec, ...]:
        """Every weight that `load_weights` needs, under its Hugging Face name; a tied output layer is left out."""
        ...

    async def generate(self, prompt: Prompt, sampling: Sampling) -> SampleGroup:
        """Sample one group; its rewards are still to be filled in. Cancellation frees what the group holds.

        Raises:
            DataError: The prompt is empty, does not fit into the context or holds unknown tokens.
            EngineError: The engine has failed, is closed, or has no complete set of weights.
        """
        ...

    def load_weights(self, tensors: Iterable[Named]) -> Collection[str]:
        """Replace all weights; blocks, and may be called from any thread. After an error it must be repeated.

        Args:
            tensors: (name, tensor) in any order, on any device, in any floating-point dtype.

        Returns:
            The names loaded, which are those of `specs`.

        Raises:
            EngineError: A group is being generated.
            WeightSyncError: A tensor is missing, unknown or of another shape.
        """
        ...

    def close(self) -> None:
        """Fail what is still being generated and release everything; no harm in a second call."""
        ...


def engine_class(name: str) -> type[Engine]:
    """The engine of this name in the registry, or package.module:Class.

    Raises:
        ConfigError: There is no such engine.
    """
    return cast(type[Engine], load("rollout.engine", name))
