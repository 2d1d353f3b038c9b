"""Collective groups that stand alone: no default process group, no environment variables, explicit time-outs.

A backend is one module with a function `create` and one line in `BACKENDS`. It is imported only when it is used, so
that a machine without its libraries never sees it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

import torch
from torch.distributed.distributed_c10d import Store

from aoffpolicy.errors import AoffpolicyError, RendezvousError


class CollectiveError(AoffpolicyError):
    """A collective did not come to its end, mostly because of another member: seldom the first cause."""


class Pending(Protocol):
    def wait(self) -> None:
        """Block until the buffer may be used.

        Raises:
            CollectiveError: The time-out passed, a peer was lost, or the group was aborted.
        """
        ...


class Collective(Protocol):
    """One group. Collectives are issued from one thread, in the same order on all ranks; `abort` from any."""

    def broadcast(self, buffer: torch.Tensor, root: int, timeout_s: float) -> Pending:
        """Start sending `buffer` (uint8, contiguous, of the same length on all ranks) from rank `root` to all others.

        Raises:
            CollectiveError: The group was aborted or closed.
        """
        ...

    def abort(self, reason: str) -> None:
        """Leave and release sockets, threads and device memory, without blocking.

        Every wait, here at once and on every other rank as soon as it misses this one, raises `CollectiveError`.
        """
        ...


@dataclass(frozen=True, slots=True)
class GroupOptions:
    rank: int
    size: int
    interface: str
    """Bare address that this rank binds."""
    device: torch.device
    """Where the buffers live."""
    timeout_s: float
    """Of connecting to all other ranks."""


BACKENDS: dict[str, str] = {
    "gloo": "aoffpolicy.transport.gloo",
}


def create(backend: str, store: Store, options: GroupOptions) -> Collective:
    """Form a group with all other ranks; blocks until they are connected, or for a lazy backend until it is set up.

    Args:
        backend: A key of `BACKENDS`.
        store: Its keys belong to this group alone.
        options: This rank's place in the group.

    Raises:
        RendezvousError: There is no such backend.
        CollectiveError: Another rank could not be reached within the time-out.
    """
    if backend not in BACKENDS:
        raise RendezvousError(f"no collective backend {backend!r}; there are {', '.join(BACKENDS)}")
    factory: Callable[[Store, GroupOptions], Collective] = import_module(BACKENDS[backend]).create
    return factory(store, options)
