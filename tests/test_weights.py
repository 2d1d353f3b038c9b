"""The weight plane with all members in this process: real gloo, real store, messages as they are on the wire."""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import pytest
import torch

from aoffpolicy.errors import DeadlineError, PeerLostError, RemoteError, RendezvousError, WeightSyncError
from aoffpolicy.transport import messages
from aoffpolicy.transport.coordinator import Coordinator, GroupSettings
from aoffpolicy.transport.manifest import Named, specs_of
from aoffpolicy.transport.messages import Abort, Join, Joined, Message, ReceiveWeights, TensorSpec, WeightsReceived
from aoffpolicy.transport.rendezvous import RendezvousStore
from aoffpolicy.transport.weights import WeightMember
from aoffpolicy.transport.wire import PeerId

pytestmark = pytest.mark.anyio

TRAINER, HELPER = PeerId("trainer", 0), PeerId("trainer", 1)
ROLLOUTS = (PeerId("rollout", 0), PeerId("rollout", 1))
AWKWARD: list[Named] = [
    ("embed", torch.randn(50, 33)),
    ("transposed", torch.randn(20, 30).T),
    ("scalar", torch.tensor(3.5)),
    ("none", torch.empty(0, 4)),
    ("half", torch.randn(7).to(torch.bfloat16)),
    ("mask", torch.tensor([True, False, True])),
    ("large", torch.randn(5000)),
    ("tail", torch.empty(0)),
]


