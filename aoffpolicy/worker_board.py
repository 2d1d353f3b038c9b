"""What is known of every worker of a run: who it is, what it does, how fast it is."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import msgspec

from aoffpolicy.timeline import Span
from aoffpolicy.transport.control import PeerId
from aoffpolicy.transport.events import WorkerEvent


@dataclass(slots=True)
class _Busy:
    """From when a worker was given something to do until it had nothing left, on the event loop's clock."""

    since: float
    until: float | None = None
    tokens: int = 0
    """Of the groups that came out of it so far."""

    @property
    def tokens_per_s(self) -> float:
        until = anyio.current_time() if self.until is None else self.until
        return self.tokens / max(until - self.since, 1e-9)


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
        self._busy: dict[PeerId, _Busy] = {}
        """The newest busy time of each worker that had one."""
        self._host = os.uname().nodename

    def tell(self, peer: PeerId, **news: Any) -> None:
        """Something about a worker has changed; published at once."""
        known = self._workers.get(peer) or WorkerEvent(role=peer.role, rank=peer.rank, state="starting")
        self._workers[peer] = msgspec.structs.replace(known, **news)
        self._publish(self._workers[peer])

    def ended(self) -> None:
        """The run is over: every worker that was not lost has stopped."""
        for peer, known in list(self._workers.items()):
            if known.state != "lost":
                self.tell(peer, state="stopped", load=0)

    def load(self, peer: PeerId, in_flight: int, doing: str) -> None:
        """A worker has so many requests in flight now; published with the next `refresh`."""
        busy = self._busy.get(peer)
        if in_flight and (busy is None or busy.until is not None):
            self._busy[peer] = _Busy(anyio.current_time())
        elif not in_flight and busy is not None and busy.until is None:
            busy.until = anyio.current_time()
            self._span(Span(str(peer), doing, busy.since, busy.until - busy.since))
        known = self._workers.get(peer)
        if known is not None:
            state = ("busy" if in_flight else "ready") if known.state in ("busy", "ready") else known.state
            self._workers[peer] = msgspec.structs.replace(known, load=in_flight, state=state)

    def load_role(self, role: str, in_flight: int, doing: str) -> None:
        """The same for every worker of a role."""
        for peer in [peer for peer in self._workers if peer.role == role]:
            self.load(peer, in_flight, doing)

    def tokens(self, peer: PeerId, count: int) -> None:
        """A worker has produced the tokens of a group."""
        if (busy := self._busy.get(peer)) is not None:
            busy.tokens += count
            self._workers[peer] = msgspec.structs.replace(self._workers[peer], tokens_per_s=busy.tokens_per_s)

    def refresh(self) -> None:
        """Measure what can only be measured, and publish every worker; meant for once a second."""
        for peer, known in list(self._workers.items()):
            self._workers[peer] = msgspec.structs.replace(known, memory_bytes=self._memory_bytes(known))
            self._publish(self._workers[peer])

    def _memory_bytes(self, worker: WorkerEvent) -> int:
        """Resident memory of a process on this machine; 0 for others and for those that are gone."""
        if worker.host != self._host or not worker.pid:
            return 0
        try:
            pages = int(Path(f"/proc/{worker.pid}/statm").read_text().split()[1])
        except OSError:  # it has just ended
            return 0
        return pages * os.sysconf("SC_PAGE_SIZE")
