"""The controller's end of the control plane: lets workers in, calls them, and notices when one is lost."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Never, Self

import anyio
import anyio.lowlevel
import anyio.to_thread
import zmq
import zmq.asyncio

from aoffpolicy.errors import ConfigError, DeadlineError, PeerLostError, ProtocolError, RemoteError
from aoffpolicy.transport import messages, wire
from aoffpolicy.transport.address import Address, resolve
from aoffpolicy.transport.messages import REPLIES, Frame, Message, Stop
from aoffpolicy.transport.roster import Roster
from aoffpolicy.transport.security import Authenticator, KeyPair, secure_server
from aoffpolicy.transport.sessions import PendingCall, Session
from aoffpolicy.transport.tasks import background_tasks
from aoffpolicy.transport.wire import Beat, Call, Cancel, Echo, Failure, Hello, PeerId, Progress, Reply, ToWorker

logger = logging.getLogger(__name__)

_BURST = 64  # transmissions taken in before other tasks get their turn
_REPORT_EVERY_S = 10.0  # malformed transmissions are logged at most this often
_WILDCARDS = ("0.0.0.0", "::")


class ControlServer:
    """The one socket that every worker of a run connects to; `async with` opens and closes it.

    Args:
        host: Address of this machine to bind: IPv4, IPv6 or name. The kernel chooses the port.
        run_id: Workers of another run are refused.
        keys: CURVE key pair of the controller; None only on loopback.
        allowed: Public keys (empty without CURVE) of the first incarnations, as far as they are known already.
        heartbeat_timeout_s: Silence after which a worker is lost.
        on_progress: Called with every progress line of a worker.
        versions: Package versions that a worker's Hello must match, by name.
        max_in_flight: Calls of one type in flight to one worker; more wait here, within their deadlines.
    """

    def __init__(
        self,
        host: str,
        *,
        run_id: str,
        keys: KeyPair | None,
        allowed: Mapping[PeerId, bytes] | None = None,
        heartbeat_timeout_s: float = 10.0,
        on_progress: Callable[[PeerId, str], None] = lambda peer, text: None,
        versions: Mapping[str, str] | None = None,
        max_in_flight: int = 256,
    ) -> None:
        self.malformed = 0
        """Transmissions that made no sense."""
        self._host = host
        self._keys = keys
        self._on_progress = on_progress
        self._roster = Roster(
            run_id,
            secure=keys is not None,
            heartbeat_timeout_s=heartbeat_timeout_s,
            versions=dict(versions or {}),
            max_in_flight=max_in_flight,
        )
        self._socket: zmq.asyncio.Socket
        self._address: Address | None = None
        self._authenticator: Authenticator | None = None
        self._last_call = 0
        self._reported_at = float("-inf")
        self._exit = AsyncExitStack()
        for peer, public_key in (allowed or {}).items():
            self.allow(peer, public_key)

    @property
    def address(self) -> Address:
        """Where workers connect; numeric, with the port that was chosen."""
        if self._address is None:
            raise RuntimeError("the server is not open; use it in `async with`")
        return self._address

    @property
    def refused_keys(self) -> int:
        """Connections turned away because their key is not listed."""
        return self._authenticator.refused if self._authenticator is not None else 0

    # --- Opening and closing ---------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Bind and start.

        Raises:
            ConfigError: The host cannot be bound, or it is not loopback and there are no keys.
        """
        host = await self._checked_host()
        async with AsyncExitStack() as stack:
            context = zmq.asyncio.Context()
            stack.callback(context.term)
            if self._keys is not None:
                self._authenticator = Authenticator(context)
                stack.callback(self._authenticator.close)
                self._authenticator.admitted = self._roster.public_keys
            self._socket = stack.enter_context(context.socket(zmq.ROUTER))
            self._address = self._bind(host)
            tasks = await stack.enter_async_context(background_tasks())
            if self._authenticator is not None:
                tasks.start_soon(self._authenticator.run)
            tasks.start_soon(self._receive)
            tasks.start_soon(self._roster.watch_liveness)
            self._exit = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self._roster.close()
        return await self._exit.__aexit__(kind, error, trace)

    async def _checked_host(self) -> str:
        host = (await anyio.to_thread.run_sync(resolve, self._host))[0]
        if host in _WILDCARDS:
            raise ConfigError([f"control.host: {self._host} means every address; name the one that workers connect to"])
        if self._keys is None and not Address(host, 0).is_loopback:
            raise ConfigError(
                [f"control.host: {self._host} is not loopback, so CURVE is needed (control.curve = true)"]
            )
        return host

    def _bind(self, host: str) -> Address:
        wire.configure(self._socket)
        self._socket.router_mandatory = True
        if self._keys is not None:
            secure_server(self._socket, self._keys)
        try:
            self._socket.bind(Address(host, 0).url)
        except zmq.ZMQError as error:
            raise ConfigError([f"control.host: cannot bind {self._host}: {error}"]) from error
        return Address(host, Address.parse(self._socket.getsockopt_string(zmq.LAST_ENDPOINT)).port)

    # --- Workers that come and go ----------------------------------------------------------------------------------

    def allow(self, peer: PeerId, public_key: bytes, incarnation: int = 0) -> None:
        """Let a worker in when it comes; older incarnations of it are fenced off from now on.

        Args:
            peer: Which worker.
            public_key: Its CURVE public key; empty without CURVE.
            incarnation: The lowest that is let in.

        Raises:
            ValueError: This incarnation, or a later one, is here already.
        """
        self._roster.allow(peer, public_key, incarnation)
        if self._authenticator is not None:
            self._authenticator.admitted = self._roster.public_keys

    def forget(self, peer: PeerId) -> None:
        """Do not count this worker's silence as a loss any more; `Stop` does the same."""
        self._roster.forget(peer)

    async def wait_for(self, peer: PeerId, timeout_s: float) -> Hello:
        """Wait until the worker has come and was let in.

        Raises:
            DeadlineError: It did not come in time.
            PeerLostError: It came and is lost again.
        """
        return await self._roster.wait_for(peer, timeout_s)

    def lose(self, peer: PeerId, cause: str) -> None:
        """Give a worker up of which is known otherwise that it is gone: its calls fail at once."""
        self._roster.lose(self._roster.session(peer), cause)

    async def watch(self, takes_over: Callable[[PeerLostError], bool] = lambda loss: False) -> Never:
        """Wait for the first worker that is lost without having been told to stop.

        Args:
            takes_over: Called with each loss; true if it is taken care of.

        Raises:
            PeerLostError: The first one of which nobody takes care; always.
        """
        await self._roster.watch(takes_over)

    # --- Calls -----------------------------------------------------------------------------------------------------

    async def call(self, peer: PeerId, request: Message, timeout_s: float) -> Any:
        """Have a worker handle a request; its handler is cancelled when this call is, or runs past its deadline.

        Args:
            peer: Which worker.
            request: One of `messages.REQUESTS`.
            timeout_s: Deadline, waiting for a slot included.

        Returns:
            The reply, of type `REPLIES[type(request)]`.

        Raises:
            RemoteError: The handler failed; carries the remote traceback.
            PeerLostError: The worker is lost or not connected.
            DeadlineError: No reply came in time.
            ProtocolError: The request is too large, or the reply is not of its type.
        """
        session, kind = self._roster.session(peer), type(request)
        with anyio.move_on_after(timeout_s):
            async with session.slot(kind):
                if not session.alive:
                    raise session.error()
                return messages.decode(await self._exchange(session, request, timeout_s), REPLIES[kind])
        progress = f"; it last said {session.last_progress!r}" if session.last_progress else ""
        raise DeadlineError(
            peer.role,
            peer.rank,
            f"the controller waited {timeout_s:.1f} s for the reply to {kind.__name__} while its heartbeats went on"
            f"{progress}; see its log, or raise the deadline",
        )

    async def _exchange(self, session: Session, request: Message, timeout_s: float) -> list[Frame]:
        name = type(request).__name__
        frames = messages.encode(request)
        wire.check_size(f"{name} to {session.peer}", frames)
        self._last_call += 1
        call_id, pending = self._last_call, PendingCall()
        session.calls[call_id] = pending
        session.leaving |= isinstance(request, Stop)
        try:
            if not self._send(session.connection, Call(id=call_id, request=name, timeout_s=timeout_s), frames):
                self._roster.lose(session, "its connection is closed")
            await pending.answered.wait()
        finally:
            del session.calls[call_id]
            if not pending.answered.is_set():
                self._send(session.pulse or session.connection, Cancel(id=call_id))
        if pending.error is not None:
            raise pending.error
        return pending.frames

    def _send(self, connection: bytes, message: ToWorker, frames: Sequence[Frame] = ()) -> bool:
        """Hand a transmission to libzmq; False where the connection is gone."""
        future: Any = self._socket.send_multipart([connection, wire.envelope(message), *frames], copy=False)
        try:
            future.result()  # there is no high-water mark to wait for, so it is done already
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            return False
        return True

    # --- What workers say ------------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        taken = 0
        while True:
            frames = await self._socket.recv_multipart(copy=False)
            try:
                self._take(frames)
            except ProtocolError as error:
                self._report(error)
            taken += 1
            if taken % _BURST == 0:
                await anyio.lowlevel.checkpoint()

    def _take(self, frames: Sequence[zmq.Frame]) -> None:
        if len(frames) < 2:
            raise ProtocolError("a transmission without an envelope")
        sender = frames[0].bytes
        key = str(frames[1].get("User-Id")).encode() if self._keys is not None else None
        message = wire.read_from_worker(frames[1].bytes)
        match message:
            case Hello():
                self._send(sender, self._roster.on_hello(message, key, sender))
            case Beat():
                answer = self._roster.on_beat(message, key, sender)
                self._send(sender, answer)
                if isinstance(message, Progress) and isinstance(answer, Echo):
                    peer = PeerId(message.role, message.rank)
                    self._roster.session(peer).last_progress = message.text
                    self._on_progress(peer, message.text)
            case Reply() | Failure():
                self._take_answer(sender, message, frames[2:])

    def _take_answer(self, sender: bytes, answer: Reply | Failure, frames: Sequence[zmq.Frame]) -> None:
        session = self._roster.session_of(sender)
        if session is None:
            raise ProtocolError(f"a {type(answer).__name__} from a connection that is not let in")
        session.heard_at = time.monotonic()
        pending = session.calls.get(answer.id)
        if pending is None or pending.answered.is_set():
            return  # nobody waits any more: it was cancelled or ran past its deadline
        if isinstance(answer, Failure):
            pending.fail(RemoteError(session.peer.role, session.peer.rank, answer.cause, answer.traceback))
        else:
            pending.succeed(wire.contents(frames))

    def _report(self, error: ProtocolError) -> None:
        self.malformed += 1
        now = time.monotonic()
        if now - self._reported_at >= _REPORT_EVERY_S:
            self._reported_at = now
            logger.warning("%d malformed transmissions so far; the last one: %s", self.malformed, error)
