"""How long each activity was going on, on the clock of the event loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import anyio


class Meter:
    """Adds up the time during which at least one activity of a name was going on; names may overlap."""

    def __init__(self) -> None:
        self._running: dict[str, int] = {}
        self._since: dict[str, float] = {}
        self._totals: dict[str, float] = {}

    @contextmanager
    def __call__(self, *names: str) -> Iterator[None]:
        now = anyio.current_time()
        for name in names:
            if not self._running.get(name):
                self._since[name] = now
            self._running[name] = self._running.get(name, 0) + 1
        try:
            yield
        finally:
            now = anyio.current_time()
            for name in names:
                self._running[name] -= 1
                if not self._running[name]:
                    self._totals[name] = self._totals.get(name, 0.0) + now - self._since[name]

    def read(self) -> Mapping[str, float]:
        """Seconds of each activity until now."""
        now = anyio.current_time()
        totals = dict(self._totals)
        for name, running in self._running.items():
            if running:
                totals[name] = totals.get(name, 0.0) + now - self._since[name]
        return totals
