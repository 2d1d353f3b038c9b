"""The controller's side of the weight plane: forms the group and drives each update, both sides at once.

Forming: PREPARE to all -> READY from all -> the manifest is checked -> JOIN to all -> a warm-up collective -> JOINED
from all. Whatever goes wrong, everybody is told to ABORT, the first cause is raised, and the next attempt has another
term and another prefix, so that nothing left over from this one can be mistaken for it.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import accumulate
from types import TracebackType
from typing import Self, TypeVar

import anyio

from aoffpolicy.errors import (
    AoffpolicyError,
    ProtocolError,
    RendezvousError,
    WeightSyncError,
)
from aoffpolicy.transport.exchange import GRACE, INNER, Call, Unanswered, ask_all
from aoffpolicy.transport.manifest import Manifest, difference
from aoffpolicy.transport.messages import (
    Abort,
    Join,
    Joined,
    Message,
    Prepare,
    Ready,
    ReceiveWeights,
    SendWeights,
    WeightsReceived,
    WeightsSent,
)
from aoffpolicy.transport.rendezvous import RendezvousStore
from aoffpolicy.transport.tasks import background_tasks
from aoffpolicy.transport.wire import PeerId

logger = logging.getLogger(__name__)
M = TypeVar("M", bound=Message)

ABORT_TIMEOUT_S = 5.0
"""For one member to abort and come to rest, or less where the deadline of joining is short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSettings:
    backend: str
    interface: str
    """Bare address that every member's collective binds."""
    bucket_bytes: int
    join_timeout_s: float
    """Deadline of one attempt to form the group."""
    sync_timeout_s: float
    """Deadline of one update, from the request to the last weight loaded."""


@dataclass(slots=True, eq=False)
class _Update:
    """One version on its way."""

    version: int
    term: int
    manifest: Manifest
    sent: anyio.Event = field(default_factory=anyio.Event)
    """Set when every sender has replied, or the update has failed."""
    done: anyio.Event = field(default_factory=anyio.Event)
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    replies: dict[PeerId, Message] = field(default_factory=dict)
    failure: Exception | None = None


