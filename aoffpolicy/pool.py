"""Which worker takes the next request."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from aoffpolicy.scheduling.change import Change
from aoffpolicy.transport.wire import PeerId


class PoolEmptyError(Exception):
    """No worker is left, and none is about to come."""


class WorkerPool:
    """Workers of one role with a bounded number of requests in flight in each; the least loaded is taken first.

    Args:
        on_load: Called with a worker and its requests in flight whenever that number changes.
        capacities: Requests that each worker takes at once.
    """

    def __init__(self, on_load: Callable[[PeerId, int], None], capacities: Mapping[PeerId, int] | None = None) -> None:
        self._on_load = on_load
        self._capacities = dict(capacities or {})
        self._held = False
        self._in_flight: Counter[PeerId] = Counter()
        self._change = Change()

    @asynccontextmanager
    async def worker(self, preferred: int | None = None) -> AsyncIterator[PeerId]:
        """Hold one place in the least loaded worker, or in that of rank `preferred` where it is here; waits for it.

        Raises:
            PoolEmptyError: No worker is here.
        """
        await self._change.until(lambda: self._is_empty or self._free(preferred) is not None)
        peer = self._free(preferred)
        if peer is None:
            raise PoolEmptyError
        self._count(peer, +1)
        try:
            yield peer
        finally:
            self._count(peer, -1)
            self._change.notify()

    def in_flight(self, peer: PeerId) -> int:
        return self._in_flight[peer]

    def serves(self, peer: PeerId) -> bool:
        """Whether requests are given to it."""
        return not self._held and peer in self._capacities

    # --- Workers that come and go ----------------------------------------------------------------------------------

    def hold(self) -> None:
        """No request is given to anybody, and all wait, until `serve`."""
        self._held = True

    def serve(self, capacities: Mapping[PeerId, int]) -> None:
        """From now on these workers take requests, and nobody else."""
        self._held = False
        self._capacities = dict(capacities)
        self._change.notify()

    def remove(self, peer: PeerId) -> None:
        """This worker takes no more requests."""
        if self._capacities.pop(peer, None) is not None:
            self._change.notify()

    # ---------------------------------------------------------------------------------------------------------------

    @property
    def _is_empty(self) -> bool:
        return not (self._held or self._capacities)

    def _free(self, preferred: int | None) -> PeerId | None:
        if self._held:
            return None
        here = [peer for peer in self._capacities if peer.rank == preferred] or self._capacities
        free = [peer for peer in here if self._in_flight[peer] < self._capacities[peer]]
        return min(free, key=lambda peer: (self._in_flight[peer] / self._capacities[peer], peer), default=None)

    def _count(self, peer: PeerId, change: int) -> None:
        self._in_flight[peer] += change
        self._on_load(peer, self._in_flight[peer])
