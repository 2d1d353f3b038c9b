"""Records on their way to whoever reads them: in order, each once the evaluation of what it made is in."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Self

import anyio

from aoffpolicy.records import Evaluation, StepRecord


class RecordQueue(AsyncIterator[StepRecord]):
    """The iterator that `Scheduler.run` returns. Never full: the run does not wait for its reader."""

    def __init__(self) -> None:
        self._sender, self._receiver = anyio.create_memory_object_stream[StepRecord](float("inf"))
        self._closed: deque[StepRecord] = deque()
        self._held: set[int] = set()
        self._evaluations: dict[int, Evaluation] = {}

    def hold(self, step: int) -> None:
        """The record of this step is to wait for `evaluated`; so are those after it."""
        self._held.add(step)

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """The version that this step made is evaluated; step -1 made the initial one."""
        self._evaluations[step] = evaluation
        self._held.discard(step)
        self._hand_out()

    def release(self, step: int) -> None:
        """The evaluation that this step's record waits for will not come."""
        self._held.discard(step)
        self._hand_out()

    def put(self, record: StepRecord | None) -> None:
        if record is not None:
            self._closed.append(record)
            self._hand_out()

    def end(self) -> None:
        """There are no more records, and evaluations that are missing will not come."""
        self._held.clear()
        self._hand_out()
        self._sender.close()

    def close(self) -> None:
        self._sender.close()
        self._receiver.close()

    def _hand_out(self) -> None:
        while self._closed and self._closed[0].step not in self._held:
            record = self._closed.popleft()
            initial = self._evaluations.pop(-1, None)
            evaluation = self._evaluations.pop(record.step, None)
            self._sender.send_nowait(replace(record, evaluation=evaluation, initial_evaluation=initial))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StepRecord:
        try:
            return await self._receiver.receive()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None
