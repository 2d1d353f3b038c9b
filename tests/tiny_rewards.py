"""Rewards that a random tiny model can earn, so that small runs have something to learn."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any


def digit_fraction(completion: str, row: Mapping[str, Any]) -> float:
    """Share of digits among the characters of the completion."""
    return sum(character.isdigit() for character in completion) / max(1, len(completion))


def slow_digit_fraction(completion: str, row: Mapping[str, Any]) -> float:
    """The same, at a pace that lets a test interfere in the middle of a run."""
    time.sleep(0.02)
    return digit_fraction(completion, row)


def always_raises(completion: str, row: Mapping[str, Any]) -> float:
    raise RuntimeError("no reward today")
