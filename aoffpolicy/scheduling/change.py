"""Waiting for a condition on shared state, which whoever changes it makes known."""

from __future__ import annotations

from collections.abc import Callable

import anyio


class Change:
    """A condition variable without a lock: everything happens on one event loop, and checks do not await."""

    def __init__(self) -> None:
        self._event: anyio.Event | None = None

    def notify(self) -> None:
        """Something changed that somebody may wait for."""
        if self._event is not None:
            self._event.set()
            self._event = None

    async def next(self) -> None:
        """Wait for the next change."""
        if self._event is None:
            self._event = anyio.Event()
        await self._event.wait()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self.next()
