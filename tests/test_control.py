from __future__ import annotations

import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import numpy as np
import pytest
import zmq
import zmq.asyncio

from aoffpolicy.errors import ConfigError, DeadlineError, PeerLostError, ProtocolError, RemoteError
from aoffpolicy.samples import Prompt, Sample, SampleGroup
from aoffpolicy.transport import wire
from aoffpolicy.transport.address import Address
from aoffpolicy.transport.control import ControlClient, ControlServer, Hello, PeerId
from aoffpolicy.transport.control_client import Handlers
from aoffpolicy.transport.messages import (
    PROTOCOL,
    Done,
    Generate,
    Generated,
    Message,
    Prepare,
    Ready,
    Sampling,
    SaveCheckpoint,
    Score,
    Scored,
    Start,
    Stop,
    Train,
    Trained,
)
from aoffpolicy.transport.security import KeyPair
from aoffpolicy.transport.wire import Beat, Call, Failure, Reply

pytestmark = pytest.mark.anyio
PEER = PeerId("trainer", 0)
RUN = "run-1"


def hello(peer: PeerId = PEER, **changes: Any) -> Hello:
    fields: dict[str, Any] = {"incarnation": 0, "host": "here", "pid": 7, "versions": {"torch": "2.13"}, "run_id": RUN}
    return Hello(role=peer.role, rank=peer.rank, **(fields | changes))


@dataclass
class Plane:
    """A server, the keys of both sides, and the task group that workers run in."""

    server: ControlServer
    server_keys: KeyPair | None
    worker_keys: KeyPair | None
    tasks: anyio.abc.TaskGroup
    progress: list[tuple[PeerId, str]] = field(default_factory=list)

    def client(self, said: Hello | None = None, keys: KeyPair | None = None, timeout_s: float = 5.0) -> ControlClient:
        return ControlClient(
            self.server.address,
            said or hello(),
            keys=keys or self.worker_keys,
            server_key=self.server_keys.public if self.server_keys else None,
            heartbeat_timeout_s=timeout_s,
        )

    async def start(self, handlers: Handlers, said: Hello | None = None, timeout_s: float = 5.0) -> ControlClient:
        """A worker that serves in this process, let in."""
        said = said or hello()
        client = self.client(said, timeout_s=timeout_s)
        self.tasks.start_soon(client.serve, handlers)
        await self.server.wait_for(said.peer, 5)
        return client


@asynccontextmanager
async def plane(
    host: str = "127.0.0.1", *, curve: bool = False, peers: tuple[PeerId, ...] = (PEER,), **options: Any
) -> AsyncIterator[Plane]:
    server_keys, worker_keys = (KeyPair.generate(), KeyPair.generate()) if curve else (None, None)
    said: list[tuple[PeerId, str]] = []
    server = ControlServer(
        host,
        run_id=RUN,
        keys=server_keys,
        allowed=dict.fromkeys(peers, worker_keys.public if worker_keys else b""),
        on_progress=lambda peer, text: said.append((peer, text)),
        **options,
    )
    async with server, anyio.create_task_group() as tasks:
        yield Plane(server, server_keys, worker_keys, tasks, said)
        tasks.cancel_scope.cancel()


