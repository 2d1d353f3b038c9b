"""A metrics sink whose service is never there."""

from __future__ import annotations

from pathlib import Path

from aoffpolicy.config import Config
from aoffpolicy.sinks import Row


class BrokenSink:
    def __init__(self, config: Config, folder: Path) -> None: ...

    @property
    def place(self) -> str:
        return "nowhere"

    def write(self, step: int, row: Row) -> None:
        raise ConnectionError(f"no route to host, step {step}")

    def close(self) -> None:
        raise ConnectionError("no route to host either")
