"""The rollout workers of a run: those that are lost are started again, and get weights with the next version."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import anyio

from aoffpolicy.config import Supervisor as Settings
from aoffpolicy.errors import RoleError
from aoffpolicy.pool import WorkerPool
from aoffpolicy.protocols import RolloutsLost
from aoffpolicy.scheduling.change import Change
from aoffpolicy.transport.messages import Started
from aoffpolicy.transport.wire import PeerId

logger = logging.getLogger(__name__)
LONGEST_BACKOFF_S = 60.0
LOSS_NOTICE_S = 3.0
"""A weight update is often the first to notice that a worker is lost: so long its error waits for that news."""


class NoRolloutError(RoleError, RolloutsLost):
    """No rollout worker is left, and none came back in time."""


class Processes(Protocol):
    """Ends and starts the process of a worker."""

    async def end(self, peer: PeerId) -> None:
        """End what is left of the process; returns when it is gone."""
        ...

    async def start_again(self, peer: PeerId, incarnation: int) -> Started:
        """Start a process in place of the one that was lost; returns when it can take weights.

        Raises:
            RoleError: It did not start.
        """
        ...


class Watcher(Protocol):
    """Is told what becomes of the workers; must not block."""

    def load(self, peer: PeerId, in_flight: int) -> None:
        """A worker has so many requests in flight now."""
        ...

    def lost(self, peer: PeerId, cause: str, groups: int, restart_in_s: float | None) -> None:
        """A worker is lost; so many groups go to others. None: it is not started again."""
        ...

    def loaded(self, peers: Collection[PeerId], version: int) -> None:
        """These workers generate under this version now."""
        ...


@dataclass(slots=True)
class _Rollout:
    incarnation: int
    capacity: int
    """Groups that it takes at once; 0 while it is being started again."""
    restarts: deque[float] = field(default_factory=deque)
    """When it was started again, those that still count."""
    given_up: bool = False


class RolloutFleet:
    """Who can generate, who needs weights first, and who is being started again.

    A worker that is lost leaves the pool at once, so that its groups go to others. It comes back into the pool with
    the first version that it loads after its restart, as everybody does after every version.

    Args:
        capacities: Groups that each worker takes at once.
        processes: Ends and starts workers.
        settings: How often a worker is started again, and how long nobody may be there.
        watcher: Is told what becomes of the workers.
    """

    def __init__(
        self, capacities: Mapping[PeerId, int], processes: Processes, settings: Settings, watcher: Watcher
    ) -> None:
        self.pool = WorkerPool(watcher.load)
        """Of those that hold the newest weights."""
        self.restarts = 0
        self._rollouts = {peer: _Rollout(0, capacity) for peer, capacity in capacities.items()}
        self._processes = processes
        self._settings = settings
        self._watcher = watcher
        self._lost: deque[tuple[PeerId, RoleError, int]] = deque()
        """Those that nobody has looked after yet, why, and how many groups they were generating."""
        self._closed = False
        self._change = Change()

    @property
    def size(self) -> int:
        """Workers as planned."""
        return len(self._rollouts)

    @property
    def here(self) -> dict[PeerId, int]:
        """The workers that can be asked for something now, with their incarnations."""
        return {peer: rollout.incarnation for peer, rollout in self._rollouts.items() if rollout.capacity}

    # --- Losing workers and starting them again ----------------------------------------------------------------------

    def takes_over(self, loss: RoleError) -> bool:
        """Whether this loss is one of ours and the run goes on; may be told of the same one again and again."""
        peer = PeerId(loss.role, loss.rank)
        rollout = self._rollouts.get(peer)
        if rollout is None or self._closed or not self._settings.max_restarts:
            return False
        if rollout.capacity:
            rollout.capacity = 0
            self.pool.remove(peer)
            self._lost.append((peer, loss, self.pool.in_flight(peer)))
            self._change.notify()
        return True

    async def run(self) -> None:
        """Start again who is lost, until `close`."""
        async with anyio.create_task_group() as tasks:
            while not self._closed:
                while self._lost:
                    tasks.start_soon(self._restart, *self._lost.popleft())
                await self._change.next()
            tasks.cancel_scope.cancel()

    def close(self) -> None:
        """From now on nobody is started again, and nobody is waited for."""
        self._closed = True
        self._change.notify()

    async def _restart(self, peer: PeerId, loss: RoleError, groups: int) -> None:
        rollout = self._rollouts[peer]
        while (backoff_s := self._backoff_s(rollout)) is not None and not self._closed:
            self._watcher.lost(peer, loss.cause, groups, backoff_s)
            await self._processes.end(peer)
            await anyio.sleep(backoff_s)
            rollout.incarnation += 1
            self.restarts += 1
            try:
                started = await self._processes.start_again(peer, rollout.incarnation)
            except RoleError as error:
                loss, groups = error, 0
                continue
            rollout.capacity = started.capacity
            self._change.notify()
            return
        rollout.given_up = True
        self._watcher.lost(peer, loss.cause, groups, None)
        await self._processes.end(peer)
        self._change.notify()

    def _backoff_s(self, rollout: _Rollout) -> float | None:
        """How long to wait before the next restart; None if there were too many."""
        now = anyio.current_time()
        while rollout.restarts and rollout.restarts[0] < now - self._settings.restart_window_s:
            rollout.restarts.popleft()
        if len(rollout.restarts) >= self._settings.max_restarts:
            return None
        rollout.restarts.append(now)
        doubled: float = self._settings.restart_backoff_s * 2.0 ** (len(rollout.restarts) - 1)
        return min(doubled, LONGEST_BACKOFF_S)

    # --- Weights -----------------------------------------------------------------------------------------------------

    async def receivers(self) -> dict[PeerId, int]:
        """Who takes the next version, with incarnations; waits for somebody where nobody is here.

        Raises:
            NoRolloutError: Nobody came in time, or nobody will.
        """
        timeout_s = self._settings.rollouts_timeout_s
        with anyio.move_on_after(timeout_s):
            await self._change.until(lambda: bool(self.here) or self._closed or self._all_given_up)
        if here := self.here:
            return here
        if self._closed:
            raise NoRolloutError("rollout", 0, "all rollout workers are lost, and the run is to end")
        if self._all_given_up:
            limits = f"supervisor.max_restarts = {self._settings.max_restarts}"
            raise NoRolloutError("rollout", 0, f"every rollout worker was lost too often ({limits}); see their logs")
        raise NoRolloutError(
            "rollout",
            0,
            f"all rollout workers are lost, and none came back within {timeout_s:g} s (supervisor.rollouts_timeout_s)",
        )

    @property
    def _all_given_up(self) -> bool:
        return all(rollout.given_up for rollout in self._rollouts.values())

    async def lost_one_of(self, receivers: Mapping[PeerId, int]) -> bool:
        """Whether one of these is lost, or is so in a moment."""
        with anyio.move_on_after(LOSS_NOTICE_S):
            await self._change.until(lambda: not receivers.items() <= self.here.items())
        return not receivers.items() <= self.here.items()

    def hold(self) -> None:
        """New weights come: until `serve` nobody is given a group."""
        self.pool.hold()

    def serve(self, receivers: Mapping[PeerId, int], version: int) -> None:
        """These hold the newest weights, and take groups as far as they are still here."""
        capacities = {peer: self._rollouts[peer].capacity for peer, _ in receivers.items() & self.here.items()}
        self.pool.serve(capacities)
        self._watcher.loaded(capacities, version)