@pytest.fixture(params=["127.0.0.1", "::1"])
def host(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[False, True], ids=["plain", "curve"])
def curve(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


async def eventually(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(5):
        while not condition():  # the condition has no event of its own
            await anyio.sleep(0.01)


async def ready(request: Prepare) -> Message:
    return Ready(term=request.term, backend="gloo")


def group(tokens: int) -> SampleGroup:
    ids = np.arange(tokens, dtype=np.int32)
    sample = Sample(
        token_ids_T=ids,
        loss_mask_T=ids % 2 == 0,
        behaviour_logprobs_T=-ids.astype(np.float32),
        versions_T=ids,
        text="äöü",
        finish_reason="stop",
    )
    return SampleGroup(Prompt(3, ids[:5], {"answer": "12"}), (sample, sample))


# --- Calls ---------------------------------------------------------------------------------------------------------


async def test_a_call_is_answered_over_ipv4_and_ipv6_with_and_without_curve(host: str, curve: bool) -> None:
    async with plane(host, curve=curve) as p:
        await p.start({Prepare: ready})
        assert p.server.address.url.startswith("tcp://[::1]:" if host == "::1" else "tcp://127.0.0.1:")
        assert await p.server.call(PEER, Prepare(term=4), 5) == Ready(term=4, backend="gloo")


@pytest.mark.parametrize("tokens", [0, 10, 200_000])
async def test_arrays_arrive_as_they_were_sent(curve: bool, tokens: int) -> None:
    async def generate(request: Generate) -> Message:
        assert request.prompt.row == {"answer": "12"}
        return Generated(group=group(tokens))

    async with plane(curve=curve) as p:
        await p.start({Generate: generate})
        sampling = Sampling(n=1, max_tokens=1, temperature=1.0, seed=0)
        reply = await p.server.call(PEER, Generate(prompt=group(9).prompt, sampling=sampling), 10)
        for sample, expected in zip(reply.group.samples, group(tokens).samples, strict=True):
            for name in ("token_ids_T", "loss_mask_T", "behaviour_logprobs_T", "versions_T"):
                array = getattr(sample, name)
                np.testing.assert_array_equal(array, getattr(expected, name))
                assert array.flags.aligned
                assert not array.flags.writeable
            assert sample.text == "äöü"


async def test_concurrent_calls_get_their_own_replies_in_any_order(curve: bool) -> None:
    async def prepare(request: Prepare) -> Message:
        await anyio.sleep(0.002 * (50 - request.term))
        return Ready(term=request.term, backend="")

    async with plane(curve=curve) as p:
        await p.start({Prepare: prepare})
        terms: list[int] = []

        async def ask(term: int) -> None:
            reply = await p.server.call(PEER, Prepare(term=term), 5)
            assert reply.term == term
            terms.append(term)

        async with anyio.create_task_group() as tasks:
            for term in range(50):
                tasks.start_soon(ask, term)
        assert sorted(terms) == list(range(50))
        assert terms != sorted(terms)


async def test_an_exception_comes_back_with_role_rank_and_remote_traceback() -> None:
    async def deep_inside(request: Train) -> Message:
        raise ValueError("loss is NaN at step 3")

    async def train(request: Train) -> Message:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(deep_inside, request)
        raise AssertionError

    async with plane() as p:
        await p.start({Train: train})
        with pytest.raises(RemoteError, match="trainer 0: ValueError: loss is NaN at step 3") as caught:
            await p.server.call(PEER, Train(step=3, groups=(), advantages=(), temperature=1.0), 5)
        assert (caught.value.role, caught.value.rank) == ("trainer", 0)
        assert "in deep_inside" in caught.value.remote_traceback
        # One failed request does not end the worker.
        with pytest.raises(RemoteError):
            await p.server.call(PEER, Train(step=3, groups=(), advantages=(), temperature=1.0), 5)


async def test_a_request_without_a_handler_and_a_wrong_reply_are_errors() -> None:
    async def start(request: Start) -> Message:
        return Done()

    async with plane() as p:
        await p.start({Start: start})
        with pytest.raises(RemoteError, match="does not handle 'Prepare'"):
            await p.server.call(PEER, Prepare(term=0), 5)
        with pytest.raises(RemoteError, match="handler of Start returned a Done"):
            await p.server.call(PEER, Start(), 5)


async def test_a_deadline_says_who_waited_for_what_and_cancels_the_handler() -> None:
    cancelled = anyio.Event()

    async def hang(request: Prepare) -> Message:
        try:
            await anyio.sleep_forever()
        finally:
            cancelled.set()
        raise AssertionError

    async with plane() as p:
        client = await p.start({Prepare: hang})
        client.progress("compiling layer 3")
        await eventually(lambda: bool(p.progress))
        with pytest.raises(DeadlineError) as caught:
            await p.server.call(PEER, Prepare(term=1), 0.2)
        assert str(caught.value).startswith("trainer 0: the controller waited 0.2 s for the reply to Prepare")
        assert "it last said 'compiling layer 3'" in str(caught.value)
        with anyio.fail_after(5):
            await cancelled.wait()


async def test_cancelling_the_caller_cancels_the_handler_before_its_deadline() -> None:
    entered, cancelled = anyio.Event(), anyio.Event()

    async def hang(request: Prepare) -> Message:
        entered.set()
        try:
            await anyio.sleep_forever()
        finally:
            cancelled.set()
        raise AssertionError

    async with plane() as p:
        await p.start({Prepare: hang})
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(p.server.call, PEER, Prepare(term=1), 1000)
            await entered.wait()
            tasks.cancel_scope.cancel()
        with anyio.fail_after(2):
            await cancelled.wait()


async def test_a_cancellation_that_overtakes_its_call_is_honoured() -> None:
    handled: list[int] = []

    async def prepare(request: Prepare) -> Message:
        handled.append(request.term)
        return Ready(term=request.term, backend="")

    async with plane() as p:
        client = await p.start({Prepare: prepare})
        client._cancel(p.server._last_call + 1)  # what the pulse does when it hears of a call not taken yet
        with pytest.raises(DeadlineError):
            await p.server.call(PEER, Prepare(term=1), 0.2)
        await p.server.call(PEER, Prepare(term=2), 5)
        assert handled == [2]


async def test_a_late_reply_is_ignored() -> None:
    release = anyio.Event()

    async def stubborn(request: Prepare) -> Message:
        if request.term == 1:
            with anyio.CancelScope(shield=True):
                await release.wait()
        return Ready(term=request.term, backend="")

    async with plane() as p:
        await p.start({Prepare: stubborn})
        with pytest.raises(DeadlineError):
            await p.server.call(PEER, Prepare(term=1), 0.1)
        release.set()
        assert (await p.server.call(PEER, Prepare(term=2), 5)).term == 2
        assert p.server.malformed == 0


async def test_calls_in_flight_are_bounded_by_type_so_that_control_does_not_wait_behind_bulk() -> None:
    running = peak = 0

    async def score(request: Score) -> Message:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        await anyio.sleep(0.02)
        running -= 1
        return Scored(rewards=(), errors=())

    async with plane(max_in_flight=4) as p:
        await p.start({Score: score, Prepare: ready})
        async with anyio.create_task_group() as tasks:
            for _ in range(40):
                tasks.start_soon(p.server.call, PEER, Score(row={}, completions=()), 10)
            await anyio.sleep(0.01)
            began = time.monotonic()
            await p.server.call(PEER, Prepare(term=1), 5)
            assert time.monotonic() - began < 0.1  # 40 calls at 4 at once take 0.2 s
        assert peak == 4


async def test_a_too_large_message_is_refused_at_the_sender_and_the_connection_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def train(request: Train) -> Message:
        return Trained(metrics={"loss": float(request.advantages[0].sum())})

    async with plane() as p:
        await p.start({Train: train})
        monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 1000)
        for size in (1000, 4):
            request = Train(step=0, groups=(), advantages=(np.ones(size, np.float32),), temperature=1.0)
            if size == 1000:
                with pytest.raises(ProtocolError, match="Train to trainer 0 has a frame of 4000 bytes and the limit"):
                    await p.server.call(PEER, request, 5)
            else:
                assert (await p.server.call(PEER, request, 5)).metrics == {"loss": 4.0}


async def test_stop_is_answered_by_its_handler_and_then_serving_ends() -> None:
    released: list[str] = []

    async def stop(request: Stop) -> Message:
        released.append("released")
        return Done()

    async with plane(heartbeat_timeout_s=0.3) as p:
        client = p.client(timeout_s=0.3)
        async with anyio.create_task_group() as tasks:
            handlers: Handlers = {Stop: stop}
            tasks.start_soon(client.serve, handlers)
            await p.server.wait_for(PEER, 5)
            assert await p.server.call(PEER, Stop(), 5) == Done()
        assert released == ["released"]
        with anyio.move_on_after(0.8):  # whoever was told to stop is not missed
            await p.server.watch()
        with pytest.raises(PeerLostError):
            await p.server.call(PEER, Prepare(term=1), 1)


# --- Coming and going ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"run_id": "run-2"}, "it belongs to run 'run-2', this is run 'run-1'"),
        ({"protocol": PROTOCOL + 1}, f"it speaks protocol {PROTOCOL + 1}, the controller {PROTOCOL}"),
        ({"peer": PeerId("trainer", 9)}, "trainer 9 is not part of this run"),
        ({"incarnation": 1}, "incarnation 1 of trainer 0 was replaced by 2"),
        ({"incarnation": 2, "versions": {"torch": "2.9"}}, "it has torch 2.9, the controller 2.13"),
    ],
)
async def test_a_hello_that_does_not_fit_is_refused_with_a_reason(
    changes: dict[str, Any], reason: str, curve: bool
) -> None:
    async with plane(curve=curve, versions={"torch": "2.13"}) as p:
        p.server.allow(PEER, p.worker_keys.public if p.worker_keys else b"", incarnation=2)
        with pytest.raises(ProtocolError, match=reason):
            await p.client(hello(**changes)).serve({})
        if "peer" not in changes:
            with pytest.raises(
                DeadlineError, match=f"waited 0.1 s for its hello; its last attempt was refused: {reason}"
            ):
                await p.server.wait_for(PEER, 0.1)


