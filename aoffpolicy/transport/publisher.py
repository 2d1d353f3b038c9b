"""The status stream's sender: what the run tells whoever watches, without ever waiting for them."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Never, Self

import anyio
import anyio.to_thread
import msgspec
import zmq
import zmq.asyncio

from aoffpolicy.errors import ConfigError
from aoffpolicy.transport.address import Address, resolve
from aoffpolicy.transport.event_schema import LIVE, REPLAY, AnyEvent, encode_event, kind_of, last_value_key
from aoffpolicy.transport.security import Authenticator, KeyPair, secure_server
from aoffpolicy.transport.tasks import background_tasks

_HIGH_WATER = 10_000
"""Events queued for one slow subscriber; later ones are dropped for it."""
_FLUSH_MS = 500
"""How long the last events may take to leave when the publisher closes."""
_MAX_RECEIVED_BYTES = 4096
"""Subscriptions and handshakes are shorter."""


class StatusPublisher:
    """Publishes the run's events; `async with` opens and closes it.

    Args:
        address: `host` or `host:port` to bind: IPv4, IPv6 or name. Without a port the kernel chooses one.
        keys: CURVE key pair of the publisher; None only on loopback.
        reader_public: The one public key that readers come with; None without CURVE.
        run_id: Stamped on every event.
    """

    def __init__(self, address: str, *, keys: KeyPair | None, reader_public: bytes | None, run_id: str) -> None:
        if (keys is None) != (reader_public is None):
            raise ValueError("CURVE needs both the publisher's keys and the readers' public key")
        self._wanted = Address.parse(address, default_port=0)
        self._keys = keys
        self._reader_public = reader_public
        self._run_id = run_id
        self._socket: zmq.asyncio.Socket
        self._address: Address | None = None
        self._seq = 0
        self._last: dict[tuple[str | int, ...], AnyEvent] = {}
        """The newest event of each `last_value_key`, the oldest first."""
        self._exit = AsyncExitStack()

    @property
    def address(self) -> Address:
        """Where subscribers connect; numeric, with the port that was chosen."""
        if self._address is None:
            raise RuntimeError("the publisher is not open; use it in `async with`")
        return self._address

    async def __aenter__(self) -> Self:
        """Bind and start.

        Raises:
            ConfigError: The address cannot be bound, or it is not loopback and there are no keys.
        """
        host = (await anyio.to_thread.run_sync(resolve, self._wanted.host))[0]
        if self._keys is None and not Address(host, 0).is_loopback:
            raise ConfigError([f"status.address: {host} is not loopback, so CURVE is needed (control.curve = true)"])
        async with AsyncExitStack() as stack:
            context = zmq.asyncio.Context()
            stack.push_async_callback(_terminate, context)
            authenticator = None
            if self._reader_public is not None:
                authenticator = Authenticator(context)
                authenticator.admitted = {self._reader_public}
                stack.callback(authenticator.close)
            self._socket = context.socket(zmq.XPUB)
            stack.callback(self._socket.close, linger=_FLUSH_MS)
            self._address = self._bind(host)
            tasks = await stack.enter_async_context(background_tasks())
            if authenticator is not None:
                tasks.start_soon(authenticator.run)
            tasks.start_soon(self._welcome_newcomers)
            self._exit = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._exit.__aexit__(kind, error, trace)

    def publish(self, event: AnyEvent) -> None:
        """Send an event to whoever watches, from the event loop's thread; never blocks.

        A subscriber that reads too slowly misses events; nobody else notices.
        """
        self._seq += 1
        event = msgspec.structs.replace(event, seq=self._seq, time=time.time(), run_id=self._run_id)
        key = last_value_key(event)
        self._last.pop(key, None)  # so that the newest comes last
        self._last[key] = event
        self._send(LIVE + kind_of(event).encode(), encode_event(event))

    def _bind(self, host: str) -> Address:
        self._socket.ipv6 = True
        self._socket.sndhwm = _HIGH_WATER
        self._socket.maxmsgsize = _MAX_RECEIVED_BYTES
        if self._keys is not None:
            secure_server(self._socket, self._keys)
        try:
            self._socket.bind(Address(host, self._wanted.port).url)
        except zmq.ZMQError as error:
            raise ConfigError([f"status.address: cannot bind {self._wanted}: {error}"]) from error
        return Address(host, Address.parse(self._socket.getsockopt_string(zmq.LAST_ENDPOINT)).port)

    async def _welcome_newcomers(self) -> Never:
        """Send the last values to everyone who subscribes to a replay topic of its own."""
        while True:
            subscription = await self._socket.recv()
            topic = subscription[1:]
            if not (subscription.startswith(b"\x01") and topic.startswith(REPLAY)):
                continue
            for event in self._last.values():
                self._send(topic, encode_event(msgspec.structs.replace(event, replay=True)))
            self._send(topic, b"")

    def _send(self, topic: bytes, data: bytes) -> None:
        future: Any = self._socket.send_multipart([topic, data])
        future.result()  # done at once: an XPUB socket drops instead of waiting


async def _terminate(context: zmq.asyncio.Context) -> None:
    """Give the last events their time to leave, without stalling the event loop."""
    with anyio.CancelScope(shield=True):
        await anyio.to_thread.run_sync(context.term)
