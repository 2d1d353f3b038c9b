from __future__ import annotations

from contextlib import AsyncExitStack

import anyio
import pytest

from aoffpolicy.pool import PoolEmptyError, WorkerPool
from aoffpolicy.transport.wire import PeerId

pytestmark = pytest.mark.anyio
FIRST, SECOND = PeerId("rollout", 0), PeerId("rollout", 1)


def pool_of(**capacities: int) -> tuple[WorkerPool, list[tuple[int, int]]]:
    loads: list[tuple[int, int]] = []
    ranks = {PeerId("rollout", int(rank[1:])): capacity for rank, capacity in capacities.items()}
    return WorkerPool(lambda peer, load: loads.append((peer.rank, load)), ranks), loads


async def test_the_least_loaded_worker_is_taken_and_who_comes_too_late_waits_in_order() -> None:
    pool, loads = pool_of(r0=1, r1=2)
    order: list[int] = []

    async def wait(number: int) -> None:
        async with pool.worker():
            order.append(number)

    async with anyio.create_task_group() as tasks, pool.worker() as a, pool.worker() as b, pool.worker() as c:
        assert [a, b, c] == [FIRST, SECOND, SECOND]
        for number in range(3):
            tasks.start_soon(wait, number)
        await anyio.wait_all_tasks_blocked()
        assert not order
    assert order == [0, 1, 2]
    assert loads[:3] == [(0, 1), (1, 1), (1, 2)]
    assert pool.in_flight(FIRST) == pool.in_flight(SECOND) == 0


async def test_a_preferred_worker_is_waited_for_unless_it_is_gone() -> None:
    pool, _ = pool_of(r0=1, r1=1)
    async with AsyncExitStack() as held:
        assert await held.enter_async_context(pool.worker(1)) == SECOND
        with anyio.move_on_after(0.02) as scope:
            await held.enter_async_context(pool.worker(1))
        assert scope.cancelled_caught
        pool.remove(SECOND)
        assert await held.enter_async_context(pool.worker(1)) == FIRST


async def test_nobody_is_given_anything_while_the_pool_is_held() -> None:
    pool, _ = pool_of(r0=1, r1=1)
    pool.hold()
    taken: list[PeerId] = []

    async def take() -> None:
        async with pool.worker() as peer:
            taken.append(peer)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(take)
        await anyio.wait_all_tasks_blocked()
        pool.remove(FIRST)
        assert not taken and not pool.serves(SECOND)
        pool.serve({SECOND: 1})
    assert taken == [SECOND]


async def test_those_who_wait_are_told_when_the_last_worker_is_gone() -> None:
    pool, _ = pool_of(r0=1)
    told: list[int] = []

    async def wait(number: int) -> None:
        try:
            async with pool.worker():
                pass
        except PoolEmptyError:
            told.append(number)

    async with anyio.create_task_group() as tasks, pool.worker():
        for number in range(3):
            tasks.start_soon(wait, number)
        await anyio.wait_all_tasks_blocked()
        pool.remove(FIRST)
    assert told == [0, 1, 2]
    with pytest.raises(PoolEmptyError):
        async with pool.worker():
            pass
