"""The fleet of rollout workers, with processes that are only counted."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest

from aoffpolicy.config import Supervisor as Settings
from aoffpolicy.errors import DeadlineError, PeerLostError
from aoffpolicy.fleet import NoRolloutError, RolloutFleet
from aoffpolicy.pool import PoolEmptyError
from aoffpolicy.transport.messages import Started
from aoffpolicy.transport.wire import PeerId

pytestmark = pytest.mark.anyio
FIRST, SECOND = PeerId("rollout", 0), PeerId("rollout", 1)


@dataclass
class Processes:
    ended: list[PeerId] = field(default_factory=list)
    started: list[tuple[PeerId, int]] = field(default_factory=list)
    failures: int = 0
    """Of the next starts."""

    async def end(self, peer: PeerId) -> None:
        self.ended.append(peer)

    async def start_again(self, peer: PeerId, incarnation: int) -> Started:
        self.started.append((peer, incarnation))
        if self.failures:
            self.failures -= 1
            raise DeadlineError(peer.role, peer.rank, "it did not come")
        return Started(capacity=2, context_length=32)


@dataclass
class Watcher:
    losses: list[tuple[PeerId, int, float | None]] = field(default_factory=list)
    versions: list[tuple[tuple[PeerId, ...], int]] = field(default_factory=list)

    def load(self, peer: PeerId, in_flight: int) -> None: ...

    def lost(self, peer: PeerId, cause: str, groups: int, restart_in_s: float | None) -> None:
        self.losses.append((peer, groups, restart_in_s))

    def loaded(self, peers: Collection[PeerId], version: int) -> None:
        self.versions.append((tuple(sorted(peers)), version))


@asynccontextmanager
async def running(**settings: Any) -> AsyncIterator[tuple[RolloutFleet, Processes, Watcher]]:
    processes, watcher = Processes(), Watcher()
    wanted = Settings.model_validate({"restart_backoff_s": 0.01, **settings})
    fleet = RolloutFleet({FIRST: 2, SECOND: 2}, processes, wanted, watcher)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(fleet.run)
        fleet.serve(fleet.here, version=0)
        with anyio.fail_after(5):
            yield fleet, processes, watcher
        fleet.close()


def loss(peer: PeerId) -> PeerLostError:
    return PeerLostError(peer.role, peer.rank, "no heartbeat")


async def back(fleet: RolloutFleet, peer: PeerId) -> None:
    while peer not in fleet.here:
        await anyio.sleep(0.005)


async def test_a_lost_worker_leaves_the_pool_at_once_and_returns_with_the_next_weights() -> None:
    async with running() as (fleet, processes, watcher):
        async with fleet.pool.worker(1) as peer:
            assert peer == SECOND
            assert fleet.takes_over(loss(SECOND))
            assert fleet.takes_over(loss(SECOND)), "news that come twice"
            assert not fleet.pool.serves(SECOND)
        assert fleet.here == {FIRST: 0}
        await back(fleet, SECOND)
        assert fleet.here == {FIRST: 0, SECOND: 1}
        assert not fleet.pool.serves(SECOND), "it has no weights yet"
        fleet.hold()
        receivers = await fleet.receivers()
        fleet.serve(receivers, version=1)
        assert fleet.pool.serves(SECOND)
        assert (processes.ended, processes.started) == ([SECOND], [(SECOND, 1)])
        assert watcher.losses == [(SECOND, 1, 0.01)]
        assert watcher.versions[-1] == ((FIRST, SECOND), 1)
        assert fleet.restarts == 1


async def test_a_worker_that_was_replaced_during_an_update_does_not_count_as_having_loaded_it() -> None:
    async with running() as (fleet, _, watcher):
        fleet.hold()
        receivers = await fleet.receivers()
        fleet.takes_over(loss(SECOND))
        assert await fleet.lost_one_of(receivers)
        await back(fleet, SECOND)
        assert await fleet.lost_one_of(receivers)
        fleet.serve(receivers, version=1)
        assert fleet.pool.serves(FIRST) and not fleet.pool.serves(SECOND)
        assert watcher.versions[-1] == ((FIRST,), 1)


async def test_with_all_lost_those_who_wait_are_told_and_weights_wait_for_the_first_to_come_back() -> None:
    async with running() as (fleet, _, _):
        fleet.takes_over(loss(FIRST))
        fleet.takes_over(loss(SECOND))
        with pytest.raises(PoolEmptyError):
            async with fleet.pool.worker():
                pass
        fleet.hold()
        receivers = await fleet.receivers()
        assert 1 in receivers.values()
        fleet.serve(receivers, version=3)
        async with fleet.pool.worker() as peer:
            assert peer in receivers


async def test_restarts_are_spaced_out_counted_and_end() -> None:
    async with running(max_restarts=3) as (fleet, processes, watcher):
        processes.failures = 2
        fleet.takes_over(loss(FIRST))
        await back(fleet, FIRST)
        assert [wait for _, _, wait in watcher.losses] == [0.01, 0.02, 0.04]
        fleet.takes_over(loss(FIRST))
        fleet.takes_over(loss(SECOND))
        assert await fleet.receivers() == {SECOND: 1}, "the other one goes on without it"
        assert (FIRST, 0, None) in watcher.losses
        assert fleet.takes_over(loss(FIRST)), "late news of who was given up"


async def test_restarts_of_long_ago_do_not_count() -> None:
    async with running(max_restarts=1, restart_window_s=0.05) as (fleet, _, watcher):
        for _ in range(3):
            fleet.takes_over(loss(FIRST))
            await back(fleet, FIRST)
            await anyio.sleep(0.06)
        assert [wait for _, _, wait in watcher.losses] == [0.01] * 3


async def test_a_run_whose_workers_are_all_given_up_does_not_wait() -> None:
    async with running(max_restarts=1) as (fleet, processes, _):
        processes.failures = 2
        fleet.takes_over(loss(FIRST))
        fleet.takes_over(loss(SECOND))
        with pytest.raises(NoRolloutError, match=r"every rollout worker was lost too often \(supervisor.max_restarts"):
            await fleet.receivers()


async def test_a_run_waits_for_its_workers_no_longer_than_it_may() -> None:
    async with running(rollouts_timeout_s=0.05, restart_backoff_s=30) as (fleet, _, _):
        fleet.takes_over(loss(FIRST))
        fleet.takes_over(loss(SECOND))
        with pytest.raises(NoRolloutError, match=r"none came back within 0.05 s \(supervisor.rollouts_timeout_s\)"):
            await fleet.receivers()


async def test_a_run_that_is_to_end_waits_for_nobody() -> None:
    async with running(restart_backoff_s=30) as (fleet, _, _):
        fleet.takes_over(loss(FIRST))
        fleet.takes_over(loss(SECOND))
        fleet.close()
        with pytest.raises(NoRolloutError, match="the run is to end"):
            await fleet.receivers()
        assert not fleet.takes_over(loss(FIRST))


async def test_without_restarts_and_for_other_roles_a_loss_is_not_ours() -> None:
    async with running(max_restarts=0) as (fleet, _, _):
        assert not fleet.takes_over(loss(FIRST))
    async with running() as (fleet, _, _):
        assert not fleet.takes_over(PeerLostError("trainer", 0, "gone"))
