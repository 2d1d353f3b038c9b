"""What a rollout engine is, and how one is found by name."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from typing import Any, Protocol, Self, cast

import torch

from aoffpolicy.config import Config
from aoffpolicy.registry import load
from aoffpolicy.samples import Prompt, SampleGroup
from aoffpolicy.transport.manifest import Named
from aoffpolicy.transport.messages import Message, Sampling, TensorSpec
from aoffpolicy.transport.weights import WeightMember


class Receiver(Protocol):
    """The engine's end of the weight plane: one member of the group, or several behind one."""

    @property
    def handlers(self) -> Mapping[type[Message], Callable[[Any], Awaitable[Message]]]:
        """What answers Prepare, Join, Abort and ReceiveWeights."""
        ...

    async def close(self) -> None:
        """Leave the weight group."""
        ...


class Loading(Protocol):
    """An engine that loads weights in this process."""

    def specs(self) -> tuple[TensorSpec, ...]:
        """Every weight that `load_weights` needs, under its Hugging Face name; a tied output layer is left out."""
        ...

    def load_weights(self, tensors: Iterator[Named]) -> Collection[str]:
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


class _LoadingHere:
    def __init__(self, member: WeightMember) -> None:
        self._member = member
        self.handlers = member.handlers

    async def close(self) -> None:
        self._member.close()


def loading_here(engine: Loading, backend: str, device: torch.device) -> Receiver:
    """A receiver in this process, for engines that can load weights in it."""
    return _LoadingHere(
        WeightMember("receive", backend=backend, specs=engine.specs(), load=engine.load_weights, device=device)
    )


class Engine(Protocol):
    """Samples groups of completions under one set of weights."""

    version: int
    """Policy version of the weights loaded; set by the owner after an update."""

    @classmethod
    def from_config(cls, config: Config, device: torch.device) -> Self:
        """Load the model and get ready to generate; blocks.

        Args:
            config: The resolved config.
            device: The first device of this engine. It is not current yet: an engine may leave it to its own processes.

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

    async def generate(self, prompt: Prompt, sampling: Sampling) -> SampleGroup:
        """Sample one group; its rewards are still to be filled in. Cancellation frees what the group holds.

        Raises:
            DataError: The prompt is empty, does not fit into the context or holds unknown tokens.
            EngineError: The engine has failed, is closed, or has no complete set of weights.
        """
        ...

    async def receiver(self, backend: str, device: torch.device) -> Receiver:
        """This engine's membership in the weight group; asked for once, after which it may be told to prepare.

        Engines that load weights in this process return `loading_here(self, ...)`.

        Args:
            backend: Collective backend, a key of `group.BACKENDS`.
            device: Where weights are received.

        Raises:
            EngineError: The engine cannot receive weights.
        """
        ...

    async def watch(self) -> None:
        """Wait, for as long as this engine lives, for the end of one of its own processes.

        Raises:
            EngineDiedError: One of them has ended; engines without any wait for ever.
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