class Receiver:
    """Stands for an engine: keeps what it loads. `fail_at` is the tensor at which loading raises."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.fail_at = ""
        self.ignored = ""
        self.blocked: threading.Event | None = None

    def load(self, tensors: Iterator[Named]) -> set[str]:
        loaded = {}
        for name, tensor in tensors:
            if name == self.fail_at:
                raise ValueError(f"no room for {name}")
            if self.blocked is not None:
                self.blocked.wait(20.0)
            if name != self.ignored:
                loaded[name] = tensor
        self.weights = loaded
        return set(loaded)


@dataclass
class Fabric:
    """Members behind a call that encodes, decodes and fails as the control plane does."""

    members: dict[PeerId, WeightMember] = field(default_factory=dict)
    receivers: dict[PeerId, Receiver] = field(default_factory=dict)
    source: list[Named] = field(default_factory=lambda: list(AWKWARD))
    before: Callable[[PeerId, Message], None] = lambda peer, request: None
    tamper: Callable[[PeerId, Message], Message] = lambda peer, reply: reply
    absent: set[tuple[PeerId, type[Message]]] = field(default_factory=set)
    pause_s: float = 0.0
    """Before each tensor gathered."""
    requests: list[tuple[PeerId, Message]] = field(default_factory=list)
    gathered: Counter[str] = field(default_factory=Counter)

    async def call(self, peer: PeerId, request: Message, timeout_s: float) -> Message:
        self.requests.append((peer, request))
        with anyio.move_on_after(timeout_s):
            if (peer, type(request)) in self.absent:
                await anyio.sleep_forever()
            try:
                self.before(peer, request)
                return self.tamper(peer, await self._handle(peer, request))
            except PeerLostError:
                raise
            except Exception as error:
                cause = f"{type(error).__name__}: {error}"
                raise RemoteError(peer.role, peer.rank, cause, traceback.format_exc()) from error
        raise DeadlineError(peer.role, peer.rank, f"no reply to {type(request).__name__} in {timeout_s:.1f} s")

    async def _handle(self, peer: PeerId, request: Message) -> Message:
        kind = type(request)
        reply = await self.members[peer].handlers[kind](messages.decode(messages.encode(request), kind))
        return messages.decode(messages.encode(reply), messages.REPLIES[kind])

    def gather(self, who: str) -> Iterator[Named]:
        for name, tensor in self.source:
            time.sleep(self.pause_s)
            self.gathered[who] += 1
            yield name, tensor


@asynccontextmanager
async def plane(
    host: str = "127.0.0.1",
    *,
    helper: bool = False,
    bucket_bytes: int = 4096,
    join_timeout_s: float = 8.0,
    sync_timeout_s: float = 8.0,
) -> AsyncIterator[tuple[Coordinator, Fabric]]:
    fabric = Fabric()
    specs = specs_of(fabric.source)
    fabric.members[TRAINER] = WeightMember("send", backend="gloo", specs=specs, gather=lambda: fabric.gather("root"))
    if helper:
        fabric.members[HELPER] = WeightMember("send", backend="gloo", gather=lambda: fabric.gather("help"), root=False)
    for peer in ROLLOUTS:
        receiver = fabric.receivers[peer] = Receiver()
        fabric.members[peer] = WeightMember("receive", backend="gloo", specs=specs[::-1], load=receiver.load)
    settings = GroupSettings(
        backend="gloo",
        interface=host,
        bucket_bytes=bucket_bytes,
        join_timeout_s=join_timeout_s,
        sync_timeout_s=sync_timeout_s,
    )
    store = RendezvousStore(host)
    senders = (TRAINER, HELPER) if helper else (TRAINER,)
    try:
        async with Coordinator(fabric.call, store, senders, settings) as coordinator:
            yield coordinator, fabric
    finally:
        for member in fabric.members.values():
            member.close()
        store.close()


async def update(coordinator: Coordinator, version: int) -> None:
    await coordinator.send(version)
    await coordinator.load(version)


def assert_delivered(fabric: Fabric) -> None:
    for receiver in fabric.receivers.values():
        assert list(receiver.weights) == [name for name, _ in fabric.source]
        for name, tensor in fabric.source:
            assert receiver.weights[name].dtype == tensor.dtype
            assert torch.equal(receiver.weights[name], tensor), name


def perturb(fabric: Fabric) -> None:
    fabric.source = [(name, tensor + 1 if tensor.is_floating_point() else ~tensor) for name, tensor in fabric.source]


# --- What must work --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("bucket_bytes", [64, 4096, 2**20])
async def test_awkward_tensors_reach_every_rollout_bit_for_bit(host: str, bucket_bytes: int) -> None:
    async with plane(host, bucket_bytes=bucket_bytes) as (coordinator, fabric):
        await coordinator.form(ROLLOUTS)
        (sent,) = await coordinator.send(1)
        received = await coordinator.load(1)
        assert_delivered(fabric)
        assert {reply.digest for reply in received} == {sent.digest} and len(sent.digest) == 32
        assert {(r.version, r.term, r.bytes, r.loaded) for r in received} == {(1, 1, sent.bytes, len(AWKWARD))}


async def test_the_digest_follows_the_weights() -> None:
    async with plane() as (coordinator, fabric):
        await coordinator.form(ROLLOUTS)
        digests = []
        for version, change in enumerate((False, False, True)):
            if change:
                perturb(fabric)
            digests.append((await coordinator.send(version))[0].digest)
            await coordinator.load(version)
        assert digests[0] == digests[1] != digests[2]


async def test_trainer_ranks_that_only_help_to_gather_are_driven_to_the_end_and_stay_out_of_the_group() -> None:
    async with plane(helper=True) as (coordinator, fabric):
        await coordinator.form(ROLLOUTS)
        sent = await coordinator.send(1)
        await coordinator.load(1)
        assert [reply.digest == "" for reply in sent] == [False, True]
        assert fabric.gathered == {"root": len(AWKWARD), "help": len(AWKWARD)}
        joined = [peer for peer, request in fabric.requests if isinstance(request, Join)]
        assert joined == [TRAINER, *ROLLOUTS]
        assert_delivered(fabric)


async def test_send_returns_while_a_rollout_still_loads_and_load_waits_for_it() -> None:
    async with plane(bucket_bytes=2**20) as (coordinator, fabric):
        await coordinator.form(ROLLOUTS)
        blocked = fabric.receivers[ROLLOUTS[1]].blocked = threading.Event()
        await coordinator.send(1)
        with pytest.raises(WeightSyncError, match="version 2 cannot be sent: version 1 is not loaded yet"):
            await coordinator.send(2)
        assert not fabric.receivers[ROLLOUTS[1]].weights
        blocked.set()
        await coordinator.load(1)
        assert_delivered(fabric)


async def test_fifty_updates_on_one_group_use_no_more_threads_or_descriptors() -> None:
    def resources() -> tuple[int, int]:
        return len(list(Path("/proc/self/task").iterdir())), len(os.listdir("/proc/self/fd"))

    async with plane() as (coordinator, fabric):
        await coordinator.form(ROLLOUTS)
        await update(coordinator, 1)
        before = resources()
        for version in range(2, 52):
            perturb(fabric)
            await update(coordinator, version)
        assert all(now <= then for now, then in zip(resources(), before, strict=True))
        assert coordinator.term == 1
        assert_delivered(fabric)


async def test_a_later_form_takes_the_place_of_the_group_under_another_term_and_prefix() -> None:
    async with plane() as (coordinator, fabric):
        for version in (1, 2):
            await coordinator.form(ROLLOUTS)
            await update(coordinator, version)
            assert coordinator.term == version
        assert_delivered(fabric)
        joins = {request.term: request.prefix for _, request in fabric.requests if isinstance(request, Join)}
        assert len(set(joins.values())) == 2 and all(len(prefix) > 32 for prefix in joins.values())


# --- What must fail, how, and what comes after ----------------------------------------------------------------------


async def test_an_absent_member_is_named_within_the_deadline_and_the_next_term_is_formed() -> None:
    async with plane(join_timeout_s=2.0) as (coordinator, fabric):
        fabric.absent = {(ROLLOUTS[1], Join)}
        began = time.monotonic()
        with pytest.raises(RendezvousError) as caught:
            await coordinator.form(ROLLOUTS)
        assert time.monotonic() - began < 2.5
        text = str(caught.value)
        assert text.startswith("the weight group of term 1 was not formed, JOIN failed: rollout 1: no reply to Join")
        assert "trainer 0: CollectiveError: waited 1.5 s for rollout 1 to come" in text
        fabric.absent = set()
        await coordinator.form(ROLLOUTS)
        assert coordinator.term == 2
        await update(coordinator, 7)
        assert_delivered(fabric)


async def test_a_member_that_cannot_prepare_is_named_with_the_phase() -> None:
    async with plane(join_timeout_s=2.0) as (coordinator, fabric):
        fabric.absent = {(ROLLOUTS[0], messages.Prepare)}
        with pytest.raises(RendezvousError, match="term 1 was not formed, PREPARE failed: rollout 0: no reply"):
            await coordinator.form(ROLLOUTS)
        assert not any(isinstance(request, Join) for _, request in fabric.requests)


async def test_a_member_that_is_late_but_in_time_joins() -> None:
    async with plane(join_timeout_s=6.0) as (coordinator, fabric):
        handle = fabric.members[ROLLOUTS[1]].join

        async def late(request: Join) -> Joined:
            await anyio.sleep(1.5)
            return await handle(request)

        fabric.members[ROLLOUTS[1]].handlers = {**fabric.members[ROLLOUTS[1]].handlers, Join: late}
        await coordinator.form(ROLLOUTS)
        await update(coordinator, 1)
        assert_delivered(fabric)


async def test_a_join_that_raises_ends_the_others_at_once_and_is_the_first_cause() -> None:
    async with plane(join_timeout_s=30.0) as (coordinator, fabric):

        def fail(peer: PeerId, request: Message) -> None:
            if peer == ROLLOUTS[0] and isinstance(request, Join):
                raise OSError("no such interface")

        fabric.before = fail
        began = time.monotonic()
        with pytest.raises(RendezvousError, match="JOIN failed: rollout 0: OSError: no such interface; ") as caught:
            await coordinator.form(ROLLOUTS)
        assert time.monotonic() - began < 5.0
        assert isinstance(caught.value.__cause__, RemoteError)
        fabric.before = lambda peer, request: None
        await coordinator.form(ROLLOUTS)
        await update(coordinator, 1)
        assert_delivered(fabric)


async def test_load_that_raises_ends_every_side_with_the_first_cause_and_the_next_term_delivers_everything() -> None:
    async with plane(bucket_bytes=64, sync_timeout_s=30.0, helper=True) as (coordinator, fabric):
        await coordinator.form(ROLLOUTS)
        fabric.receivers[ROLLOUTS[0]].fail_at = "mask"
        began = time.monotonic()
        with pytest.raises(
            WeightSyncError, match=r"version 1 was not delivered \(term 1\): rollout 0: ValueError: no room for mask; "
        ):
            await update(coordinator, 1)
        assert time.monotonic() - began < 6.0
        assert fabric.gathered["root"] == fabric.gathered["help"] == len(AWKWARD), "ranks must gather in lockstep"
        with pytest.raises(WeightSyncError, match="no weight group is formed"):
            await coordinator.send(2)
        fabric.receivers[ROLLOUTS[0]].fail_at = ""
        await coordinator.form(ROLLOUTS)
        await update(coordinator, 2)
        assert_delivered(fabric)


async def test_gathering_that_raises_ends_the_rollouts_that_wait_for_the_broadcast() -> None:
    async with plane(bucket_bytes=64, sync_timeout_s=30.0) as (coordinator, fabric):
        await coordinator.form(ROLLOUTS)
        good, fabric.source = fabric.source, [("embed", torch.zeros(50, 33)), ("intruder", torch.zeros(1))]
        began = time.monotonic()
        with pytest.raises(
            WeightSyncError, match=r"trainer 0: WeightSyncError: tensor transposed .* gathered intruder"
        ):
            await coordinator.send(1)
        assert time.monotonic() - began < 6.0
        fabric.source = good
        await coordinator.form(ROLLOUTS)
        await update(coordinator, 2)
        assert_delivered(fabric)


async def test_a_rollout_that_hangs_while_loading_ends_the_update_within_the_deadline() -> None:
    async with plane(bucket_bytes=64, sync_timeout_s=2.0) as (coordinator, fabric):
        await coordinator.form(ROLLOUTS)
        hang = fabric.receivers[ROLLOUTS[1]].blocked = threading.Event()
        began = time.monotonic()
        with pytest.raises(WeightSyncError, match="rollout 1: no reply to ReceiveWeights"):
            await update(coordinator, 1)
        assert time.monotonic() - began < 4.0
        hang.set()


async def test_a_lost_peer_is_the_first_cause_even_if_others_notice_the_broken_group_earlier() -> None:
    async with plane(sync_timeout_s=20.0) as (coordinator, fabric):
        await coordinator.form(ROLLOUTS)

        def die(peer: PeerId, request: Message) -> None:
            if peer == ROLLOUTS[0] and isinstance(request, ReceiveWeights):
                fabric.members[peer].close()
                raise PeerLostError(peer.role, peer.rank, "killed by signal 9")

        fabric.before = die
        with pytest.raises(WeightSyncError, match=r"delivered \(term 1\): rollout 0: killed by signal 9"):
            await coordinator.send(1)


async def test_cancelling_an_update_frees_every_member() -> None:
    async with plane(bucket_bytes=64, sync_timeout_s=30.0) as (coordinator, fabric):
        await coordinator.form(ROLLOUTS)
        fabric.absent = {(TRAINER, messages.SendWeights)}
        with anyio.move_on_after(0.5) as scope:
            await coordinator.send(1)
        assert scope.cancelled_caught
        aborted = {peer for peer, request in fabric.requests if isinstance(request, Abort)}
        assert aborted == {TRAINER, *ROLLOUTS}
        with pytest.raises(WeightSyncError, match=r"version 1 was not delivered .*cancelled"):
            await coordinator.load(1)
        fabric.absent = set()
        await coordinator.form(ROLLOUTS)
        await update(coordinator, 2)
        assert_delivered(fabric)


async def test_a_cancelled_update_leaves_no_trainer_rank_gathering() -> None:
    async with plane(helper=True) as (coordinator, fabric):
        await coordinator.form(ROLLOUTS)
        fabric.pause_s = 0.1
        with anyio.move_on_after(0.25) as scope:
            await coordinator.send(1)
        assert scope.cancelled_caught
        assert fabric.gathered == {"root": len(AWKWARD), "help": len(AWKWARD)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda specs: specs[1:], "rollout 1: tensor embed is sent but not accepted"),
        (lambda specs: (*specs, TensorSpec("extra", "float32", (2,))), "rollout 1: tensor extra is accepted but not"),
        (
            lambda specs: (TensorSpec("embed", "bfloat16", (50, 33)), *specs[1:]),
            r"rollout 1: tensor embed is sent as float32 \[50, 33\] but accepted as bfloat16 \[50, 33\]",
        ),
        (
            lambda specs: (TensorSpec("embed", "float32", (33, 50)), *specs[1:]),
            r"rollout 1: tensor embed is sent as float32 \[50, 33\] but accepted as float32 \[33, 50\]",
        ),
    ],
)
async def test_models_that_differ_are_refused_before_any_byte_naming_rank_and_tensor(
    change: Callable[[tuple[TensorSpec, ...]], tuple[TensorSpec, ...]], message: str
) -> None:
    async with plane() as (coordinator, fabric):
        receiver = Receiver()
        fabric.members[ROLLOUTS[1]].close()
        fabric.members[ROLLOUTS[1]] = WeightMember(
            "receive", backend="gloo", specs=change(specs_of(AWKWARD)), load=receiver.load
        )
        with pytest.raises(WeightSyncError, match=message):
            await coordinator.form(ROLLOUTS)
        assert not any(isinstance(request, Join) for _, request in fabric.requests)


async def test_members_with_another_backend_are_refused() -> None:
    async with plane() as (coordinator, fabric):
        fabric.members[ROLLOUTS[0]]._backend = "nccl"
        with pytest.raises(RendezvousError, match="rollout 0 uses backend nccl, the others gloo"):
            await coordinator.form(ROLLOUTS)


async def test_names_received_but_not_loaded_fail_the_update() -> None:
    async with plane() as (coordinator, fabric):
        await coordinator.form(ROLLOUTS)
        fabric.receivers[ROLLOUTS[1]].ignored = "half"
        with pytest.raises(WeightSyncError, match=r"rollout 1: .*1 tensors were received but not loaded, half among"):
            await update(coordinator, 1)


async def test_loading_that_stops_early_fails_the_update() -> None:
    async with plane() as (coordinator, fabric):
        await coordinator.form(ROLLOUTS)
        fabric.members[ROLLOUTS[0]]._load = lambda tensors: {next(tensors)[0]}
        with pytest.raises(WeightSyncError, match=r"rollout 0: .*loading stopped before tensor transposed"):
            await update(coordinator, 1)


async def test_a_receiver_whose_digest_differs_fails_the_update_and_is_named() -> None:
    async with plane() as (coordinator, fabric):
        await coordinator.form(ROLLOUTS)

        def flip(peer: PeerId, reply: Message) -> Message:
            if peer == ROLLOUTS[1] and isinstance(reply, WeightsReceived):
                fields = {name: getattr(reply, name) for name in reply.__struct_fields__}
                return WeightsReceived(**{**fields, "digest": "0" * 32})
            return reply

        fabric.tamper = flip
        await coordinator.send(1)
        with pytest.raises(WeightSyncError, match="rollout 1: it did not load what was sent"):
            await coordinator.load(1)


async def test_versions_are_loaded_only_after_they_were_sent() -> None:
    async with plane() as (coordinator, fabric):
        with pytest.raises(WeightSyncError, match="version 1 cannot be sent: no weight group is formed"):
            await coordinator.send(1)
        await coordinator.form(ROLLOUTS)
        await update(coordinator, 1)
        with pytest.raises(WeightSyncError, match="version 2 cannot be loaded: it was not sent"):
            await coordinator.load(2)
        assert_delivered(fabric)


async def test_a_stale_term_is_refused_and_a_stale_abort_does_no_harm() -> None:
    async with plane() as (coordinator, fabric):
        await coordinator.form(ROLLOUTS)
        await coordinator.form(ROLLOUTS)
        member = fabric.members[ROLLOUTS[0]]
        with pytest.raises(RendezvousError, match="term 1 comes after term 2"):
            await member.prepare(messages.Prepare(term=1))
        with pytest.raises(RendezvousError, match="term 1 is asked for, but term 2 is prepared"):
            await member.receive(ReceiveWeights(term=1, version=1, timeout_s=1.0))
        await member.abort(Abort(term=1, reason="late"))
        await update(coordinator, 1)
        assert_delivered(fabric)
