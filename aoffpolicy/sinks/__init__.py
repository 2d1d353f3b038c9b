"""Where metrics go besides metrics.jsonl: one file for each service, chosen by `metrics.sinks`, none of them needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from aoffpolicy.config import Config
from aoffpolicy.outlet import Outlet
from aoffpolicy.registry import load

Row = Mapping[str, float | int | bool | str | None]
"""A line of metrics.jsonl."""


class Sink(Protocol):
    """Built before the run starts; whatever needs the network waits for the first `write`, which has its own thread.

    Raises:
        ConfigError: From the constructor: the config asks for something that cannot be had, such as a port in use.
    """

    def __init__(self, config: Config, folder: Path) -> None: ...

    @property
    def place(self) -> str:
        """Where a person finds the metrics, in a few words."""
        ...

    def write(self, step: int, row: Row) -> None:
        """A step was recorded; may block, and may raise: the run goes on, and the next step is tried again."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class OpenSink:
    """A sink and the thread that it lives in."""

    name: str
    place: str
    outlet: Outlet[tuple[int, Row]]


def open_sinks(config: Config, folder: Path) -> list[OpenSink]:
    """The sinks that the config names; blocks.

    Raises:
        ConfigError: One cannot be had; those opened before it are closed.
    """
    opened: list[OpenSink] = []
    try:
        for name in config.metrics.sinks:
            sink: Sink = load("metrics.sinks", name)(config, folder)
            opened.append(OpenSink(name, sink.place, Outlet(name, partial(_write, sink), sink.close)))
    except BaseException:
        for each in opened:
            each.outlet.close(1.0)
        raise
    return opened


def _write(sink: Sink, news: tuple[int, Row]) -> None:
    sink.write(*news)


def numbers(row: Row) -> dict[str, float]:
    """What can be drawn over the steps: numbers, and truth as 0 or 1."""
    return {key: float(value) for key, value in row.items() if key != "step" and isinstance(value, int | float)}


def plain(config: Config) -> dict[str, Any]:
    """The config as services keep it."""
    return config.model_dump(mode="json", exclude_none=True)
