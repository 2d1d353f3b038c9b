"""What a reward worker and its scoring processes say to each other over pipes: length-prefixed msgpack, no pickle."""

from __future__ import annotations

import struct
from typing import BinaryIO, TypeVar

import msgspec

LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 2**30
ERROR_CHARACTERS = 500
"""Longer error texts are cut: they are counted and logged, not archived."""


class Load(msgspec.Struct, frozen=True):
    """First frame to a scoring process."""

    function: str
    timeout_s: float
    """For one completion; a scoring process enforces it for async functions only, its parent for all."""


class Loaded(msgspec.Struct, frozen=True):
    """First frame from it."""

    error: str
    """Why the function cannot be used; empty if it can."""
    concurrent: bool
    """The function is async: completions of one task are scored at the same time."""


class Task(msgspec.Struct, frozen=True):
    row: msgspec.Raw
    """msgpack of the row."""
    completions: list[tuple[int, str]]
    """Number and text."""
    concurrent: bool
    """Score them at the same time, where the function is async; otherwise one after the other."""


class Result(msgspec.Struct, frozen=True):
    """One frame for each completion, as soon as it is scored."""

    number: int
    reward: float | None
    error: str
    """Why there is no reward."""


T = TypeVar("T")


def frame(message: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


def write(stream: BinaryIO, message: msgspec.Struct) -> None:
    stream.write(frame(message))
    stream.flush()


def read(stream: BinaryIO, kind: type[T]) -> T | None:
    """The next message; None at the end of the stream."""
    header = stream.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return None
    body = stream.read(LENGTH.unpack(header)[0])
    return msgspec.msgpack.decode(body, type=kind)
