"""From the thread that receives tensors to the engine's own thread, which alone may touch the model."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

from aoffpolicy.errors import WeightSyncError
from aoffpolicy.transport.manifest import Named

Use = Callable[[Iterator[Named]], Collection[str]]
"""Loads the tensors as they come and returns the names that it has loaded."""


@dataclass(frozen=True, slots=True, eq=False)
class _Offer:
    term: int
    tensors: Iterator[Named]
    loaded: Future[Collection[str]] = field(default_factory=Future)


class Handover:
    """Both sides meet here, in either order; `withdraw` sends both away."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._offer: _Offer | None = None
        self._withdrawn = (0, "")
        """The newest term given up, and why."""

    def offer(self, term: int, tensors: Iterator[Named]) -> Collection[str]:
        """In the receiving thread: let the engine's thread load the tensors; blocks until it has.

        Returns:
            The names loaded.

        Raises:
            WeightSyncError: The term was given up before the engine's thread came.
        """
        offer = _Offer(term, tensors)
        with self._changed:
            self._refuse(term)
            self._offer = offer
            self._changed.notify_all()
        return offer.loaded.result()

    def take(self, term: int, use: Use, timeout_s: float) -> None:
        """In the engine's thread: load what the receiving thread offers.

        Raises:
            WeightSyncError: The term was given up, or nothing was offered in time.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._offer is None or self._offer.term != term:
                self._refuse(term)
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise WeightSyncError(f"no weights came within {timeout_s:.1f} s (term {term})")
                self._changed.wait(left_s)
            offer, self._offer = self._offer, None
        try:
            offer.loaded.set_result(use(offer.tensors))
        except BaseException as error:
            offer.loaded.set_exception(error)
            raise

    def withdraw(self, term: int, reason: str) -> None:
        """Give up this term and those before it, for whoever waits and whoever is still to come; from any thread."""
        with self._changed:
            if term > self._withdrawn[0]:
                self._withdrawn = (term, reason)
            if self._offer is not None and self._offer.term <= term:
                self._offer.loaded.set_exception(WeightSyncError(reason))
                self._offer = None
            self._changed.notify_all()

    def _refuse(self, term: int) -> None:
        withdrawn, reason = self._withdrawn
        if term <= withdrawn:
            raise WeightSyncError(f"term {term} was given up: {reason}")
