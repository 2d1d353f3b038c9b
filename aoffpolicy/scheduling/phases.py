"""What goes on when, on the clock of the event loop: told to an observer, and added up for the records."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import anyio

from aoffpolicy.records import PhaseEvent, PhaseName


class Phases:
    """Adds up the time during which at least one activity of a name is going on; names may overlap.

    Args:
        observer: Called with every phase that begins or ends.
    """

    def __init__(self, observer: Callable[[PhaseEvent], None] | None) -> None:
        self._observer = observer
        self._running: dict[str, int] = {}
        self._since: dict[str, float] = {}
        self._totals: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: PhaseName, step: int, version: int) -> Iterator[None]:
        """A phase: an activity that the observer hears of."""
        began = anyio.current_time()
        self.tell(name, step, version, "begin", began)
        self.begin(name)
        try:
            yield
        finally:
            self.end(name)
        now = anyio.current_time()
        self.tell(name, step, version, "end", now, now - began)

    def begin(self, *names: str) -> None:
        """An activity of these names begins."""
        now = anyio.current_time()
        for name in names:
            running = self._running.get(name, 0)
            self._running[name] = running + 1
            if not running:
                self._since[name] = now

    def end(self, *names: str) -> None:
        now = anyio.current_time()
        for name in names:
            self._running[name] -= 1
            if not self._running[name]:
                self._totals[name] = self._totals.get(name, 0.0) + now - self._since[name]

    def tell(
        self,
        name: PhaseName,
        step: int,
        version: int,
        state: Literal["begin", "end"],
        now: float,
        seconds: float = 0.0,
    ) -> None:
        """Tell the observer of a phase that is made of many activities."""
        if self._observer is not None:
            self._observer(PhaseEvent(name, step, version, state, now, seconds))

    def read(self) -> Mapping[str, float]:
        """Seconds of each activity until now."""
        now = anyio.current_time()
        totals = dict(self._totals)
        for name, running in self._running.items():
            if running:
                totals[name] = totals.get(name, 0.0) + now - self._since[name]
        return totals
