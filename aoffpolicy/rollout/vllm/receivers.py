"""One rollout worker's place in the weight plane, held for the vLLM workers below it: they are the members.

The controller asks the rollout worker; this passes the request on to every engine worker over a control plane of their
own, on loopback, and answers for all of them.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import anyio
import msgspec

from aoffpolicy.errors import AoffpolicyError, DeadlineError, EngineError, RoleError, WeightSyncError
from aoffpolicy.rollout.vllm.member import ROLE, Orders
from aoffpolicy.rollout.vllm.plugin import BACKEND
from aoffpolicy.transport.address import Address
from aoffpolicy.transport.control import ControlServer, PeerId
from aoffpolicy.transport.exchange import CONSEQUENCE, INNER, Unanswered, ask_all
from aoffpolicy.transport.group import CollectiveError
from aoffpolicy.transport.messages import (
    Abort,
    Done,
    Join,
    Joined,
    Message,
    Prepare,
    Ready,
    ReceiveWeights,
    TensorSpec,
    WeightsReceived,
)
from aoffpolicy.transport.weights import Handlers

logger = logging.getLogger(__name__)
PASS_ON_S = 30.0
"""Deadline of passing on what an engine worker answers at once."""


class EngineReceivers:
    """Answers Prepare, Join, Abort and ReceiveWeights for all workers of one engine.

    Args:
        host: Loopback address over which the engine's workers reach this process.
        count: Workers of the engine: its tensor-parallel size.
        backend: Collective backend of the weight group.
        specs: Every tensor to be received.
        install: Has vLLM give these orders to each of its workers (`init_weight_transfer_engine`).
        load: Has vLLM load the update of this (term, version) within the seconds given, as its workers receive it.
        heartbeat_timeout_s: Silence after which an engine worker is lost.
    """

    def __init__(
        self,
        *,
        host: str,
        count: int,
        backend: str,
        specs: Sequence[TensorSpec],
        install: Callable[[Mapping[str, Any]], Awaitable[None]],
        load: Callable[[int, int, float], Awaitable[None]],
        heartbeat_timeout_s: float = 10.0,
    ) -> None:
        self._run_id = secrets.token_hex(16)
        self._server = ControlServer(host, run_id=self._run_id, keys=None, heartbeat_timeout_s=heartbeat_timeout_s)
        self._peers = tuple(PeerId(ROLE, rank) for rank in range(count))
        self._backend = backend
        self._specs = tuple(specs)
        self._install = install
        self._load = load
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._serving: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self.handlers: Handlers = {
            Prepare: self.prepare,
            Join: self.join,
            Abort: self.abort,
            ReceiveWeights: self.receive,
        }

    async def open(self, timeout_s: float) -> None:
        """Reach every engine worker.

        Raises:
            EngineError: Our plugin does not answer in one of them.
        """
        opened: asyncio.Future[Address] = asyncio.get_running_loop().create_future()
        self._serving = asyncio.create_task(self._serve(opened))
        address = await opened
        for peer in self._peers:
            self._server.allow(peer, b"")
        orders = Orders(
            control_url=address.url,
            run_id=self._run_id,
            heartbeat_timeout_s=self._heartbeat_timeout_s,
            backend=self._backend,
            specs=tuple((spec.name, spec.dtype, tuple(spec.shape)) for spec in self._specs),
        )
        await self._install(asdict(orders))
        for peer in self._peers:
            await self._reach(peer, timeout_s)

    async def close(self) -> None:
        """Let the engine's workers go."""
        self._closing.set()
        if self._serving is not None:
            await asyncio.wait({self._serving})

    async def _serve(self, opened: asyncio.Future[Address]) -> None:
        """Own the server from beginning to end: it must be closed by the task that opened it."""
        try:
            async with self._server:
                opened.set_result(self._server.address)
                await self._closing.wait()
        except Exception as error:
            if not opened.done():
                opened.set_exception(error)
            else:
                logger.exception("the control plane of the engine's workers failed")

    async def _reach(self, peer: PeerId, timeout_s: float) -> None:
        try:
            await self._server.wait_for(peer, timeout_s)
        except RoleError as error:
            raise EngineError(
                f"{peer} of {len(self._peers)} cannot receive weights: its weight transfer engine is not {BACKEND!r}, "
                "or it failed. vLLM only logs what goes wrong in a plugin, and VLLM_PLUGINS leaves out whatever it "
                f"does not name; see the rollout worker's log ({error.cause})"
            ) from error

    # --- Requests ----------------------------------------------------------------------------------------------------

    async def prepare(self, request: Prepare) -> Ready:
        """Ready only if every engine worker is."""
        for peer in self._peers:
            await self._reach(peer, PASS_ON_S)
        await self._ask(dict.fromkeys(self._peers, request), request.term, PASS_ON_S)
        return Ready(term=request.term, backend=self._backend, accepts=self._specs, ranks=len(self._peers))

    async def join(self, request: Join) -> Joined:
        """Every engine worker joins with a rank of its own."""
        requests = {
            peer: msgspec.structs.replace(request, rank=request.rank + index, timeout_s=request.timeout_s * INNER)
            for index, peer in enumerate(self._peers)
        }
        replies = await self._ask(requests, request.term, request.timeout_s)
        return Joined(term=request.term, manifest_digest=_common(replies, "manifest_digest"))

    async def abort(self, request: Abort) -> Done:
        """Have every engine worker that can still be asked leave the group."""
        await self._abort(request)
        return Done()

    async def receive(self, request: ReceiveWeights) -> WeightsReceived:
        """Have the engine load the update while its workers receive it, bit for bit the same on all."""
        inner = msgspec.structs.replace(request, timeout_s=request.timeout_s * INNER)
        replies: dict[PeerId, Any] = {}
        failures: list[Exception] = []

        async def noted(step: Awaitable[None]) -> None:
            try:
                await step
            except Exception as error:
                failures.append(error)
                await self._abort(Abort(term=request.term, reason=str(error)))

        async def workers() -> None:
            replies.update(await self._ask(dict.fromkeys(self._peers, inner), request.term, request.timeout_s))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(noted, workers())
            tasks.start_soon(noted, self._load(request.term, request.version, inner.timeout_s))
        if failures:
            raise min(failures, key=lambda error: isinstance(error, CollectiveError))
        first = replies[self._peers[0]]
        received: WeightsReceived = msgspec.structs.replace(
            first,
            digest=_common(replies, "digest"),
            loaded=min(reply.loaded for reply in replies.values()),
            seconds=max(reply.seconds for reply in replies.values()),
        )
        return received

    async def _ask(self, requests: Mapping[PeerId, Message], term: int, timeout_s: float) -> dict[PeerId, Any]:
        """Ask all at once; errors come out as if this process itself were the member."""

        async def leave(reason: str) -> None:
            await self._abort(Abort(term=term, reason=reason))

        deadline = anyio.current_time() + timeout_s
        try:
            return await ask_all(
                self._server.call, requests, deadline, on_reply=lambda peer, reply: None, on_failure=leave
            )
        except Unanswered as error:
            first = error.first
            consequence = isinstance(first, RoleError) and first.cause.startswith(CONSEQUENCE)
            raise (CollectiveError if consequence else WeightSyncError)(str(error)) from first

    async def _abort(self, request: Abort) -> None:
        async def leave(peer: PeerId) -> None:
            try:
                await self._server.call(peer, request, PASS_ON_S)
            except (AoffpolicyError, DeadlineError) as error:
                logger.warning("%s did not leave term %d: %s", peer, request.term, error)

        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as tasks:
                for peer in self._peers:
                    tasks.start_soon(leave, peer)


def _common(replies: Mapping[PeerId, Any], field: str) -> str:
    """A value that all engine workers must agree on."""
    values = {peer: getattr(reply, field) for peer, reply in replies.items()}
    if len(set(values.values())) > 1:
        raise WeightSyncError(f"the engine's workers do not agree on the {field}: {values}")
    return str(next(iter(values.values())))
