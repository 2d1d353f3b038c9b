"""Reading the status stream."""

from __future__ import annotations

import math
import secrets
import time
from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import Self

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from aoffpolicy.errors import DeadlineError, PeerLostError, ProtocolError
from aoffpolicy.transport.address import Address, resolve
from aoffpolicy.transport.event_order import EventOrder
from aoffpolicy.transport.event_schema import LIVE, REPLAY, AnyEvent, decode_event
from aoffpolicy.transport.security import KeyPair, secure_client

_HELD = 1000
"""Live events that wait for the last values; with more, the end of those must have been dropped on the way."""
_TURNED_AWAY = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


class StatusSubscriber:
    """Reads a run's events: first the last value of each (`replay` true), then what happens.

    `async for event in subscriber`, or `for event in subscriber.blocking()` without an event loop. Close it, or use it
    in `with`.

    Args:
        address: Where the publisher listens.
        key: The read-only CURVE key pair; None without CURVE.
        server_key: The publisher's public key; None without CURVE.
        timeout_s: Longest silence before an iteration gives up; None waits for ever.
        reconnect_s: How long a lost connection may take to come back; what was missed meanwhile comes as last values.
    """

    def __init__(
        self,
        address: Address,
        *,
        key: KeyPair | None = None,
        server_key: bytes | None = None,
        timeout_s: float | None = None,
        reconnect_s: float = 0.0,
    ) -> None:
        if (key is None) != (server_key is None):
            raise ValueError("CURVE needs both the reader's keys and the publisher's public key")
        self._address = address
        self._timeout_s = timeout_s
        self._reconnect_s = reconnect_s
        self._order = EventOrder()
        self._connected = False
        self._lost_at: float | None = None
        """When the connection was lost, on the monotonic clock."""
        self._caught_up = False
        """Whether all last values of this connection have come."""
        self._held: deque[AnyEvent] = deque()
        """Live events that came before them."""
        hosts = resolve(address.host)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.ipv6 = True
        self._socket.linger = 0
        if key is not None and server_key is not None:
            secure_client(self._socket, key, server_key)
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _TURNED_AWAY
        )
        self._socket.subscribe(LIVE)
        self._socket.subscribe(REPLAY + secrets.token_hex(16).encode())
        for host in hosts:  # a name may stand for an IPv6 and an IPv4 address, and the publisher listens on one
            self._socket.connect(Address(host, address.port).url)

    @property
    def missed(self) -> int:
        """Events that never came, neither live nor as last values: this reader was too slow, or was cut off."""
        return self._order.missed

    def snapshot(self, timeout_s: float) -> list[AnyEvent]:
        """The last value of everything; blocks until the publisher has answered.

        Raises:
            DeadlineError: Nothing answered in time.
            PeerLostError: The publisher went away.
            ProtocolError: The publisher does not accept the key, or speaks another schema.
        """
        deadline = time.monotonic() + timeout_s
        events: list[AnyEvent] = []
        while not self._caught_up:
            event = self._take()
            if event is not None:
                events.append(event)
            elif not self._caught_up and not self._poll(deadline - time.monotonic()) and time.monotonic() >= deadline:
                raise self._silence(timeout_s)
        events.extend(self._held)
        self._held.clear()
        return events

    def take(self, timeout_s: float) -> AnyEvent | None:
        """The next event, or None if there is none in time: for who has something else to do meanwhile.

        Raises:
            PeerLostError: The publisher went away.
            ProtocolError: The publisher does not accept the key, or speaks another schema.
        """
        event = self._take()
        if event is None and self._poll(timeout_s):
            event = self._take()
        return event

    def blocking(self) -> Iterator[AnyEvent]:
        """Iterate without an event loop; raises what `snapshot` raises."""
        while True:
            event = self._take()
            if event is not None:
                yield event
            elif not self._poll(self._timeout_s) and self._lost_at is None:
                raise self._silence(self._timeout_s or 0.0)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> AnyEvent:
        """The next event; raises what `snapshot` raises."""
        while True:
            event = self._take()
            if event is not None:
                return event
            poller = zmq.asyncio.Poller()
            poller.register(self._socket, zmq.POLLIN)
            poller.register(self._monitor, zmq.POLLIN)
            if not await poller.poll(self._patience_ms(self._timeout_s)) and self._lost_at is None:
                raise self._silence(self._timeout_s or 0.0)

    def close(self) -> None:
        """Disconnect; no harm in a second call."""
        if not self._context.closed:
            self._socket.disable_monitor()
            self._monitor.close()
            self._socket.close()
            self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- Frames to events ------------------------------------------------------------------------------------------

    def _poll(self, timeout_s: float | None) -> bool:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        return bool(poller.poll(self._patience_ms(timeout_s)))

    def _patience_ms(self, timeout_s: float | None) -> int:
        """How long to wait for news, -1 for ever; never past the moment at which a lost connection is given up."""
        waits = [] if timeout_s is None else [timeout_s]
        if self._lost_at is not None:
            waits.append(self._lost_at + self._reconnect_s - time.monotonic())
        return max(0, math.ceil(min(waits) * 1000)) if waits else -1

    def _take(self) -> AnyEvent | None:
        """The next event that has arrived, or None; what came before a lost connection is still delivered."""
        while True:
            if self._held and (self._caught_up or self._is_over() or len(self._held) > _HELD):
                self._caught_up = True
                return self._held.popleft()
            try:
                topic, data = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                if self._is_over():
                    raise PeerLostError("publisher", 0, f"the status stream at {self._address} has ended") from None
                if not self._check_connection():
                    return None
                continue  # the last events may have come just before
            except ValueError:
                raise ProtocolError(f"what listens at {self._address} does not publish a run's status") from None
            if topic.startswith(REPLAY) and not data:
                self._caught_up = True
                continue
            event = decode_event(data)
            if self._order.is_new(event):
                if event.replay or self._caught_up:
                    return event
                self._held.append(event)

    def _is_over(self) -> bool:
        return self._lost_at is not None and time.monotonic() - self._lost_at >= self._reconnect_s

    def _check_connection(self) -> bool:
        """Hear what became of the connection; whether it was lost or has come back just now."""
        changed = False
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event & _TURNED_AWAY:
                raise ProtocolError(
                    f"the publisher at {self._address} does not accept this reader: the key must be that "
                    "run's status.key"
                )
            if event & zmq.EVENT_HANDSHAKE_SUCCEEDED:
                if self._lost_at is not None:
                    self._order.resume()
                    self._lost_at = None
                    self._caught_up = False
                    changed = True
                self._connected = True
            elif self._connected and self._lost_at is None:
                self._lost_at = time.monotonic()
                changed = True
        return changed

    def _silence(self, timeout_s: float) -> DeadlineError:
        if self._connected:
            return DeadlineError("publisher", 0, f"no event from {self._address} for {timeout_s:.1f} s")
        return DeadlineError(
            "publisher", 0, f"nothing answered at {self._address} within {timeout_s:.1f} s; is the run still going?"
        )
