"""A member of the weight group: the sending trainer rank, the trainer ranks that help it gather, or a rollout worker.

All blocking work of a member runs in one thread, so collectives are issued in one fixed order.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, Literal, TypeVar, cast

import anyio
import torch
import xxhash
from torch.distributed.distributed_c10d import PrefixStore

from aoffpolicy.devices import DeviceKind, torch_device
from aoffpolicy.errors import RendezvousError, WeightSyncError
from aoffpolicy.transport import group
from aoffpolicy.transport.buckets import ROOT, broadcast_buckets, left_s, receive_buckets
from aoffpolicy.transport.group import Collective, CollectiveError, GroupOptions
from aoffpolicy.transport.lane import Lane
from aoffpolicy.transport.manifest import Manifest, Named, difference
from aoffpolicy.transport.messages import (
    Abort,
    Done,
    Join,
    Joined,
    Message,
    Prepare,
    Ready,
    ReceiveWeights,
    SendWeights,
    TensorSpec,
    WeightsReceived,
    WeightsSent,
)
from aoffpolicy.transport.rendezvous import arrive, connect

Gather = Callable[[], Iterable[Named]]
"""Gives the weights in manifest order; on several trainer ranks it is a collective, driven in lockstep to its end."""
Load = Callable[[Iterator[Named]], Collection[str]]
"""Puts the tensors in place as they come and returns the names it has put in place. A tensor stays valid."""
Handlers = Mapping[type[Message], Callable[[Any], Awaitable[Message]]]
T = TypeVar("T")


class _Term:
    """What a member holds between PREPARE and ABORT of one term."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.aborted = threading.Event()
        self.reason = ""
        self.manifest: Manifest | None = None
        self._collective: Collective | None = None
        self._lock = threading.Lock()

    def abort(self, reason: str) -> None:
        """Leave the group, from any thread and in the middle of a collective."""
        with self._lock:
            self.reason = self.reason or reason
            self.aborted.set()
            if self._collective is not None:
                self._collective.abort(self.reason)

    def enter(self, collective: Collective) -> Collective:
        with self._lock:
            self._collective = collective
            if self.aborted.is_set():
                collective.abort(self.reason)
        return collective

    def group(self) -> tuple[Collective, Manifest]:
        if self._collective is None or self.manifest is None or self.aborted.is_set():
            raise CollectiveError(f"term {self.number} has no group: {self.reason or 'it was not joined'}")
        return self._collective, self.manifest


