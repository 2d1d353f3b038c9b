"""What a run left in its folder, read back; also while it is still going on."""

from __future__ import annotations

import fcntl
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aoffpolicy.errors import DataError
from aoffpolicy.records import StepTimes, verdict
from aoffpolicy.samples.index import SampleIndex
from aoffpolicy.samples.log import GroupRecord, files_of
from aoffpolicy.timeline import Span, read_timeline

Row = Mapping[str, Any]
"""A line of metrics.jsonl."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Who failed, and how."""

    role: str
    rank: int
    cause: str


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """Read once; nothing here changes while the run goes on."""

    name: str
    rows: Sequence[Row]
    """In the order of steps."""
    spans: Sequence[Span]
    """Empty before the launcher has written the first timeline.json."""
    state: str
    """"finished", "interrupted", "failed", or "not finished": killed or still going on."""
    failure: Failure | None
    """Why it failed, if it did."""
    slowest: Sequence[GroupRecord]
    """Trained groups that took the longest to generate, the slowest first; empty where no samples are kept."""
    config: str
    """The resolved config as TOML."""
    changed: float
    """Unix time of the newest row."""

    @property
    def verdict(self) -> str:
        return verdict([StepTimes.of_row(row) for row in self.rows])

    def values(self, key: str) -> list[float | None]:
        """A metric of every step; None where the step has none."""
        return [number(row.get(key)) for row in self.rows]


def number(value: object) -> float | None:
    """A metric as a finite number; None for what is none."""
    known = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if known else None  # type: ignore[arg-type]


def read_run(folder: Path, slowest: int = 0) -> RecordedRun:
    """Read a run's folder; blocks.

    Args:
        folder: The run's folder.
        slowest: Groups to look for in the samples.

    Raises:
        DataError: It is no run folder, or a file in it is damaged; names file and row.
    """
    metrics = folder / "metrics.jsonl"
    if not metrics.is_file():
        raise DataError(f"{folder}: no metrics.jsonl here; it is no run folder, or no step has been recorded yet")
    state, failure = _summary(folder / "summary.json")
    timeline, config = folder / "timeline.json", folder / "config.toml"
    return RecordedRun(
        name=folder.resolve().name,
        rows=read_metrics(metrics),
        spans=read_timeline(timeline) if timeline.is_file() else (),
        state=state,
        failure=failure,
        slowest=_slowest(folder, slowest) if slowest else (),
        config=config.read_text() if config.is_file() else "",
        changed=metrics.stat().st_mtime,
    )


def read_metrics(path: Path) -> list[Row]:
    """The rows of metrics.jsonl; a last line that is still being written is left out.

    Raises:
        DataError: A line is no JSON object with a step; names file and row.
    """
    rows: list[Row] = []
    for index, line in enumerate(path.read_text().splitlines(keepends=True), 1):
        if not line.endswith("\n"):
            break
        try:
            row = json.loads(line)
            int(row["step"])
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}, row {index}: not a step's metrics: {error!r}") from error
        rows.append(row)
    return rows


def is_held(folder: Path) -> bool:
    """Whether a launcher that lives, on this machine, holds the run's folder."""
    lock = folder / "lock"
    if not lock.is_file():
        return False
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _summary(path: Path) -> tuple[str, Failure | None]:
    if not path.is_file():
        return "not finished", None
    try:
        summary = json.loads(path.read_text())
        failure = summary.get("failure")
        return str(summary["state"]), Failure(**failure) if failure else None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: not the summary of a run: {error!r}") from error


def _slowest(folder: Path, count: int) -> list[GroupRecord]:
    if not files_of(folder):
        return []
    with SampleIndex(folder, purpose="train", order="slowest") as index:
        return [index[position] for position in range(min(count, len(index)))]