async def test_a_key_that_is_not_listed_is_refused_and_counted(host: str) -> None:
    async with plane(host, curve=True) as p:
        with anyio.fail_after(5), pytest.raises(ProtocolError, match="does not accept the key of trainer 0"):
            await p.client(keys=KeyPair.generate()).serve({})
        assert p.server.refused_keys >= 1
        await p.start({Prepare: ready})  # the right one comes in all the same


async def test_a_worker_cannot_pass_for_another_one_with_its_own_key() -> None:
    other, other_keys = PeerId("rollout", 0), KeyPair.generate()
    async with plane(curve=True) as p:
        p.server.allow(other, other_keys.public)
        with pytest.raises(ProtocolError, match="its key is not the one of trainer 0"):
            await p.client(keys=other_keys).serve({})


async def test_a_second_process_for_the_same_worker_is_refused() -> None:
    async with plane() as p:
        await p.start({Prepare: ready})
        with pytest.raises(ProtocolError, match="trainer 0 is here already, as pid 7 on here"):
            await p.client(hello(pid=8)).serve({})
        assert (await p.server.call(PEER, Prepare(term=1), 5)).term == 1


async def test_a_higher_incarnation_replaces_the_old_one_which_is_fenced_off() -> None:
    async def hang(request: Prepare) -> Message:
        await anyio.sleep_forever()
        raise AssertionError

    async with plane() as p:
        fenced: list[BaseException] = []

        async def old() -> None:
            try:
                await p.client(timeout_s=0.5).serve({Prepare: hang})
            except ProtocolError as error:
                fenced.append(error)

        async def call_old() -> None:
            with pytest.raises(PeerLostError, match="incarnation 0 was replaced by 1"):
                await p.server.call(PEER, Prepare(term=1), 10)

        p.tasks.start_soon(old)
        await p.server.wait_for(PEER, 5)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call_old)
            await anyio.sleep(0.05)
            handlers: Handlers = {Prepare: ready}
            p.tasks.start_soon(p.client(hello(incarnation=1, pid=8)).serve, handlers)
        assert (await p.server.wait_for(PEER, 5)).pid == 8
        assert (await p.server.call(PEER, Prepare(term=2), 5)).term == 2
        await eventually(lambda: bool(fenced))
        assert "incarnation 0 of trainer 0 was replaced by 1" in str(fenced[0])


