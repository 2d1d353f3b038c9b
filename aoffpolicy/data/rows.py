"""What a data row is: plain values under string keys, with a `prompt` and mostly an `answer`.

A row travels as msgpack to the processes that score completions, so that is also how it is kept in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

import msgspec
import numpy as np

Row = Mapping[str, Any]
"""`prompt`: text or a list of chat messages; `answer`: what rewards compare with; other columns as they came."""

RowCheck = Callable[[Row], str | None]
"""Says what is wrong with a row, None if nothing is."""


def pack_row(row: Row) -> bytes:
    """A row as msgpack; tuples become lists.

    Raises:
        ValueError: The row holds something that msgpack cannot carry, such as an integer beyond 64 bits.
    """
    try:
        return msgspec.msgpack.encode(row, enc_hook=_plain)
    except (TypeError, OverflowError, UnicodeEncodeError, RecursionError) as error:
        raise ValueError(f"a value cannot be sent to the reward: {error}") from error


def unpack_row(data: bytes) -> Row:
    """The row that `pack_row` packed."""
    row: dict[str, Any] = msgspec.msgpack.decode(data)
    return row


def row_fault(row: Row) -> str | None:
    """What makes a row unusable whatever the reward is: its prompt, or values that cannot travel."""
    if "prompt" not in row:
        return "prompt: the key is missing"
    if fault := prompt_fault(row["prompt"]):
        return f"prompt: {fault}"
    try:
        pack_row(row)
    except ValueError as error:
        return str(error)
    return None


def prompt_fault(prompt: Any) -> str | None:
    """Prompts are text or chat messages; an empty one is no fault here, but is left out later."""
    if isinstance(prompt, str):
        return None
    if not isinstance(prompt, list):
        return f"expected text or a list of chat messages, got {type(prompt).__name__}"
    for index, message in enumerate(prompt):
        if not isinstance(message, Mapping):
            return f"message {index}: expected an object with role and content, got {type(message).__name__}"
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                return f"message {index}: {key} must be text, got {type(message.get(key)).__name__}"
    return None


def _plain(value: Any) -> Any:
    """Numbers and arrays of other libraries as plain values."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Decimal):
        return str(value)
    raise TypeError(f"{type(value).__name__} is not a plain value")