class WeightMember:
    """Handlers of one member for the control plane.

    Args:
        role: Whether this member sends or receives.
        backend: Collective backend, a key of `group.BACKENDS`.
        specs: Every tensor of the model as it travels: in the order sent on the rank that sends, in any order on a
            receiver, unused on ranks that only help to gather.
        gather: For role "send".
        load: For role "receive".
        root: False on trainer ranks that only help to gather: they stay out of the group.
        device: Where buckets live.

    Attributes:
        handlers: For the control client; Prepare, Join, Abort and SendWeights or ReceiveWeights.
    """

    def __init__(
        self,
        role: Literal["send", "receive"],
        *,
        backend: str,
        specs: Sequence[TensorSpec] = (),
        gather: Gather | None = None,
        load: Load | None = None,
        root: bool = True,
        device: torch.device | None = None,
    ) -> None:
        if (gather is None) == (role == "send") or (load is None) == (role == "receive"):
            raise ValueError("a sender needs gather, a receiver needs load, and neither needs the other")
        self._role = role
        self._backend = backend
        self._specs = tuple(specs)
        self._gather = gather or tuple
        self._load = load
        self._root = root
        self._device = device or torch.device("cpu")
        self._buffers: tuple[torch.Tensor, ...] = ()
        """Two on the sender: one is filled while the other travels. They outlive a term."""
        self._term = _Term(0)
        self._term.abort("no group was prepared")
        self._lane = Lane("weights")
        self.handlers: Handlers = {
            Prepare: self.prepare,
            Join: self.join,
            Abort: self.abort,
            **({SendWeights: self.send} if role == "send" else {ReceiveWeights: self.receive}),
        }

    def close(self) -> None:
        """Leave the group and end the thread."""
        self._term.abort("the member was closed")
        self._lane.close()

    async def prepare(self, request: Prepare) -> Ready:
        """Leave an earlier group and wait until its work has ended."""
        if request.term <= self._term.number:
            raise RendezvousError(f"term {request.term} comes after term {self._term.number}: it is stale")
        self._term.abort(f"term {request.term} takes its place")
        self._term = _Term(request.term)
        await self._lane.run(lambda: None)
        hold = self._specs if self._role == "send" and self._root else ()
        return Ready(
            term=request.term,
            backend=self._backend,
            hold=hold,
            accepts=self._specs if self._role == "receive" else (),
        )

    async def join(self, request: Join) -> Joined:
        """Meet the others, form the group and prove by a first broadcast that it works."""
        return await self._in_lane(request.term, partial(self._join, request))

    async def abort(self, request: Abort) -> Done:
        """Leave the group: what is blocked in a collective raises. Returns when this member's thread is idle again.

        So trainer ranks still gathering in lockstep are done before the controller asks them for anything else.
        """
        if request.term == self._term.number:
            self._term.abort(f"term {request.term} was aborted: {request.reason}")
            await self._lane.run(lambda: None)
        return Done()

    async def send(self, request: SendWeights) -> WeightsSent:
        """Gather and broadcast every tensor, or only help to gather."""
        return await self._in_lane(request.term, partial(self._send, request))

    async def receive(self, request: ReceiveWeights) -> WeightsReceived:
        """Receive and load every tensor."""
        return await self._in_lane(request.term, partial(self._receive, request))

    async def _in_lane(self, number: int, job: Callable[[_Term], T]) -> T:
        term = self._term
        if number != term.number:
            raise RendezvousError(f"term {number} is asked for, but term {term.number} is prepared")
        try:
            return await self._lane.run(partial(job, term))
        except anyio.get_cancelled_exc_class():
            term.abort("the request was cancelled")
            raise

    # --- In the thread -----------------------------------------------------------------------------------------------

    def _join(self, request: Join, term: _Term) -> Joined:
        deadline = time.monotonic() + request.timeout_s
        if self._role == "receive" and (fault := difference(request.manifest, self._specs)):
            raise WeightSyncError(fault)
        torch_device(cast(DeviceKind, self._device.type), self._device.index or 0)  # current in this thread too
        manifest = Manifest(request.manifest, request.bucket_bytes)
        store = PrefixStore(request.prefix, connect(request.store_host, request.store_port, request.timeout_s))
        arrive(store, request.rank, request.members, left_s(deadline), term.aborted)
        options = GroupOptions(
            rank=request.rank,
            size=len(request.members),
            interface=request.interface,
            device=self._device,
            timeout_s=left_s(deadline),
        )
        collective = term.enter(group.create(self._backend, store, options))
        _warm_up(collective, manifest, request.rank, self._device, deadline)
        term.manifest = manifest
        return Joined(term=term.number, manifest_digest=manifest.digest)

    def _send(self, request: SendWeights, term: _Term) -> WeightsSent:
        started = time.monotonic()
        tensors = iter(self._gather())
        try:
            digest, sent = self._broadcast(request, term, tensors) if self._root else ("", 0)
        finally:
            deque(tensors, maxlen=0)  # the other trainer ranks gather in lockstep: never leave them alone half-way
        return WeightsSent(
            term=term.number,
            version=request.version,
            digest=digest,
            bytes=sent,
            seconds=time.monotonic() - started,
        )

    def _broadcast(self, request: SendWeights, term: _Term, tensors: Iterator[Named]) -> tuple[str, int]:
        collective, manifest = term.group()
        size = max(manifest.bucket_sizes, default=0)
        if not self._buffers or len(self._buffers[0]) != size:
            self._buffers = tuple(torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(2))
        digest = broadcast_buckets(collective, manifest.pack(tensors, self._buffers), request.timeout_s)
        return digest, manifest.total_bytes

    def _receive(self, request: ReceiveWeights, term: _Term) -> WeightsReceived:
        assert self._load is not None
        collective, manifest = term.group()
        digest = xxhash.xxh3_128()
        buckets = receive_buckets(collective, manifest.bucket_sizes, self._device, request.timeout_s, digest.update)
        first = next(buckets, None)
        started = time.monotonic()
        tensors = manifest.unpack(buckets if first is None else chain([first], buckets))
        loaded = self._load(tensors)
        for name, _ in tensors:
            raise WeightSyncError(f"loading stopped before tensor {name}")
        if missing := {spec.name for spec in manifest.specs}.difference(loaded):
            raise WeightSyncError(f"{len(missing)} tensors were received but not loaded, {min(missing)} among them")
        return WeightsReceived(
            term=term.number,
            version=request.version,
            digest=digest.hexdigest(),
            bytes=manifest.total_bytes,
            seconds=time.monotonic() - started,
            loaded=len(manifest) - len(missing),
        )


def _warm_up(collective: Collective, manifest: Manifest, rank: int, device: torch.device, deadline: float) -> None:
    """The first collective connects lazy backends; it carries the sender's manifest digest, so it proves something."""
    mine = torch.frombuffer(bytearray.fromhex(manifest.digest), dtype=torch.uint8).to(device)
    theirs = mine.clone() if rank == ROOT else torch.zeros_like(mine)
    collective.broadcast(theirs, ROOT, left_s(deadline)).wait()
    if not torch.equal(mine, theirs):
        raise WeightSyncError("the warm-up broadcast brought another manifest than this member's")
