"""Connections that are cut between a run and its reader: what comes back, what is missed, who says so."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import anyio
import anyio.abc
import anyio.to_thread
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aoffpolicy.errors import PeerLostError
from aoffpolicy.transport.address import Address
from aoffpolicy.transport.event_order import EventOrder
from aoffpolicy.transport.events import RunEvent, StatusPublisher, StatusSubscriber, StepEvent

pytestmark = pytest.mark.anyio
RUNNING = RunEvent(name="r", state="running", steps=8, run_dir="/runs/r")


class Cable:
    """Passes bytes between a reader and the publisher until it is cut."""

    def __init__(self, target: Address) -> None:
        self._target = target
        self._whole = True
        self._held: list[anyio.abc.SocketStream] = []

    async def cut(self) -> None:
        self._whole = False
        for stream in self._held:
            await anyio.aclose_forcefully(stream)
        self._held.clear()

    def mend(self) -> None:
        self._whole = True

    async def serve(self, near: anyio.abc.SocketStream) -> None:
        if not self._whole:
            await anyio.aclose_forcefully(near)
            return
        far = await anyio.connect_tcp(self._target.host, self._target.port)
        self._held += [near, far]
        async with near, far, anyio.create_task_group() as tasks:
            tasks.start_soon(_copy, near, far)
            tasks.start_soon(_copy, far, near)


async def _copy(source: anyio.abc.SocketStream, sink: anyio.abc.SocketStream) -> None:
    with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream):
        while True:
            await sink.send(await source.receive())
    await anyio.aclose_forcefully(sink)


@asynccontextmanager
async def cabled() -> AsyncIterator[tuple[StatusPublisher, Cable, Address]]:
    async with StatusPublisher("127.0.0.1", keys=None, reader_public=None, run_id="run-1") as publisher:
        cable = Cable(publisher.address)
        async with (
            await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(listener.serve, cable.serve)
            yield publisher, cable, Address("127.0.0.1", listener.extra(anyio.abc.SocketAttribute.local_port))
            tasks.cancel_scope.cancel()


async def steps_until(subscriber: StatusSubscriber, last: int) -> list[tuple[int, bool]]:
    """Step and whether it was a last value, until the step comes."""
    got: list[tuple[int, bool]] = []
    with anyio.fail_after(20):
        async for event in subscriber:
            if isinstance(event, StepEvent):
                got.append((event.step, event.replay))
                if event.step == last:
                    return got
    return got


async def test_what_happened_while_the_connection_was_cut_comes_as_last_values_and_nothing_twice() -> None:
    async with cabled() as (publisher, cable, address):
        publisher.publish(RUNNING)
        with StatusSubscriber(address, timeout_s=10, reconnect_s=15) as subscriber:
            await anyio.to_thread.run_sync(subscriber.snapshot, 10.0)
            publisher.publish(StepEvent(step=0, metrics={}))
            assert await steps_until(subscriber, 0) == [(0, False)]
            await cable.cut()
            for step in (1, 2, 3):
                publisher.publish(StepEvent(step=step, metrics={}))
            cable.mend()
            assert await steps_until(subscriber, 3) == [(1, True), (2, True), (3, True)]
            publisher.publish(StepEvent(step=4, metrics={}))
            assert await steps_until(subscriber, 4) == [(4, False)]
            assert subscriber.missed == 0


async def test_events_that_no_last_value_stands_for_are_counted_as_missed() -> None:
    async with cabled() as (publisher, cable, address):
        with StatusSubscriber(address, timeout_s=10, reconnect_s=15) as subscriber:
            await anyio.to_thread.run_sync(subscriber.snapshot, 10.0)
            publisher.publish(StepEvent(step=0, metrics={}))
            await steps_until(subscriber, 0)
            await cable.cut()
            for _ in range(5):
                publisher.publish(RUNNING)  # only the newest of them is kept
            cable.mend()
            publisher.publish(StepEvent(step=1, metrics={}))
            await steps_until(subscriber, 1)
            publisher.publish(StepEvent(step=2, metrics={}))
            await steps_until(subscriber, 2)
            assert subscriber.missed == 4


@pytest.mark.parametrize("wait_s", [0.0, 1.0])
async def test_a_connection_that_does_not_come_back_in_time_is_given_up(wait_s: float) -> None:
    async with cabled() as (publisher, cable, address):
        publisher.publish(RUNNING)
        with StatusSubscriber(address, timeout_s=20, reconnect_s=wait_s) as subscriber:
            await anyio.to_thread.run_sync(subscriber.snapshot, 10.0)
            await cable.cut()
            began = time.monotonic()
            with anyio.fail_after(15), pytest.raises(PeerLostError, match="has ended"):
                await anext(subscriber)
            assert wait_s - 0.1 <= time.monotonic() - began < wait_s + 5


def step(seq: int, *, replay: bool = False, run_id: str = "a") -> StepEvent:
    return StepEvent(step=seq, metrics={}, seq=seq, replay=replay, run_id=run_id)


def taken(order: EventOrder, events: Sequence[StepEvent]) -> list[int]:
    return [event.seq for event in events if order.is_new(event)]


@given(st.integers(1, 30), st.data())
def test_live_events_and_last_values_mix_in_any_way_without_a_repetition(newest: int, data: st.DataObject) -> None:
    """The publisher answers a newcomer at some point between two live events; both streams keep their own order."""
    joined = data.draw(st.integers(0, newest))
    asked = data.draw(st.integers(joined, newest))
    replayed = sorted(data.draw(st.sets(st.integers(1, asked)))) if asked else []
    live, last = [step(s) for s in range(joined + 1, newest + 1)], [step(s, replay=True) for s in replayed]
    first_live = live[: asked - joined]  # these were sent before the answer
    order = EventOrder()
    got = taken(order, [*first_live, *last, *live[asked - joined :]])
    assert len(got) == len(set(got))
    assert set(got) == {*range(joined + 1, newest + 1), *replayed}
    assert order.missed == 0


def test_a_slow_reader_learns_how_many_it_missed() -> None:
    order = EventOrder()
    assert taken(order, [step(5), step(6), step(10)]) == [5, 6, 10]
    assert order.missed == 3


def test_another_run_at_the_same_address_counts_from_its_own_start() -> None:
    order = EventOrder()
    taken(order, [step(500), step(501)])
    order.resume()
    assert taken(order, [step(1, replay=True, run_id="b"), step(2, run_id="b")]) == [1, 2]
    assert order.missed == 0
