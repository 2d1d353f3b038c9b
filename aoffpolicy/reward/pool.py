"""Scoring in processes that can be killed: whatever a reward function does, every completion gets a reward or a reason.

Invariant: after a process hung, died or was left in the middle of a task, it is killed with all that it started and
never used again; only the completion it was working on has no reward, the others go to its replacement.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeVar

import anyio
import msgspec
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from aoffpolicy.data.rows import pack_row
from aoffpolicy.errors import DataError, first_cause
from aoffpolicy.reward import wire
from aoffpolicy.transport.messages import Scored

logger = logging.getLogger(__name__)
T = TypeVar("T")

GRACE_S = 1.0
"""An async function's time-out is kept inside the process; so much later the process counts as stuck."""
CLOSE_S = 2.0
"""A process whose work is done gets so long for what it does at exit."""


class RewardPool:
    """Scores completions in a fixed number of processes; use as an async context manager, or `start` and `aclose`.

    Args:
        function: Name of the reward function, see `functions.resolve`.
        timeout_s: Seconds for scoring one completion.
        processes: Scoring processes; tasks wait for a free one.
        start_timeout_s: Seconds for starting a process and importing the function.
    """

    def __init__(self, function: str, *, timeout_s: float, processes: int = 2, start_timeout_s: float = 120.0) -> None:
        self._slots = [_Slot(function, timeout_s, start_timeout_s) for _ in range(processes)]
        self._idle = list(self._slots)
        self._free = anyio.Semaphore(processes)

    @property
    def capacity(self) -> int:
        """Tasks that keep every process busy, and as many that wait."""
        return 2 * len(self._slots)

    async def start(self) -> None:
        """Start all processes and import the function.

        Raises:
            DataError: The function cannot be used, or did not import in time.
        """
        try:
            async with anyio.create_task_group() as tasks:
                for slot in self._slots:
                    tasks.start_soon(slot.process)
        except BaseException as error:
            await self.aclose()
            raise first_cause(error) from None

    async def score(self, row: Mapping[str, Any], completions: Sequence[str]) -> Scored:
        """Score the completions of one row; cancelling kills the process that works on them.

        Returns:
            A finite reward or None for each completion, and the reason of each None, in order.

        Raises:
            DataError: A replacement process could not be started.
        """
        packed = msgspec.Raw(pack_row(row))
        async with self._free:
            slot = self._idle.pop()
            try:
                results = await slot.score(packed, completions)
            finally:
                self._idle.append(slot)
        return Scored(
            rewards=tuple(result.reward for result in results),
            errors=tuple(result.error for result in results if result.reward is None),
        )

    async def aclose(self) -> None:
        """End all processes; returns when they are gone, also when cancelled."""
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as tasks:
                for slot in self._slots:
                    tasks.start_soon(slot.aclose)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class _ScoringProcess:
    """One running scoring process and the pipes to it."""

    def __init__(self, process: Process, function: str) -> None:
        assert process.stdin is not None and process.stdout is not None
        self.concurrent = False
        self._process = process
        self._function = function
        self._stdin = process.stdin
        self._stdout = BufferedByteReceiveStream(process.stdout)

    @classmethod
    async def start(cls, function: str, timeout_s: float, start_timeout_s: float) -> Self:
        """Spawn it and import the function.

        Raises:
            DataError: The function cannot be used, or did not import in time.
        """
        # A session of its own: Ctrl-C in a terminal does not reach it, and one signal ends all that a reward started.
        process = await anyio.open_process(
            [sys.executable, "-m", "aoffpolicy.reward.process", str(os.getpid())],
            stderr=None,
            env={"OMP_NUM_THREADS": "1", **os.environ},
            start_new_session=True,
        )
        self = cls(process, function)
        try:
            with anyio.fail_after(start_timeout_s):
                await self.send(wire.Load(function, timeout_s))
                loaded = await self.receive(wire.Loaded)
        except TimeoutError:
            await self.kill()
            raise DataError(f"reward.function: {function} was not imported within {start_timeout_s:g} s") from None
        except (anyio.IncompleteRead, anyio.EndOfStream, anyio.BrokenResourceError):
            ending = await self.kill()
            raise DataError(f"reward.function: importing {function} ended its process: {ending}") from None
        except BaseException:
            await self.kill()
            raise
        if loaded.error:
            await self.kill()
            raise DataError(loaded.error)
        self.concurrent = loaded.concurrent
        return self

    async def send(self, message: msgspec.Struct) -> None:
        await self._stdin.send(wire.frame(message))

    async def receive(self, kind: type[T]) -> T:
        (length,) = wire.LENGTH.unpack(await self._stdout.receive_exactly(wire.LENGTH.size))
        return msgspec.msgpack.decode(await self._stdout.receive_exactly(length), type=kind)

    async def kill(self) -> str:
        """End the process and everything in its session now; returns how it ended."""
        with anyio.CancelScope(shield=True):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            code = await self._process.wait()
            await self._process.aclose()
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    async def aclose(self) -> None:
        """Let it end by itself, for a short while."""
        with anyio.move_on_after(CLOSE_S):
            await self._stdin.aclose()
            await self._process.wait()
        await self.kill()


class _Slot:
    """Place of one process in the pool: whoever holds it gives one task at a time to whichever process is there."""

    def __init__(self, function: str, timeout_s: float, start_timeout_s: float) -> None:
        self._function = function
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._process: _ScoringProcess | None = None

    async def process(self) -> _ScoringProcess:
        """The process, started if there is none."""
        if self._process is None:
            self._process = await _ScoringProcess.start(self._function, self._timeout_s, self._start_timeout_s)
        return self._process

    async def score(self, row: msgspec.Raw, completions: Sequence[str]) -> list[wire.Result]:
        """One result for each completion, in order, through as many processes as it takes."""
        results: dict[int, wire.Result] = {}
        concurrent = True
        while len(results) < len(completions):
            process = await self.process()
            open_numbers = [number for number in range(len(completions)) if number not in results]
            task = wire.Task(row, [(number, completions[number]) for number in open_numbers], concurrent)
            failure = await self._work(process, task, results)
            unscored = [number for number in open_numbers if number not in results]
            if not failure:
                continue
            logger.warning("a scoring process of %s was replaced: %s", self._function, failure)
            if process.concurrent and concurrent and len(unscored) > 1:
                concurrent = False  # any of them may be the culprit: one after the other tells
            elif unscored:
                results[unscored[0]] = wire.Result(unscored[0], None, failure)
        return [results[number] for number in range(len(completions))]

    async def _work(self, process: _ScoringProcess, task: wire.Task, results: dict[int, wire.Result]) -> str:
        """Let the process work on a task, and collect its results; returns what went wrong with the process, or ""."""
        patience_s = self._timeout_s + (GRACE_S if process.concurrent else 0.0)
        failure = ""
        try:
            with anyio.fail_after(patience_s) as scope:
                await process.send(task)
                for _ in task.completions:
                    result = await process.receive(wire.Result)
                    results[result.number] = result
                    scope.deadline = anyio.current_time() + patience_s
        except TimeoutError:
            failure = f"hang: no reward within {self._timeout_s:g} s"
            await self._discard(process)
        except (anyio.IncompleteRead, anyio.EndOfStream, anyio.BrokenResourceError):
            failure = f"crash: the scoring process ended with {await self._discard(process)}"
        except BaseException:
            await self._discard(process)
            raise
        return failure

    async def _discard(self, process: _ScoringProcess) -> str:
        self._process = None
        return await process.kill()

    async def aclose(self) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            await process.aclose()
