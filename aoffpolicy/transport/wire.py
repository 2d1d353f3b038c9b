"""What the two ends of the control plane say to each other around the messages: envelopes, sockets, limits.

Frames of one transmission: an envelope (msgpack of one of the structs below), then, for `Call` and `Reply`, the frames
of the message itself (`messages.encode`). A worker has two connections: one for requests and replies, and one for its
pulse (heartbeats, progress, cancellations), so that these never wait behind a large batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec
import zmq

from aoffpolicy.errors import ProtocolError
from aoffpolicy.transport.messages import PROTOCOL, Frame, Message

T = TypeVar("T")

MAX_FRAME_BYTES = 64 * 2**20
"""libzmq drops a connection that sends a larger frame."""
_VIEW_BYTES = 64 * 1024
"""Smaller frames are copied: libzmq keeps many of them in one buffer, and their arrays would be misaligned there."""


@dataclass(frozen=True, slots=True, order=True)
class PeerId:
    """Which worker: its role ("trainer", "rollout", "reward") and its rank within the role."""

    role: str
    rank: int

    def __str__(self) -> str:
        return f"{self.role} {self.rank}"


class Hello(Message):
    """The first thing a worker says; answered by `Welcome` or `Refused`."""

    role: str
    rank: int
    incarnation: int
    """0 for the first process of this role and rank, then 1, 2, ... for its replacements."""
    host: str
    pid: int
    versions: dict[str, str]
    """Of aoffpolicy, torch and python."""
    run_id: str
    protocol: int = PROTOCOL

    @property
    def peer(self) -> PeerId:
        return PeerId(self.role, self.rank)


# --- Worker to controller ------------------------------------------------------------------------------------------


class Beat(Message):
    """The worker's process lives."""

    role: str
    rank: int
    incarnation: int
    run_id: str


class Progress(Beat):
    """What the worker is doing, in a line."""

    text: str


class Reply(Message):
    """The call is done; the frames of its reply follow."""

    id: int


class Failure(Message):
    """The call failed."""

    id: int
    cause: str
    traceback: str


# --- Controller to worker ------------------------------------------------------------------------------------------


class Welcome(Message):
    """The worker is let in."""


class Refused(Message):
    """The worker is not let in, or no longer; it should end."""

    kind: Literal["protocol", "run", "peer", "key", "incarnation", "versions", "lost"]
    reason: str


class Call(Message):
    """A request; its frames follow. Ids only ever grow."""

    id: int
    request: str
    """Tag of the request in `messages.REQUESTS`."""
    timeout_s: float
    """The controller waits no longer than this."""


class Cancel(Message):
    """Nobody waits for this call any more. May overtake the call itself, since it goes to the pulse."""

    id: int


class Echo(Message):
    """Answers every beat: the controller lives."""


ToController = Hello | Beat | Progress | Reply | Failure
ToWorker = Welcome | Refused | Call | Cancel | Echo

_encoder = msgspec.msgpack.Encoder()
_to_controller: msgspec.msgpack.Decoder[ToController] = msgspec.msgpack.Decoder(ToController)
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)


def envelope(message: ToController | ToWorker) -> bytes:
    return _encoder.encode(message)


def read_from_worker(frame: Frame) -> ToController:
    """What a worker said.

    Raises:
        ProtocolError: The frame is no envelope for the controller.
    """
    return _read(_to_controller, frame)


def read_from_controller(frame: Frame) -> ToWorker:
    """What the controller said.

    Raises:
        ProtocolError: The frame is no envelope for a worker.
    """
    return _read(_to_worker, frame)


def _read(decoder: msgspec.msgpack.Decoder[T], frame: Frame) -> T:
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not an envelope: {error}") from error


def contents(frames: Sequence[zmq.Frame]) -> list[Frame]:
    """The bytes of received frames: large ones as read-only views without a copy."""
    return [frame.buffer.toreadonly() if len(frame) >= _VIEW_BYTES else frame.bytes for frame in frames]


def check_size(what: str, frames: Sequence[Frame]) -> None:
    """Refuse to send what the other side would drop the connection for.

    Raises:
        ProtocolError: A frame is over `MAX_FRAME_BYTES`.
    """
    largest = max(map(len, frames))
    if largest > MAX_FRAME_BYTES:
        raise ProtocolError(
            f"{what} has a frame of {largest} bytes and the limit is {MAX_FRAME_BYTES}; send less at once, "
            "for instance with fewer or shorter samples"
        )


def configure(socket: zmq.Socket[Any]) -> None:
    """Options that all sockets of the control plane share."""
    socket.ipv6 = True
    socket.linger = 0
    socket.maxmsgsize = MAX_FRAME_BYTES
    # No high-water marks: a send is done at once and one stuck peer never holds up the others. What is queued is
    # bounded by the calls in flight.
    socket.sndhwm = 0
    socket.rcvhwm = 0
