from __future__ import annotations

import itertools
import json
import secrets
import stat
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from aoffpolicy.errors import ConfigError, DeadlineError, PeerLostError, ProtocolError
from aoffpolicy.transport.address import Address
from aoffpolicy.transport.event_schema import LIVE, REPLAY, decode_event, encode_event
from aoffpolicy.transport.events import (
    AnyEvent,
    ErrorEvent,
    PhaseEvent,
    RunEvent,
    StatusPublisher,
    StatusSubscriber,
    StepEvent,
    WorkerEvent,
    kind_of,
    subscriber_for,
    write_status_files,
)
from aoffpolicy.transport.security import KeyPair, read_key_file, write_key_file

pytestmark = pytest.mark.anyio
RUNNING = RunEvent(name="r", state="running", steps=8, run_dir="/runs/r")


@dataclass
class Stream:
    publisher: StatusPublisher
    publisher_keys: KeyPair | None
    reader_keys: KeyPair | None

    def subscriber(self, timeout_s: float | None = 5.0) -> StatusSubscriber:
        server_key = self.publisher_keys.public if self.publisher_keys else None
        return StatusSubscriber(
            self.publisher.address, key=self.reader_keys, server_key=server_key, timeout_s=timeout_s
        )


@asynccontextmanager
async def stream(address: str = "127.0.0.1", *, curve: bool = False) -> AsyncIterator[Stream]:
    keys, reader = (KeyPair.generate(), KeyPair.generate()) if curve else (None, None)
    reader_public = reader.public if reader else None
    async with StatusPublisher(address, keys=keys, reader_public=reader_public, run_id="run-1") as publisher:
        yield Stream(publisher, keys, reader)


async def take(subscriber: StatusSubscriber, count: int) -> list[AnyEvent]:
    with anyio.fail_after(5):
        return [await anext(subscriber) for _ in range(count)]


def bare(event: AnyEvent) -> AnyEvent:
    """Without what the publisher stamps."""
    return msgspec.structs.replace(event, seq=0, time=0.0, run_id="", replay=False)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
@pytest.mark.parametrize("curve", [False, True], ids=["plain", "curve"])
async def test_a_late_subscriber_gets_the_last_value_of_each_and_then_the_news(host: str, curve: bool) -> None:
    async with stream(host, curve=curve) as s:
        began = time.time()
        old: list[AnyEvent] = [
            RUNNING,
            WorkerEvent(role="trainer", rank=0, state="starting"),
            StepEvent(step=0, metrics={"loss": 1.0}),
            WorkerEvent(role="rollout", rank=0, state="starting"),
            WorkerEvent(role="trainer", rank=0, state="ready", host="h", pid=3, device="cpu"),
            PhaseEvent(name="train", step=1, version=1, state="begin"),
            StepEvent(step=1, metrics={"loss": 0.5, "skipped": False, "note": None}),
            ErrorEvent(role="reward", rank=0, cause="hang"),
        ]
        for event in old:
            s.publisher.publish(event)
        with s.subscriber() as subscriber:
            replayed = await take(subscriber, 7)
            assert [bare(event) for event in replayed] == [old[i] for i in (0, 2, 3, 4, 5, 6, 7)]
            assert [event.seq for event in replayed] == [1, 3, 4, 5, 6, 7, 8]
            assert all(event.replay and event.run_id == "run-1" and event.schema == 1 for event in replayed)
            assert all(began <= event.time <= time.time() for event in replayed)
            news = StepEvent(step=2, metrics={"loss": 0.25})
            s.publisher.publish(news)
            (event,) = await take(subscriber, 1)
            assert bare(event) == news
            assert (event.seq, event.replay) == (9, False)


async def test_a_newcomer_does_not_disturb_those_who_are_there() -> None:
    async with stream() as s:
        s.publisher.publish(RUNNING)
        with s.subscriber() as first, s.subscriber() as second:
            assert [event.replay for event in await take(first, 1)] == [True]
            assert [event.replay for event in await take(second, 1)] == [True]
            s.publisher.publish(StepEvent(step=0, metrics={}))
            for subscriber in (first, second):
                assert [(event.seq, event.replay) for event in await take(subscriber, 1)] == [(2, False)]


async def test_a_subscriber_without_an_event_loop_gets_the_same() -> None:
    async with stream(curve=True) as s:
        s.publisher.publish(RUNNING)

        def read() -> list[AnyEvent]:
            with s.subscriber() as subscriber:
                return [next(subscriber.blocking())]

        assert [bare(event) for event in await anyio.to_thread.run_sync(read)] == [RUNNING]


