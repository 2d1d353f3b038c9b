"""What vLLM's own processes said, from the log that they share with this process."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

MAX_LINES = 12
MARKS = ("Error", "ERROR", "Exception", "error:")


def position() -> int:
    """Where the log of this process ends now; 0 where standard error is no file."""
    status = os.fstat(sys.__stderr__.fileno()) if sys.__stderr__ is not None else None
    return status.st_size if status is not None and stat.S_ISREG(status.st_mode) else 0


def errors_since(start: int) -> str:
    """The last lines since then that tell of an error; empty where standard error is no file."""
    if not position():
        return ""
    with Path(f"/proc/self/fd/{sys.__stderr__.fileno()}").open("rb") as log:  # type: ignore[union-attr]
        log.seek(start)
        lines = log.read().decode(errors="replace").splitlines()
    return "\n".join([line for line in lines if any(mark in line for mark in MARKS)][-MAX_LINES:])