async def test_an_incarnation_that_is_not_higher_cannot_be_allowed_over_a_living_one() -> None:
    async with plane() as p:
        await p.start({Prepare: ready})
        with pytest.raises(ValueError, match="incarnation 0 cannot replace 0"):
            p.server.allow(PEER, b"", 0)


async def test_a_call_before_hello_says_that_the_worker_is_not_connected() -> None:
    async with plane() as p:
        with pytest.raises(PeerLostError, match="trainer 0: it is not connected"):
            await p.server.call(PEER, Prepare(term=1), 1)


async def test_waiting_for_a_worker_that_never_comes_ends_with_who_and_how_long() -> None:
    async with plane() as p:
        with pytest.raises(DeadlineError, match=r"trainer 0: the controller waited 0\.1 s for its hello; its log"):
            await p.server.wait_for(PEER, 0.1)


async def test_binding_beyond_loopback_needs_curve() -> None:
    with pytest.raises(ConfigError, match=r"control.host: 192\.0\.2\.1 is not loopback, so CURVE is needed"):
        async with ControlServer("192.0.2.1", run_id=RUN, keys=None):
            pass


async def test_binding_where_workers_could_not_find_it_is_refused() -> None:
    for everywhere in ("0.0.0.0", "::"):
        with pytest.raises(ConfigError, match="name the one that workers connect to"):
            async with ControlServer(everywhere, run_id=RUN, keys=KeyPair.generate()):
                pass


