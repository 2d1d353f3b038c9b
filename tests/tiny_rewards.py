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


def digit_fraction_of_small_sums(completion: str, row: Mapping[str, Any]) -> float:
    """The same, and 0 for every completion of half of the prompts: groups without variance."""
    return digit_fraction(completion, row) if int(row["answer"]) < 7 else 0.0


def always_raises(completion: str, row: Mapping[str, Any]) -> float:
    raise RuntimeError("no reward today")