async def test_a_snapshot_of_a_run_that_said_nothing_yet_is_empty() -> None:
    async with stream() as s:
        with s.subscriber() as subscriber:
            assert await anyio.to_thread.run_sync(subscriber.snapshot, 5.0) == []


async def test_nothing_is_seen_twice_or_missed_by_one_who_joins_in_the_middle() -> None:
    async with stream() as s:
        joining = anyio.Event()

        async def publish() -> None:
            for step in itertools.count():
                s.publisher.publish(StepEvent(step=step, metrics={}))
                if step == 50:
                    joining.set()
                await anyio.sleep(0.001)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(publish)
            await joining.wait()
            with s.subscriber() as subscriber:
                events = [await anext(subscriber)]
                while sum(not event.replay for event in events) < 100:
                    events.append(await anext(subscriber))
            tasks.cancel_scope.cancel()
        assert [event.seq for event in events] == list(range(1, len(events) + 1))
        replays = [event.replay for event in events]
        assert replays == sorted(replays, reverse=True)  # all last values come first


async def test_what_happens_while_the_last_values_are_on_their_way_comes_after_them() -> None:
    async with stream() as s:
        for step in range(2):
            s.publisher.publish(StepEvent(step=step, metrics={}))
        with s.subscriber() as subscriber:
            for _ in range(100):
                s.publisher.publish(StepEvent(step=2, metrics={}))
                time.sleep(0.002)  # noqa: ASYNC251  # the publisher shall not get its turn to answer the newcomer
            events = await take(subscriber, 3)
        assert [(event.seq, event.replay) for event in events[:2]] == [(1, True), (2, True)]
        assert not events[2].replay


async def test_a_subscriber_that_reads_nothing_loses_events_and_holds_up_nobody() -> None:
    async with stream() as s:
        s.publisher.publish(RUNNING)
        with s.subscriber(timeout_s=0.5) as lazy:
            await take(lazy, 1)
            event = StepEvent(step=0, metrics={f"metric_{i}": float(i) for i in range(50)})
            published = 60_000
            for _ in range(published):
                s.publisher.publish(event)
            with s.subscriber() as fresh:
                assert [event.seq for event in await take(fresh, 2)] == [1, published + 1]
            seqs = []
            with pytest.raises(DeadlineError):
                for received in lazy.blocking():
                    seqs.append(received.seq)  # noqa: PERF401  # it ends with an exception
            assert 0 < len(seqs) < published
            assert seqs == sorted(set(seqs))


async def test_a_key_that_is_not_the_readers_is_refused() -> None:
    async with stream(curve=True) as s:
        assert s.publisher_keys is not None
        address, server_key = s.publisher.address, s.publisher_keys.public
        stranger = StatusSubscriber(address, key=KeyPair.generate(), server_key=server_key, timeout_s=5)
        with stranger, pytest.raises(ProtocolError, match="does not accept this reader"):
            await anext(stranger)
        with StatusSubscriber(address, timeout_s=1) as unencrypted, pytest.raises((ProtocolError, DeadlineError)):
            await anext(unencrypted)


async def test_the_end_of_the_publisher_comes_after_its_last_event() -> None:
    async with stream() as s:
        subscriber = s.subscriber()
        s.publisher.publish(RUNNING)
        await take(subscriber, 1)
        s.publisher.publish(StepEvent(step=7, metrics={}))
    with subscriber:
        assert bare((await take(subscriber, 1))[0]) == StepEvent(step=7, metrics={})
        with (
            anyio.fail_after(5),
            pytest.raises(PeerLostError, match=r"the status stream at 127\.0\.0\.1:\d+ has ended"),
        ):
            await anext(subscriber)


@pytest.mark.parametrize("read", [StatusSubscriber.__anext__, None], ids=["async", "blocking"])
async def test_silence_ends_with_the_address_and_the_time(
    read: Callable[[StatusSubscriber], object] | None,
) -> None:
    with StatusSubscriber(Address("127.0.0.1", 1), timeout_s=0.2) as subscriber:
        expected = r"nothing answered at 127\.0\.0\.1:1 within 0\.2 s"
        with pytest.raises(DeadlineError, match=expected):
            if read:
                await anext(subscriber)
            else:
                await anyio.to_thread.run_sync(next, subscriber.blocking())


async def test_a_given_port_is_bound_and_a_taken_one_is_a_config_error() -> None:
    async with stream("[::1]") as s:
        taken = str(s.publisher.address)
        with pytest.raises(ConfigError, match=r"status\.address: cannot bind"):
            async with stream(taken):
                pass
    async with stream(taken) as s:
        assert str(s.publisher.address) == taken


