"""The worker's end of the control plane: says hello, serves requests, keeps a pulse."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import zmq
import zmq.asyncio
from anyio.abc import TaskGroup
from zmq.utils.monitor import recv_monitor_message

from aoffpolicy.errors import PeerLostError, ProtocolError
from aoffpolicy.transport import messages, wire
from aoffpolicy.transport.address import Address, resolve
from aoffpolicy.transport.messages import REPLIES, REQUESTS, Done, Frame, Message, Stop
from aoffpolicy.transport.pulse import Pulse
from aoffpolicy.transport.security import KeyPair, secure_client
from aoffpolicy.transport.tasks import background_tasks
from aoffpolicy.transport.wire import Call, Cancel, Failure, Hello, Refused, Reply, Welcome

logger = logging.getLogger(__name__)
Handlers = Mapping[type[Message], Callable[[Any], Awaitable[Message]]]

_BURST = 64
"""Frames taken in before other tasks get their turn."""
_MAX_TRACEBACK_CHARACTERS = 65536
_FLUSH_MS = 2000
"""How long the reply to `Stop` may take to leave."""
_BROKEN = zmq.EVENT_DISCONNECTED
_TURNED_AWAY = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


class ControlClient:
    """Connects one worker to the controller.

    Args:
        address: Where the controller listens.
        hello: Who this worker is.
        keys: CURVE key pair of this worker; None on an unencrypted loopback.
        server_key: The controller's public key; None without CURVE.
        heartbeat_timeout_s: Silence after which the controller gives this worker up. A heartbeat is sent five times
            in that time, and the controller itself is given up after three times as long.
    """

    def __init__(
        self,
        address: Address,
        hello: Hello,
        *,
        keys: KeyPair | None,
        server_key: bytes | None,
        heartbeat_timeout_s: float = 10.0,
    ) -> None:
        if (keys is None) != (server_key is None):
            raise ValueError("CURVE needs both the worker's keys and the controller's public key")
        self._address = address
        self._hello = hello
        self._keys = keys
        self._server_key = server_key
        self._patience_s = 3 * heartbeat_timeout_s
        self._pulse = Pulse(
            hello, interval_s=heartbeat_timeout_s / 5, silence_s=self._patience_s, on_cancel=self._cancel_soon
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._welcomed = False
        self._newest_call = 0
        self._running: dict[int, anyio.CancelScope] = {}
        self._cancelled_early: set[int] = set()
        """Calls whose cancellation came before they did."""

    def progress(self, text: str) -> None:
        """Tell the controller in a line what this worker is doing; from any thread."""
        self._pulse.progress(text)

    async def serve(self, handlers: Handlers) -> None:
        """Say hello, then run each request in a task of its own until `Stop` is answered. To be called once.

        A handler's result becomes the reply and its exception a typed error with the traceback as text. It is
        cancelled when nobody waits for it any more. `Stop` without a handler is answered with `Done`.

        Args:
            handlers: For each request type, what answers it.

        Raises:
            ProtocolError: The controller does not let this worker in; the message says why.
            PeerLostError: The controller is gone.
        """
        self._loop = asyncio.get_running_loop()
        context = zmq.asyncio.Context()
        url = Address((await anyio.to_thread.run_sync(resolve, self._address.host))[0], self._address.port).url
        calls = self._open(context)
        monitor = calls.get_monitor_socket(_BROKEN | _TURNED_AWAY)
        try:
            async with background_tasks() as tasks:
                tasks.start_soon(self._watch_connection, monitor)
                calls.connect(url)
                await self._greet(calls)
                beating = anyio.Event()
                tasks.start_soon(self._run_pulse, context, url, beating)
                try:
                    await beating.wait()  # before the first call is taken, whose handler might block the event loop
                    await self._serve_calls(calls, tasks, handlers)
                finally:
                    self._pulse.stop()
        finally:
            with anyio.CancelScope(shield=True):
                self._pulse.close()
                calls.disable_monitor()
                monitor.close()
                calls.close(linger=_FLUSH_MS if self._welcomed else 0)
                await anyio.to_thread.run_sync(context.term)

    def _open(self, context: zmq.Context[Any]) -> Any:
        socket = context.socket(zmq.DEALER)
        wire.configure(socket)
        if self._keys is not None and self._server_key is not None:
            secure_client(socket, self._keys, self._server_key)
        return socket

    async def _greet(self, calls: zmq.asyncio.Socket) -> None:
        with anyio.move_on_after(self._patience_s):
            await calls.send(wire.envelope(self._hello))
            answer = wire.read_from_controller(await calls.recv())
            if isinstance(answer, Refused):
                raise ProtocolError(f"the controller does not let {self._hello.peer} in: {answer.reason}")
            if not isinstance(answer, Welcome):
                raise ProtocolError(f"the controller answered hello with {type(answer).__name__}")
            self._welcomed = True
            return
        raise PeerLostError(
            "controller",
            0,
            f"{self._hello.peer} waited {self._patience_s:.1f} s for a welcome from {self._address}; is it running, "
            "and can this machine reach that address?",
        )

    async def _watch_connection(self, monitor: zmq.asyncio.Socket) -> None:
        """End serving when the connection breaks: calls may have been lost with it, so it is not taken up again."""
        while True:
            event = (await recv_monitor_message(monitor))["event"]
            if event & _TURNED_AWAY:
                raise ProtocolError(f"the controller at {self._address} does not accept the key of {self._hello.peer}")
            if event & _BROKEN and self._welcomed:
                raise PeerLostError("controller", 0, f"the connection of {self._hello.peer} to {self._address} broke")

    async def _run_pulse(self, context: zmq.asyncio.Context, url: str, beating: anyio.Event) -> None:
        loop = asyncio.get_running_loop()

        def run(connection: zmq.Socket[bytes]) -> None:
            loop.call_soon_threadsafe(beating.set)
            self._pulse.run(connection)

        with self._open(zmq.Context.shadow(context)) as connection:
            connection.sndhwm = 100
            connection.connect(url)
            await anyio.to_thread.run_sync(run, connection, limiter=anyio.CapacityLimiter(1))

    async def _serve_calls(self, calls: zmq.asyncio.Socket, tasks: TaskGroup, handlers: Handlers) -> None:
        stopped = anyio.Event()
        tasks.start_soon(self._take_calls, calls, tasks, handlers, stopped)
        await stopped.wait()

    async def _take_calls(
        self, calls: zmq.asyncio.Socket, tasks: TaskGroup, handlers: Handlers, stopped: anyio.Event
    ) -> None:
        taken = 0
        while True:
            frames = wire.contents(await calls.recv_multipart(copy=False))
            message = wire.read_from_controller(frames[0])
            if isinstance(message, Call):
                self._newest_call = message.id
                if message.id in self._cancelled_early:
                    self._cancelled_early.remove(message.id)
                else:
                    scope = self._running[message.id] = anyio.CancelScope()
                    tasks.start_soon(self._handle, calls, message, frames[1:], handlers, scope, stopped)
            elif isinstance(message, Cancel):
                self._cancel(message.id)
            elif isinstance(message, Refused):
                raise ProtocolError(f"the controller no longer lets {self._hello.peer} in: {message.reason}")
            taken += 1
            if taken % _BURST == 0:
                await anyio.lowlevel.checkpoint()

    async def _handle(
        self,
        calls: zmq.asyncio.Socket,
        call: Call,
        frames: list[Frame],
        handlers: Handlers,
        scope: anyio.CancelScope,
        stopped: anyio.Event,
    ) -> None:
        try:
            with scope:
                scope.deadline = min(scope.deadline, anyio.current_time() + call.timeout_s)
                reply = await self._answer(call, frames, handlers)
        finally:
            del self._running[call.id]
        if scope.cancelled_caught:
            return
        await calls.send_multipart(reply, copy=False)
        if call.request == Stop.__name__:
            stopped.set()

    async def _answer(self, call: Call, frames: list[Frame], handlers: Handlers) -> list[Frame]:
        """The frames that answer a call, whatever happens."""
        try:
            kind = REQUESTS.get(call.request)
            handler = handlers.get(kind, _done if kind is Stop else None) if kind is not None else None
            if kind is None or handler is None:
                raise ProtocolError(f"{self._hello.peer} does not handle {call.request!r}")
            reply = await handler(messages.decode(frames, kind))
            if type(reply) is not REPLIES[kind]:
                raise ProtocolError(f"the handler of {call.request} returned a {type(reply).__name__}")
            encoded = messages.encode(reply)
            wire.check_size(f"the reply to {call.request} of {self._hello.peer}", encoded)
        except Exception as error:
            first = _first_error(error)
            text = "".join(traceback.format_exception(error))[-_MAX_TRACEBACK_CHARACTERS:]
            failure = Failure(id=call.id, cause=f"{type(first).__name__}: {first}", traceback=text)
            return [wire.envelope(failure)]
        return [wire.envelope(Reply(id=call.id)), *encoded]

    def _cancel_soon(self, call_id: int) -> None:
        """Cancel a call from the pulse's thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._cancel, call_id)

    def _cancel(self, call_id: int) -> None:
        if call_id > self._newest_call:
            self._cancelled_early.add(call_id)
        elif (scope := self._running.get(call_id)) is not None:
            scope.cancel()


async def _done(_: Message) -> Done:
    return Done()


def _first_error(error: BaseException) -> BaseException:
    """The first cause inside nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
