"""Text from models and data on its way to a person's screen."""

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
