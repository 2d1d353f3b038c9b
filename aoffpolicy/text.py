"""Texts and figures on their way to a person's screen."""

from __future__ import annotations

import unicodedata


def printable(text: str) -> str:
    """The same with control characters made visible: no completion can steer a terminal. Newline and tab stay."""
    return "".join(map(_visible, text))


def _visible(character: str) -> str:
    if character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cf", "Cs"):
        return character
    code = ord(character)
    return chr(0x2400 + code) if code < 0x20 else f"\\u{code:04x}"


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.1f} days"


def size(count: int) -> str:
    """Bytes as people say them; nothing for 0."""
    if not count:
        return ""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