class Coordinator:
    """Forms one group of senders and receivers and moves weights through it; an async context manager.

    Args:
        call: Sends a request to a member and returns its reply.
        store: Where the members meet; must outlive the coordinator.
        senders: Trainer ranks. One of them holds the weights, the others help to gather and stay out of the group.
    """

    def __init__(
        self,
        call: Call,
        store: RendezvousStore,
        senders: Sequence[PeerId],
        settings: GroupSettings,
    ) -> None:
        self._call = call
        self._store = store
        self._senders = tuple(senders)
        self._receivers: tuple[PeerId, ...] = ()
        """Rollout workers, as of the last attempt to form the group."""
        self._settings = settings
        self._term = 0
        self._aborted_term = 0
        self._manifest: Manifest | None = None
        """Of the formed group; None while there is none."""
        self._update: _Update | None = None
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        self._tasks = await self._stack.enter_async_context(background_tasks())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return await self._stack.__aexit__(kind, error, traceback)

    @property
    def term(self) -> int:
        """Number of the last attempt to form the group; 0 before the first."""
        return self._term

    # --- Forming the group -----------------------------------------------------------------------------------------

    @property
    def is_formed(self) -> bool:
        return self._manifest is not None

    async def form(self, receivers: Sequence[PeerId]) -> None:
        """Form the group under the next term, in place of an earlier one.

        Args:
            receivers: Rollout workers.

        Raises:
            RendezvousError: Not all members came within the deadline; names term, phase and who was missing.
            WeightSyncError: Sender and receiver do not agree on the tensors; names tensor and rank.
        """
        self._term += 1
        self._manifest = None
        self._receivers = tuple(receivers)
        deadline = anyio.current_time() + self._settings.join_timeout_s
        try:
            prepare = dict.fromkeys(self._everybody, Prepare(term=self._term))
            ready = await self._ask_all(self._not_formed("PREPARE"), prepare, deadline, RendezvousError)
            members, manifest = self._agree({peer: _expect(reply, Ready) for peer, reply in ready.items()})
            requests = self._join_requests(members, manifest, (deadline - anyio.current_time()) * INNER)
            joined = await self._ask_all(self._not_formed("JOIN"), requests, deadline, RendezvousError)
            for peer, reply in joined.items():
                if _expect(reply, Joined).manifest_digest != manifest.digest:
                    raise WeightSyncError(f"{peer}: it joined with another manifest than the controller's")
        except BaseException as error:
            await self._abort(_words(error))
            raise
        self._manifest = manifest
        logger.info("weight group formed: term %d, %d tensors", self._term, len(manifest))

    def _not_formed(self, phase: str) -> str:
        return f"the weight group of term {self._term} was not formed, {phase} failed"

    @property
    def _everybody(self) -> tuple[PeerId, ...]:
        return (*self._senders, *self._receivers)

    def _agree(self, ready: Mapping[PeerId, Ready]) -> tuple[Mapping[PeerId, int], Manifest]:
        """How many ranks each member brings, the sender first, and the manifest that it and every receiver accept."""
        for peer, reply in ready.items():
            if reply.backend != self._settings.backend:
                raise RendezvousError(f"{peer} uses backend {reply.backend}, the others {self._settings.backend}")
        roots = [peer for peer in self._senders if ready[peer].hold]
        if len(roots) != 1:
            raise RendezvousError(f"one trainer rank must hold the weights, not {len(roots)}")
        hold = ready[roots[0]].hold
        for peer in self._receivers:
            if fault := difference(hold, ready[peer].accepts):
                raise WeightSyncError(f"{peer}: {fault}")
        members = {roots[0]: 1, **{peer: ready[peer].ranks for peer in self._receivers}}
        return members, Manifest(hold, self._settings.bucket_bytes)

    def _join_requests(
        self, members: Mapping[PeerId, int], manifest: Manifest, timeout_s: float
    ) -> dict[PeerId, Message]:
        names = [
            str(peer) if count == 1 else f"{peer} (tensor-parallel rank {index})"
            for peer, count in members.items()
            for index in range(count)
        ]
        first_rank = dict(zip(members, accumulate(members.values(), initial=0), strict=False))
        prefix = f"weights/{self._term}/{secrets.token_hex(16)}"
        return {
            peer: Join(
                term=self._term,
                rank=first_rank[peer],
                members=tuple(names),
                store_host=self._store.host,
                store_port=self._store.port,
                prefix=prefix,
                interface=self._settings.interface,
                manifest=manifest.specs,
                bucket_bytes=manifest.bucket_bytes,
                timeout_s=timeout_s,
            )
            for peer in members
        }

    # --- Updates ---------------------------------------------------------------------------------------------------

    async def send(self, version: int) -> tuple[WeightsSent, ...]:
        """Start the update on both sides; returns when the trainer may go on, while receivers may still load.

        Cancellation aborts the update on every member before it comes through.

        Returns:
            The replies of the senders, in order.

        Raises:
            WeightSyncError: No group is formed, the last update is not done, or any member failed; names the rank.
        """
        if self._manifest is None:
            raise WeightSyncError(f"version {version} cannot be sent: no weight group is formed")
        if self._update is not None and not self._update.done.is_set():
            raise WeightSyncError(f"version {version} cannot be sent: version {self._update.version} is not loaded yet")
        self._update = update = _Update(version, self._term, self._manifest)
        self._tasks.start_soon(self._run, update)
        await self._until(update.sent, update)
        return tuple(_expect(update.replies[peer], WeightsSent) for peer in self._senders)

    async def load(self, version: int) -> tuple[WeightsReceived, ...]:
        """Wait until every receiver has loaded the version that was sent, whole and bit for bit.

        Returns:
            The replies of the receivers, in order.

        Raises:
            WeightSyncError: This version was not sent, or any member failed; names the rank.
        """
        update = self._update
        if update is None or update.version != version:
            raise WeightSyncError(f"version {version} cannot be loaded: it was not sent")
        await self._until(update.done, update)
        return tuple(_expect(update.replies[peer], WeightsReceived) for peer in self._receivers)

    def loaded(self, version: int) -> frozenset[PeerId]:
        """The receivers that loaded this version, whole and bit for bit: not all of them where `load` has failed."""
        update = self._update
        if update is None or update.version != version:
            return frozenset()
        return frozenset(peer for peer in self._receivers if not self._fault(update, peer))

    async def _until(self, event: anyio.Event, update: _Update) -> None:
        try:
            await event.wait()
        except anyio.get_cancelled_exc_class():
            update.scope.cancel()
            with anyio.CancelScope(shield=True):
                await update.done.wait()
            raise
        if update.failure is not None:
            raise update.failure

    async def _run(self, update: _Update) -> None:
        """One update from the first request to the last reply; its outcome is left in `update`, never raised."""
        deadline = anyio.current_time() + self._settings.sync_timeout_s
        inner_s = self._settings.sync_timeout_s * INNER
        send = SendWeights(term=self._term, version=update.version, timeout_s=inner_s)
        receive = ReceiveWeights(term=self._term, version=update.version, timeout_s=inner_s)
        requests = {**dict.fromkeys(self._senders, send), **dict.fromkeys(self._receivers, receive)}

        def note(peer: PeerId, reply: Message) -> None:
            update.replies[peer] = reply
            if all(sender in update.replies for sender in self._senders):
                update.sent.set()

        what = f"version {update.version} was not delivered (term {self._term})"
        ended = False
        try:
            with update.scope:
                try:
                    await self._ask_all(what, requests, deadline, WeightSyncError, note)
                    for peer in self._receivers:
                        if fault := self._fault(update, peer):
                            raise WeightSyncError(f"{peer}: {fault}")
                except BaseException as error:
                    await self._abort(_words(error))
                    raise
                ended = True
        except Exception as error:
            logger.error("%s", error)
            update.failure, ended = error, True
        finally:
            if not ended:
                update.failure = WeightSyncError(f"{what}: it was cancelled")
            update.sent.set()
            update.done.set()

    def _fault(self, update: _Update, receiver: PeerId) -> str:
        """Why it is not proven that this receiver loaded what was sent; empty where it is."""
        sent = [update.replies[peer] for peer in self._senders if peer in update.replies]
        digests = [reply.digest for reply in sent if isinstance(reply, WeightsSent) and reply.digest]
        received = update.replies.get(receiver)
        if not digests or received is None:
            return "it did not answer, or the sender did not"
        reply = _expect(received, WeightsReceived)
        expected = (update.term, update.version, digests[0], update.manifest.total_bytes, len(update.manifest))
        answered = (reply.term, reply.version, reply.digest, reply.bytes, reply.loaded)
        if answered == expected:
            return ""
        return (
            f"it did not load what was sent: (term, version, digest, bytes, tensors) is {answered} and should be "
            f"{expected}"
        )

    async def _ask_all(
        self,
        what: str,
        requests: Mapping[PeerId, Message],
        deadline: float,
        kind: type[RendezvousError | WeightSyncError],
        on_reply: Callable[[PeerId, Message], None] = lambda peer, reply: None,
    ) -> dict[PeerId, Message]:
        try:
            return await ask_all(self._call, requests, deadline, on_reply=on_reply, on_failure=self._abort)
        except Unanswered as error:
            raise kind(f"{what}: {error}") from error.first

    async def _abort(self, reason: str) -> None:
        """Tell everybody to leave this term's group; who cannot be told has left it in another way."""
        if self._aborted_term == self._term:
            return
        self._aborted_term, self._manifest = self._term, None
        request = Abort(term=self._term, reason=reason)
        timeout_s = min(ABORT_TIMEOUT_S, self._settings.join_timeout_s * GRACE)

        async def leave(peer: PeerId) -> None:
            try:
                await self._call(peer, request, timeout_s)
            except AoffpolicyError as error:
                logger.warning("did not come to rest after term %d was aborted: %s", request.term, error)

        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as tasks:
                for peer in self._everybody:
                    tasks.start_soon(leave, peer)


def _expect(reply: Message, kind: type[M]) -> M:
    if not isinstance(reply, kind):
        raise ProtocolError(f"a {type(reply).__name__} came in reply where a {kind.__name__} was due")
    return reply


def _words(error: BaseException) -> str:
    return str(error) if isinstance(error, AoffpolicyError) else f"the controller gave up ({type(error).__name__})"
