"""A worker's pulse: heartbeats from a thread of their own, over a connection of their own.

A blocked event loop, a long compilation or a large reply delays none of it, so silence really means that the process
is dead, stopped or cut off.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

import zmq

from aoffpolicy.errors import PeerLostError, ProtocolError
from aoffpolicy.transport import wire
from aoffpolicy.transport.wire import Beat, Cancel, Hello, Progress, Refused

logger = logging.getLogger(__name__)
MAX_PROGRESS_CHARACTERS = 4096


class Pulse:
    """Beats until stopped, passes progress lines on, and hears cancellations and the controller's echo.

    Args:
        hello: Who beats.
        interval_s: Seconds between beats.
        silence_s: Seconds without a word from the controller after which it is taken for dead.
        on_cancel: Called in the pulse's thread with the id of a cancelled call; must not block.
    """

    def __init__(self, hello: Hello, *, interval_s: float, silence_s: float, on_cancel: Callable[[int], None]) -> None:
        self._hello = hello
        self._interval_s = interval_s
        self._silence_s = silence_s
        self._on_cancel = on_cancel
        self._lines: deque[str] = deque(maxlen=100)
        self._stopping = False
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)

    def progress(self, text: str) -> None:
        """Send a line; from any thread. The newest 100 are kept while they cannot be sent."""
        self._lines.append(text[:MAX_PROGRESS_CHARACTERS])
        self._rouse()

    def stop(self) -> None:
        """Let `run` return soon; from any thread."""
        self._stopping = True
        self._rouse()

    def close(self) -> None:
        """Release what the constructor took; after `run` has returned."""
        self._wake.close()
        self._woken.close()

    def run(self, connection: zmq.Socket[bytes]) -> None:
        """Beat over this connected socket until stopped.

        Raises:
            PeerLostError: The controller was silent for too long.
            ProtocolError: The controller no longer lets this worker in.
        """
        threading.current_thread().name = f"pulse of {self._hello.peer}"
        poller = zmq.Poller()
        poller.register(connection, zmq.POLLIN)
        poller.register(self._woken, zmq.POLLIN)
        heard_at = due = time.monotonic()
        while not self._stopping:
            now = time.monotonic()
            if now >= due:
                self._send(connection, self._beat())
                due = now + self._interval_s
            poller.poll(max(0, math.ceil((due - now) * 1000)))
            late_s = time.monotonic() - due
            if late_s > self._interval_s:
                heard_at += late_s  # this process was suspended, and the controller could not be heard meanwhile
            self._send_lines(connection)
            if self._hear(connection):
                heard_at = time.monotonic()
            silent_s = time.monotonic() - heard_at
            if silent_s > self._silence_s:
                raise PeerLostError("controller", 0, f"{self._hello.peer} heard nothing from it for {silent_s:.1f} s")

    def _beat(self) -> Beat:
        hello = self._hello
        return Beat(role=hello.role, rank=hello.rank, incarnation=hello.incarnation, run_id=hello.run_id)

    def _send_lines(self, connection: zmq.Socket[bytes]) -> None:
        with contextlib.suppress(BlockingIOError):  # woken for another reason
            self._woken.recv(4096)
        hello = self._hello
        while self._lines:
            line = Progress(
                role=hello.role,
                rank=hello.rank,
                incarnation=hello.incarnation,
                run_id=hello.run_id,
                text=self._lines.popleft(),
            )
            self._send(connection, line)

    def _send(self, connection: zmq.Socket[bytes], message: Beat) -> None:
        # Unlimited queues are for calls; a beat that cannot leave now is worth nothing later.
        with contextlib.suppress(zmq.Again):
            connection.send(wire.envelope(message), zmq.NOBLOCK)

    def _hear(self, connection: zmq.Socket[bytes]) -> bool:
        """Take in everything that has arrived; whether there was anything."""
        heard = False
        while True:
            try:
                frames = connection.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return heard
            heard = True
            message = wire.read_from_controller(frames[0])
            if isinstance(message, Cancel):
                self._on_cancel(message.id)
            elif isinstance(message, Refused):
                raise ProtocolError(f"the controller does not let {self._hello.peer} in: {message.reason}")

    def _rouse(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # full: it is awake anyway; closed: nobody listens
            self._wake.send(b"\0")
