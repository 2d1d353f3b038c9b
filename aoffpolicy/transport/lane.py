"""One named thread that does blocking work in the order given, for an event loop that must not block."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")


class Lane:
    """A daemon thread and its queue: unlike an executor's, it cannot keep a process alive that wants to end.

    Args:
        name: Of the thread.
    """

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    async def run(self, job: Callable[[], T]) -> T:
        """Do a job after those already queued; cancelled while it is running, the job itself runs on.

        Returns:
            What the job returns.
        """
        future: Future[T] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)

        self._jobs.put(work)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """End the thread once the jobs already queued are done."""
        self._jobs.put(None)

    def _serve(self) -> None:
        while (work := self._jobs.get()) is not None:
            work()
            del work  # what it holds, sockets among it, must not live until the next job
