"""Which events are new to a reader, and how many never came."""

from __future__ import annotations

from aoffpolicy.transport.event_schema import AnyEvent


class EventOrder:
    """Sorts out live events and last values, which come over one connection in any order.

    Invariant: no event is new twice, and every live event is new. A last value is new if it is older than the first
    live event of this connection and, after a reconnection, newer than everything from before.
    """

    def __init__(self) -> None:
        self._run_id = ""
        self._forget()

    def _forget(self) -> None:
        self._newest = 0
        """Highest `seq` so far."""
        self._first_live = 0
        """`seq` of the first live event of this connection, 0 before it."""
        self._resumed_from = 0
        """`_newest` when the connection was lost; 0 on the first one."""
        self._counted_from = 0
        """`seq` from which on every event is expected; 0 before the first live one."""
        self._received = 0
        """Of those expected."""

    @property
    def missed(self) -> int:
        """Events from the first live one to the newest that did not come."""
        return self._newest - self._counted_from + 1 - self._received if self._counted_from else 0

    def is_new(self, event: AnyEvent) -> bool:
        """Take note of an event; whether the reader has not had it yet."""
        if event.run_id != self._run_id:  # another run at the same address counts from 1 again
            self._run_id = event.run_id
            self._forget()
        if event.replay and (event.seq <= self._resumed_from or (self._first_live and event.seq >= self._first_live)):
            return False
        if not event.replay:
            self._first_live = self._first_live or event.seq
            self._counted_from = self._counted_from or event.seq
        self._received += bool(self._counted_from) and event.seq >= self._counted_from
        self._newest = max(self._newest, event.seq)
        return True

    def resume(self) -> None:
        """The connection was lost and is back: last values will come once more."""
        self._resumed_from = self._newest
        self._first_live = 0
