"""Work beside the run: a thread that takes what it is given, in order, and can neither stop nor slow the run."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)
Item = TypeVar("Item")
CAPACITY = 100
"""Items that wait at most; newer ones are dropped while it is full."""


class Outlet(Generic[Item]):
    """Hands items to `handle` in a thread of its own.

    Whatever `handle` raises is logged, counted and kept for `take_news`; the next item is tried again. So a full disk
    or a server that is away costs what was to be written, and nothing else.

    Args:
        name: Of the thread, and in what is said about it.
        handle: Called with one item after the other.
        finish: Called in the thread after the last item.
    """

    def __init__(self, name: str, handle: Callable[[Item], None], finish: Callable[[], None] = lambda: None) -> None:
        self.name = name
        self.failed = 0
        """Items that `handle` raised on."""
        self.dropped = 0
        """Items that found no room."""
        self._handle = handle
        self._finish = finish
        self._waiting: queue.Queue[Item | None] = queue.Queue(CAPACITY)
        self._news = ""
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def put(self, item: Item) -> None:
        """Pass an item on; returns at once."""
        try:
            self._waiting.put_nowait(item)
        except queue.Full:
            self.dropped += 1
            self._news = f"{self.name}: it takes things too slowly, so {self.dropped} were left out"

    def take_news(self) -> str:
        """What went wrong since the last call, in one line; mostly nothing."""
        news, self._news = self._news, ""
        return news

    def close(self, timeout_s: float) -> bool:
        """Let it do what is left; blocks. Returns whether that was done in time."""
        try:
            self._waiting.put(None, timeout=timeout_s)
        except queue.Full:
            logger.warning("%s: not closed within %g s", self.name, timeout_s)
            return False
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning("%s: not done within %g s; what is left is lost", self.name, timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (item := self._waiting.get()) is not None:
            self._try(self._handle, item)
        self._try(self._finish)

    def _try(self, act: Callable[..., None], *items: Item) -> None:
        try:
            act(*items)
        except Exception as error:  # of any library and any kind: it must not end the run
            self.failed += 1
            self._news = f"{self.name}: {type(error).__name__}: {error}"
            logger.warning("%s failed", self.name, exc_info=True)
