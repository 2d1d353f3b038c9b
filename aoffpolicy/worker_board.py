"""What is known of every worker of a run: who it is, what it does, how fast it is."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import msgspec

from aoffpolicy.timeline import Span
from aoffpolicy.transport.control import PeerId
from aoffpolicy.transport.events import WorkerEvent

RATE_WINDOW_S = 30.0
"""Tokens a second are counted over this long."""


class WorkerBoard:
    """Keeps the newest `WorkerEvent` of every worker and publishes it when it changes.

    A worker's busy times are told to `span`: from when it was given something to do until it had nothing left.

    Args:
        publish: Takes an event.
        span: Takes a busy time that has ended.
    """

    def __init__(self, publish: Callable[[WorkerEvent], None], span: Callable[[Span], None]) -> None:
        self._publish = publish
        self._span = span
        self._workers: dict[PeerId, WorkerEvent] = {}
        self._busy_since: dict[PeerId, float] = {}
        self._tokens: dict[PeerId, deque[tuple[float, int]]] = {}
        """Time and completion tokens of the groups of the last `RATE_WINDOW_S`."""
        self._host = os.uname().nodename

    def tell(self, peer: PeerId, **news: Any) -> None:
        """Something about a worker has changed; published at once."""
        known = self._workers.get(peer) or WorkerEvent(role=peer.role, rank=peer.rank, state="starting")
        self._workers[peer] = msgspec.structs.replace(known, **news)
        self._publish(self._workers[peer])

    def tell_role(self, role: str, **news: Any) -> None:
        """The same change for every worker of a role."""
        for peer in [peer for peer in self._workers if peer.role == role]:
            self.tell(peer, **news)

    def ended(self) -> None:
        """The run is over: every worker that was not lost has stopped."""
        for peer, known in list(self._workers.items()):
            if known.state != "lost":
                self.tell(peer, state="stopped", load=0)

    def load(self, peer: PeerId, in_flight: int, doing: str) -> None:
        """A worker has so many requests in flight now; published with the next `refresh`."""
        if in_flight and peer not in self._busy_since:
            self._busy_since[peer] = anyio.current_time()
        elif not in_flight and peer in self._busy_since:
            since = self._busy_since.pop(peer)
            self._span(Span(str(peer), doing, since, anyio.current_time() - since))
        known = self._workers.get(peer)
        if known is not None:
            state = "busy" if in_flight else "ready"
            self._workers[peer] = msgspec.structs.replace(known, load=in_flight, state=state)

    def load_role(self, role: str, in_flight: int, doing: str) -> None:
        """The same for every worker of a role."""
        for peer in [peer for peer in self._workers if peer.role == role]:
            self.load(peer, in_flight, doing)

    def tokens(self, peer: PeerId, count: int) -> None:
        """A worker has produced the tokens of a group."""
        self._tokens.setdefault(peer, deque()).append((anyio.current_time(), count))

    def refresh(self) -> None:
        """Measure what can only be measured, and publish every worker; meant for once a second."""
        for peer, known in list(self._workers.items()):
            fresh = msgspec.structs.replace(
                known, tokens_per_s=self._tokens_per_s(peer), memory_bytes=self._memory_bytes(known)
            )
            self._workers[peer] = fresh
            self._publish(fresh)

    def __iter__(self) -> Iterator[WorkerEvent]:
        return iter(self._workers.values())

    def _tokens_per_s(self, peer: PeerId) -> float:
        recent = self._tokens.get(peer)
        if not recent:
            return 0.0
        while recent and recent[0][0] < anyio.current_time() - RATE_WINDOW_S:
            recent.popleft()
        return sum(count for _, count in recent) / RATE_WINDOW_S

    def _memory_bytes(self, worker: WorkerEvent) -> int:
        """Resident memory of a process on this machine; 0 for others and for those that are gone."""
        if worker.host != self._host or not worker.pid:
            return 0
        try:
            pages = int(Path(f"/proc/{worker.pid}/statm").read_text().split()[1])
        except OSError:  # it has just ended
            return 0
        return pages * os.sysconf("SC_PAGE_SIZE")
