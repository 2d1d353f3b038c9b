"""Buckets through a collective: a broadcast travels in the background while both sides do something useful."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import xxhash

from aoffpolicy.transport.group import Collective, Pending

ROOT = 0
"""Rank of the sender in the group."""


def broadcast_buckets(collective: Collective, buckets: Iterable[torch.Tensor], timeout_s: float) -> str:
    """Broadcast filled buckets; while one travels, it is hashed and the next is filled.

    Args:
        collective: This rank is its `ROOT`.
        buckets: uint8 [size of the bucket]; a buffer may come again two buckets later.
        timeout_s: Of the whole.

    Returns:
        Hex xxh3-128 over all buckets in order.

    Raises:
        CollectiveError: A receiver was lost or too slow, or the group was aborted.
    """
    deadline = time.monotonic() + timeout_s
    digest = xxhash.xxh3_128()
    travelling: Pending | None = None
    for bucket in buckets:
        pending = collective.broadcast(bucket, ROOT, left_s(deadline))
        digest.update(host_bytes(bucket))
        if travelling is not None:
            travelling.wait()
        travelling = pending
    if travelling is not None:
        travelling.wait()
    return digest.hexdigest()


def receive_buckets(
    collective: Collective,
    sizes: Iterable[int],
    device: torch.device,
    timeout_s: float,
    digest: Callable[[memoryview], object],
) -> Iterator[torch.Tensor]:
    """Receive buckets; while the consumer has one, the next is on its way.

    Each has memory of its own, so a consumer may keep what it got; for one that does not, three exist at a time.

    Args:
        collective: Its `ROOT` sends.
        sizes: Bytes of every bucket.
        device: Where the buckets are received.
        timeout_s: Of the whole, the consumer's own time included.
        digest: Called with the bytes of every bucket, in order.

    Yields:
        uint8 [size of the bucket].

    Raises:
        CollectiveError: The sender was lost or too slow, or the group was aborted.
    """
    deadline = time.monotonic() + timeout_s

    def start(size: int) -> tuple[torch.Tensor, Pending]:
        bucket = torch.empty(size, dtype=torch.uint8, device=device)
        return bucket, collective.broadcast(bucket, ROOT, left_s(deadline))

    starts = map(start, sizes)
    following = next(starts, None)
    while following is not None:
        bucket, pending = following
        following = next(starts, None)
        pending.wait()
        digest(host_bytes(bucket))
        yield bucket


def host_bytes(bucket: torch.Tensor) -> memoryview:
    """The bytes of a bucket in host memory; no copy on device cpu."""
    array: Any = bucket.cpu().numpy()
    return memoryview(array)


def left_s(deadline: float) -> float:
    """Seconds until the deadline, never so few that a time-out is read as none."""
    return max(deadline - time.monotonic(), 0.001)
