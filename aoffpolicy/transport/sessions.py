"""What the controller knows about one incarnation of a worker, and the calls it has in flight there."""

from __future__ import annotations

from dataclasses import dataclass, field

import anyio

from aoffpolicy.errors import AoffpolicyError, PeerLostError
from aoffpolicy.transport.messages import Frame, Message
from aoffpolicy.transport.wire import Hello, PeerId


@dataclass(slots=True, eq=False)
class PendingCall:
    """A call that waits for its reply; `answered` is set together with `frames` or `error`."""

    answered: anyio.Event = field(default_factory=anyio.Event)
    frames: list[Frame] = field(default_factory=list)
    error: AoffpolicyError | None = None

    def succeed(self, frames: list[Frame]) -> None:
        self.frames = frames
        self.answered.set()

    def fail(self, error: AoffpolicyError) -> None:
        self.error = error
        self.answered.set()


class Session:
    """One incarnation of one worker, from when it may come until it is replaced. Once lost, it stays lost."""

    def __init__(self, peer: PeerId, public_key: bytes, incarnation: int, max_in_flight: int) -> None:
        self.peer = peer
        self.public_key = public_key
        self.incarnation = incarnation
        self.hello: Hello | None = None
        """Set once the worker was let in."""
        self.connection = b""
        """Routing id of the connection that carries its calls."""
        self.pulse = b""
        """Routing id of the connection that carries its pulse; empty until the first beat."""
        self.heard_at = 0.0
        self.last_progress = ""
        self.leaving = False
        """It was told to stop, so its silence is no loss."""
        self.lost = ""
        """Why it is lost; empty while it is not."""
        self.calls: dict[int, PendingCall] = {}
        self._max_in_flight = max_in_flight
        self._slots: dict[type[Message], anyio.Semaphore] = {}

    @property
    def alive(self) -> bool:
        return self.hello is not None and not self.lost

    def slot(self, kind: type[Message]) -> anyio.Semaphore:
        """Bounds the calls of one type in flight; a type of its own, so that no control call waits behind bulk."""
        return self._slots.setdefault(kind, anyio.Semaphore(self._max_in_flight))

    def error(self) -> PeerLostError:
        return PeerLostError(self.peer.role, self.peer.rank, self.lost or "it is not connected; wait_for it first")

    def end(self, cause: str) -> None:
        """Mark it lost for this cause and fail what waits for it."""
        self.lost = cause
        for call in self.calls.values():
            if not call.answered.is_set():
                call.fail(self.error())