async def test_binding_a_foreign_address_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"cannot bind 192\.0\.2\.1"):
        async with ControlServer("192.0.2.1", run_id=RUN, keys=KeyPair.generate()):
            pass


async def test_an_error_in_the_block_comes_out_of_the_server_as_itself() -> None:
    with pytest.raises(KeyError, match="mine"):
        async with ControlServer("127.0.0.1", run_id=RUN, keys=None):
            raise KeyError("mine")


async def test_closing_the_server_ends_calls_and_workers() -> None:
    async def hang(request: Prepare) -> Message:
        await anyio.sleep_forever()
        raise AssertionError

    ends: list[str] = []

    async def note(work: Any, *args: Any) -> None:
        try:
            await work(*args)
        except PeerLostError as error:
            ends.append(str(error))

    server = ControlServer("127.0.0.1", run_id=RUN, keys=None, allowed={PEER: b""})
    async with anyio.create_task_group() as tasks, server:
        client = ControlClient(server.address, hello(), keys=None, server_key=None)
        tasks.start_soon(note, client.serve, {Prepare: hang})
        await server.wait_for(PEER, 5)
        tasks.start_soon(note, server.call, PEER, Prepare(term=1), 100)
        await anyio.sleep(0.05)
    assert ends[0] == "trainer 0: the controller has closed"
    assert "controller 0: the connection of trainer 0 to 127.0.0.1" in ends[1]


# --- Liveness ------------------------------------------------------------------------------------------------------


async def test_progress_lines_arrive_from_any_thread() -> None:
    async with plane() as p:
        client = await p.start({})
        threads = [threading.Thread(target=client.progress, args=(f"line {i}",)) for i in range(20)]
        for thread in threads:
            thread.start()
        await eventually(lambda: len(p.progress) == 20)
        assert sorted(p.progress) == sorted((PEER, f"line {i}") for i in range(20))


async def test_a_client_that_finds_no_controller_says_so() -> None:
    client = ControlClient(Address("127.0.0.1", 1), hello(), keys=None, server_key=None, heartbeat_timeout_s=0.1)
    with pytest.raises(PeerLostError, match=r"controller 0: trainer 0 waited 0\.3 s for a welcome from 127\.0\.0\.1:1"):
        await client.serve({})


async def test_a_silent_controller_is_given_up() -> None:
    """A controller that accepts connections and then says nothing, as when its machine is cut off."""
    context = zmq.asyncio.Context()
    router = context.socket(zmq.ROUTER)
    router.linger = 0
    port = router.bind_to_random_port("tcp://127.0.0.1")

    async def welcome_and_fall_silent() -> None:
        sender, _ = await router.recv_multipart()
        await router.send_multipart([sender, wire.envelope(wire.Welcome())])

    client = ControlClient(Address("127.0.0.1", port), hello(), keys=None, server_key=None, heartbeat_timeout_s=0.1)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(welcome_and_fall_silent)
            with pytest.raises(PeerLostError, match=r"controller 0: trainer 0 heard nothing from it for 0\.\d s"):
                await client.serve({})
    finally:
        router.close()
        context.term()


