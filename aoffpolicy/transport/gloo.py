"""The gloo backend: CPU buffers over TCP.

gloo itself cannot abort: `ProcessGroupGloo.abort` and `shutdown` leave a blocked broadcast where it is. What works is
never to block inside it (waits here are on a condition that `abort` also signals) and to drop the group: the
sockets close, which ends the peers' broadcasts, whose members then drop theirs. Dropping joins gloo's own thread,
which may still be in a broadcast, so a thread of ours does it.
"""

from __future__ import annotations

import re
import threading
import time
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.distributed_c10d import ProcessGroupGloo, Store, Work
from torch.futures import Future

from aoffpolicy.transport.group import CollectiveError, GroupOptions


def create(store: Store, options: GroupOptions) -> GlooCollective:
    """Connect to all other ranks."""
    gloo = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stub lacks it
    gloo._timeout = timedelta(seconds=options.timeout_s)
    gloo._devices = [ProcessGroupGloo.create_device(hostname=options.interface)]
    gloo._threads = 1  # broadcasts then end in the order in which they were issued
    try:
        return GlooCollective(ProcessGroupGloo(store, options.rank, options.size, gloo))
    except RuntimeError as error:
        raise CollectiveError(
            f"gloo could not connect rank {options.rank} of {options.size}: {_words(error)}"
        ) from error


class GlooCollective:
    def __init__(self, group: ProcessGroupGloo) -> None:
        self._group = [group]
        """Empty once the group is left. The list is the only owner, so whoever clears it ends the group."""
        self._changed = threading.Condition()
        self._left = ""

    def broadcast(self, buffer: torch.Tensor, root: int, timeout_s: float) -> GlooBroadcast:
        with self._changed:
            if not self._group:
                raise CollectiveError(self._left)
            gloo: Any = self._group[0]  # the stub lacks broadcast
            work: Work = gloo.broadcast(buffer, root, timedelta(seconds=timeout_s))
            del gloo
        return GlooBroadcast(self, work, f"broadcast of {len(buffer)} bytes from rank {root}", timeout_s)

    def abort(self, reason: str) -> None:
        with self._changed:
            group, self._group = self._group, []
            self._left = self._left or reason
            self._changed.notify_all()
        if group:
            threading.Thread(target=group.clear, name="gloo-abort", daemon=True).start()

    def await_end(self, future: Future[list[torch.Tensor]], timeout_s: float) -> bool:
        """Wait until the future is done; False after the time-out.

        Raises:
            CollectiveError: The group was left.
        """
        future.add_done_callback(self._notify)
        with self._changed:
            ended = self._changed.wait_for(lambda: future.done() or bool(self._left), timeout_s)
            if self._left:
                raise CollectiveError(self._left)
        return ended

    def _notify(self, future: Future[list[torch.Tensor]]) -> None:
        with self._changed:
            self._changed.notify_all()


class GlooBroadcast:
    def __init__(self, collective: GlooCollective, work: Work, what: str, timeout_s: float) -> None:
        self._collective = collective
        self._work: Work | None = work
        self._what = what
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s

    def wait(self) -> None:
        work, self._work = self._work, None  # it holds sockets open: let go of it whatever happens
        if work is None:
            return
        try:
            if not self._collective.await_end(work.get_future(), self._deadline - time.monotonic()):
                raise CollectiveError(f"{self._what} did not end within {self._timeout_s:.1f} s")
            work.wait()
        except RuntimeError as error:
            raise CollectiveError(f"{self._what} broke: {_words(error)}") from error
        finally:
            del work


def _words(error: RuntimeError) -> str:
    """gloo's first sentence, without the place in its source and its advice."""
    return re.sub(r"^\[[^\]]*\] ", "", str(error)).splitlines()[0].split(". This is")[0]