async def test_publishing_beyond_loopback_needs_curve() -> None:
    with pytest.raises(ConfigError, match="is not loopback, so CURVE is needed"):
        async with stream("192.0.2.1:0"):
            pass


async def test_a_plain_socket_can_follow_the_documented_wire_format() -> None:
    async with stream() as s:
        s.publisher.publish(RUNNING)
        context = zmq.asyncio.Context()
        with context.socket(zmq.SUB) as socket:
            socket.linger = 0
            socket.connect(s.publisher.address.url)
            inbox = REPLAY + secrets.token_hex(8).encode()
            socket.subscribe(LIVE)
            socket.subscribe(inbox)
            with anyio.fail_after(5):
                topic, data = await socket.recv_multipart()
                assert topic == inbox
                fields = msgspec.msgpack.decode(data)
                assert (fields["kind"], fields["schema"], fields["replay"]) == ("run", 1, True)
                assert await socket.recv_multipart() == [inbox, b""]
                s.publisher.publish(StepEvent(step=0, metrics={}))
                assert (await socket.recv_multipart())[0] == b"event/step"
        context.term()


# --- The schema ----------------------------------------------------------------------------------------------------

numbers = st.floats(allow_nan=False) | st.integers(-(2**63), 2**63) | st.booleans() | st.text() | st.none()


@settings(deadline=None)
@given(st.integers(0, 2**40), st.dictionaries(st.text(), numbers))
def test_a_step_event_comes_back_as_it_was(step: int, metrics: dict[str, float | int | bool | str | None]) -> None:
    event = StepEvent(step=step, metrics=metrics)
    assert decode_event(encode_event(event)) == event
    assert kind_of(event) == "step"


def test_an_event_of_another_schema_is_refused() -> None:
    newer = encode_event(msgspec.structs.replace(RUNNING, schema=2))
    with pytest.raises(ProtocolError, match="the event has schema 2 and this reads schema 1"):
        decode_event(newer)


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=64))
def test_garbage_is_no_event(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="not a status event"):
        decode_event(data)


# --- Files of a run folder -----------------------------------------------------------------------------------------


def test_a_key_file_is_private_also_when_it_replaces_another(tmp_path: Path) -> None:
    path, keys, server = tmp_path / "status.key", KeyPair.generate(), KeyPair.generate()
    path.write_text("old")
    path.chmod(0o644)
    write_key_file(path, keys, server.public)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_key_file(path) == (keys, server.public)
    assert list(tmp_path.iterdir()) == [path]
    assert server.secret.decode() not in path.read_text()


@pytest.mark.parametrize("content", ["", "{}", "not json", '{"public": "a", "secret": "b", "server_public": "c"}'])
def test_what_is_no_key_file_is_named_without_quoting_it(tmp_path: Path, content: str) -> None:
    path = tmp_path / "some.key"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"some\.key: this is not a key file$"):
        read_key_file(path)
    with pytest.raises(ConfigError, match=r"missing\.key: the key cannot be read"):
        read_key_file(tmp_path / "missing.key")


@pytest.mark.parametrize("curve", [False, True], ids=["plain", "curve"])
async def test_a_run_folder_or_an_address_with_the_key_file_leads_to_the_stream(tmp_path: Path, curve: bool) -> None:
    async with stream("::1", curve=curve) as s:
        address = s.publisher.address
        server_public = s.publisher_keys.public if s.publisher_keys else None
        write_status_files(tmp_path, address, server_public=server_public, reader=s.reader_keys, run_id="run-1")
        s.publisher.publish(RUNNING)
        content = json.loads((tmp_path / "status.json").read_text())
        assert (content["address"], content["run_id"]) == (str(address), "run-1")
        assert (tmp_path / "status.key").exists() == curve
        key_file = tmp_path / "status.key" if curve else None
        for subscriber in (subscriber_for(tmp_path), subscriber_for(str(address), key_file)):
            with subscriber:
                assert [bare(event) for event in await take(subscriber, 1)] == [RUNNING]


def test_a_run_without_curve_leaves_no_key_of_an_earlier_one(tmp_path: Path) -> None:
    address, keys = Address("127.0.0.1", 1), KeyPair.generate()
    write_status_files(tmp_path, address, server_public=keys.public, reader=keys, run_id="a")
    write_status_files(tmp_path, address, server_public=None, reader=None, run_id="b")
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_a_place_without_a_stream_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has a run started in this folder"):
        subscriber_for(tmp_path)
    with pytest.raises(ConfigError, match="neither a run folder nor an address"):
        subscriber_for("runs/missing")
    (tmp_path / "status.json").write_text('{"address": 7}')
    with pytest.raises(ConfigError, match="this is not a status file"):
        subscriber_for(tmp_path)