async def test_a_stalled_controller_does_not_take_its_workers_for_dead() -> None:
    async with plane(heartbeat_timeout_s=0.4) as p:
        await p.start({Prepare: ready}, timeout_s=0.4)
        time.sleep(0.8)  # noqa: ASYNC251  # the stall is the point
        with anyio.move_on_after(0.6):
            await p.server.watch()
        assert (await p.server.call(PEER, Prepare(term=1), 5)).term == 1


async def test_the_first_loss_is_reported_and_a_forgotten_worker_is_not() -> None:
    first, second = PeerId("rollout", 0), PeerId("rollout", 1)
    async with plane(peers=(first, second), heartbeat_timeout_s=0.3) as p:
        scopes: dict[PeerId, anyio.CancelScope] = {}

        async def serve(peer: PeerId) -> None:
            with anyio.CancelScope() as scopes[peer]:
                await p.client(hello(peer), timeout_s=0.3).serve({})

        for peer in (first, second):
            p.tasks.start_soon(serve, peer)
            await p.server.wait_for(peer, 5)
        p.server.forget(first)
        scopes[first].cancel()
        with anyio.move_on_after(0.8):
            await p.server.watch()
        scopes[second].cancel()
        with anyio.fail_after(5), pytest.raises(PeerLostError, match="rollout 1: no heartbeat for") as caught:
            await p.server.watch()
        assert "limit 0.3 s" in str(caught.value)
        assert "pid 7 on here" in str(caught.value)


# --- Garbage -------------------------------------------------------------------------------------------------------


async def test_garbage_is_counted_reported_at_a_bounded_rate_and_disturbs_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    garbage = [
        [b""],
        [b"\xff" * 100],
        [b"\x91" * 100_000],
        [wire.envelope(Reply(id=1)), b"junk"],
        [wire.envelope(Failure(id=1, cause="", traceback=""))],
        [wire.envelope(Call(id=1, request="Stop", timeout_s=1.0))],
        [b"\x81\xa4type\xa5Hello"],
        [b"", b"", b""],
    ]
    async with plane() as p:
        await p.start({Prepare: ready})
        context = zmq.asyncio.Context()
        with (
            caplog.at_level(logging.WARNING, "aoffpolicy.transport.control_server"),
            context.socket(zmq.DEALER) as dealer,
        ):
            dealer.linger = 0
            dealer.connect(p.server.address.url)
            for _ in range(10):
                for frames in garbage:
                    await dealer.send_multipart(frames)
                assert (await p.server.call(PEER, Prepare(term=1), 5)).term == 1
            await eventually(lambda: p.server.malformed == 80)
        context.term()
        assert p.server.malformed == 80
        assert len(caplog.records) == 1


async def test_a_reply_of_the_wrong_type_fails_only_its_call() -> None:
    async with plane() as p:
        context = zmq.asyncio.Context()
        with context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.connect(p.server.address.url)
            await dealer.send(wire.envelope(hello()))
            await p.server.wait_for(PEER, 5)
            await dealer.recv()

            async def answer() -> None:
                for reply in ([b"\xff"], [], [b"\x81\xa4type\xa4Done"]):
                    call = wire.read_from_controller((await dealer.recv_multipart())[0])
                    assert isinstance(call, Call)
                    await dealer.send_multipart([wire.envelope(Reply(id=call.id)), *reply])

            p.tasks.start_soon(answer)
            for request in (Prepare(term=1), Prepare(term=2)):
                with pytest.raises(ProtocolError, match="not a Ready"):
                    await p.server.call(PEER, request, 5)
            assert await p.server.call(PEER, SaveCheckpoint(path="", step=1, scheduler_state=b""), 5) == Done()
        context.term()


async def test_a_beat_of_a_stranger_is_refused() -> None:
    async with plane() as p:
        context = zmq.asyncio.Context()
        with context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.connect(p.server.address.url)
            await dealer.send(wire.envelope(Beat(role="trainer", rank=0, incarnation=0, run_id="run-2")))
            answer = wire.read_from_controller(await dealer.recv())
            assert isinstance(answer, wire.Refused)
            assert answer.kind == "peer"
        context.term()


async def test_secrets_never_show_in_a_repr() -> None:
    keys = KeyPair.generate()
    assert keys.secret.decode() not in repr(keys) + str(keys)
    assert keys.public.decode() in repr(keys)
