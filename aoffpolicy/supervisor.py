"""Child processes: started, watched, and gone when the supervisor is."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE, STDOUT
from types import TracebackType
from typing import NoReturn, Self

import anyio
import anyio.abc

from aoffpolicy.child import Bootstrap
from aoffpolicy.errors import ProcessDiedError
from aoffpolicy.transport.tasks import background_tasks

logger = logging.getLogger(__name__)
MODULES = {
    "trainer": "aoffpolicy.trainer.worker",
    "rollout": "aoffpolicy.rollout.worker",
    "reward": "aoffpolicy.reward.worker",
}


@dataclass(slots=True, eq=False)
class Child:
    role: str
    rank: int
    process: anyio.abc.Process
    log: Path
    ending: bool = False
    """It was told to end, so that its death is no news."""

    @property
    def pid(self) -> int:
        return self.process.pid


class Supervisor:
    """Starts children and raises the first unexpected death that nobody takes over; leaves no child behind.

    Each child leads a process group of its own, so that Ctrl-C in a terminal reaches the launcher alone and a kill
    reaches whatever the child started. Should the launcher itself be killed, the children's parent-death signal
    ends them (see `aoffpolicy.child`).

    Args:
        log_dir: Folder of `<role>-<rank>.log`.
        stop_timeout_s: Seconds between the polite signal and the kill.
        takes_over: Called with an unexpected death; true if the run goes on without this child.
    """

    def __init__(
        self,
        log_dir: Path,
        stop_timeout_s: float,
        takes_over: Callable[[ProcessDiedError], bool] = lambda death: False,
    ) -> None:
        self._log_dir = log_dir
        self._stop_timeout_s = stop_timeout_s
        self._takes_over = takes_over
        self.children: list[Child] = []
        self.first_death: ProcessDiedError | None = None
        self._died = anyio.Event()
        self._stopping = False
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        self._tasks = await self._stack.enter_async_context(background_tasks())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        with anyio.CancelScope(shield=True):
            await self._end_all()
        return await self._stack.__aexit__(kind, error, trace)

    async def spawn(self, bootstrap: Bootstrap) -> Child:
        """Start a child and tell it who it is, over its standard input."""
        log = self._log_dir / f"{bootstrap.role}-{bootstrap.rank}.log"
        with log.open("ab") as sink:
            process = await anyio.open_process(
                [sys.executable, "-m", MODULES[bootstrap.role]],
                stdin=PIPE,
                stdout=sink,
                stderr=STDOUT,
                env=_environment(bootstrap),
                start_new_session=True,
            )
        child = Child(bootstrap.role, bootstrap.rank, process, log)
        self.children.append(child)
        self._tasks.start_soon(self._await_end, child, name=f"watch {child.role}-{child.rank}")
        assert process.stdin is not None
        with suppress(anyio.BrokenResourceError):  # it died already; the watcher says so
            await process.stdin.send(bootstrap.to_bytes())
            await process.stdin.aclose()
        return child

    async def watch(self) -> NoReturn:
        """Wait for the first child that ends without having been told to, and is missed.

        Raises:
            ProcessDiedError: Names its role, rank, and signal or exit code, with the end of its log.
        """
        await self._died.wait()
        assert self.first_death is not None
        raise self.first_death

    async def end(self, role: str, rank: int) -> None:
        """Kill this child, and whatever it started; returns when it is gone."""
        for child in [child for child in self.children if (child.role, child.rank) == (role, rank)]:
            child.ending = True
            _signal_group(child, signal.SIGKILL)
            await child.process.wait()
            self.children.remove(child)

    async def death_within(self, seconds: float) -> ProcessDiedError | None:
        """The first unexpected death, if there was one or there is one in time."""
        with anyio.move_on_after(seconds):
            await self._died.wait()
        return self.first_death

    def expect_exits(self) -> None:
        """From now on a child that ends has done as it was told."""
        self._stopping = True

    async def wait_all(self, timeout_s: float) -> bool:
        """Wait for every child to end by itself; returns whether all did."""
        with anyio.move_on_after(timeout_s) as scope:
            for child in self.children:
                await child.process.wait()
        return not scope.cancelled_caught

    async def _await_end(self, child: Child) -> None:
        code = await child.process.wait()
        if self._stopping or child.ending:
            return
        death = ProcessDiedError(child.role, child.rank, _cause_of_death(child, code), _tail(child.log))
        death.by_signal = code < 0
        if self.first_death is None and not self._takes_over(death):
            self.first_death = death
            self._died.set()

    async def _end_all(self) -> None:
        self._stopping = True
        for child in self.children:
            _signal_group(child, signal.SIGTERM)
        await self.wait_all(self._stop_timeout_s)
        for child in self.children:
            _signal_group(child, signal.SIGKILL)
        if not await self.wait_all(self._stop_timeout_s):
            alive = [f"{c.role}-{c.rank} (pid {c.pid})" for c in self.children if c.process.returncode is None]
            logger.error("still alive after SIGKILL: %s", ", ".join(alive))


def _environment(bootstrap: Bootstrap) -> dict[str, str]:
    """The parent's environment, with thread counts set before any numerical library is loaded."""
    threads = str(bootstrap.threads)
    return {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}


def _signal_group(child: Child, number: signal.Signals) -> None:
    """Signal the child's process group, which outlives the child itself if it started others."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, number)


def _cause_of_death(child: Child, code: int) -> str:
    if code < 0:
        return f"process {child.pid} was killed by {signal.Signals(-code).name}; see {child.log}"
    return f"process {child.pid} exited with code {code}; see {child.log}"


def _tail(log: Path, lines: int = 20) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
