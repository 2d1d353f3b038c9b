"""Spans of a run in Chrome's trace format: `timeline.json` opens in Perfetto or chrome://tracing."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Any

import msgspec

from aoffpolicy.errors import DataError

PHASE_TRACKS = ("generate", "train", "weights", "eval", "checkpoint")
"""Of the pipeline as a whole; each worker has a track of its own below them."""
MAX_SPANS = 100_000
"""The oldest spans go first, so that a run of days keeps a file that opens."""
PIPELINE, WORKERS = 0, 1
"""The two groups of tracks; "processes" to the viewer."""


class Span(msgspec.Struct, frozen=True):
    """Something that went on for a while."""

    track: str
    """One of `PHASE_TRACKS`, or a worker such as "rollout 0"."""
    name: str
    """What the span's box says."""
    start_s: float
    """On a clock that all spans of a run share."""
    seconds: float
    step: int = -1
    """Training step; -1 where there is none."""
    version: int = -1
    """Policy version; -1 where there is none."""

    @property
    def end_s(self) -> float:
        return self.start_s + self.seconds


class Timeline:
    """Collects finished spans in memory."""

    def __init__(self) -> None:
        self._spans: deque[tuple[int, Span]] = deque(maxlen=MAX_SPANS)
        """With the index of the row that each is drawn in."""
        self._rows: dict[tuple[str, int], int] = {(track, 0): index for index, track in enumerate(PHASE_TRACKS)}
        """By track and lane. Spans of a track that overlap are drawn in lanes of their own."""
        self._busy_until: dict[tuple[str, int], float] = {}

    def add(self, span: Span) -> None:
        """Record a span; spans come in the order of their ends."""
        lane = 0
        while self._busy_until.get((span.track, lane), span.start_s) > span.start_s:
            lane += 1
        self._busy_until[span.track, lane] = span.end_s
        self._spans.append((self._rows.setdefault((span.track, lane), len(self._rows)), span))

    def snapshot(self) -> tuple[dict[int, str], list[tuple[int, Span]]]:
        """What `write_timeline` writes, as it is now: the rows' tracks, and the spans with their rows."""
        return {row: track for (track, _), row in self._rows.items()}, list(self._spans)


def write_timeline(path: Path, tracks: dict[int, str], spans: list[tuple[int, Span]]) -> None:
    """Write the file whole or not at all; blocks."""
    names: list[dict[str, Any]] = [
        {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
        for pid, name in ((PIPELINE, "pipeline"), (WORKERS, "workers"))
    ]
    names += [
        {"ph": "M", "pid": _group(track), "tid": row, "name": "thread_name", "args": {"name": track}}
        for row, track in tracks.items()
    ]
    boxes = [
        {
            "ph": "X",
            "pid": _group(span.track),
            "tid": row,
            "name": span.name,
            "ts": round(span.start_s * 1e6),
            "dur": round(span.seconds * 1e6),
            "args": {"step": span.step, "version": span.version},
        }
        for row, span in spans
    ]
    rewritten = path.with_suffix(".tmp")
    rewritten.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": names + boxes}))
    rewritten.replace(path)


def read_timeline(path: Path) -> list[Span]:
    """The spans of a written file.

    Raises:
        DataError: It is no timeline of a run.
    """
    try:
        events = json.loads(path.read_text())["traceEvents"]
        tracks = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
        return [
            Span(
                tracks[e["tid"]],
                e["name"],
                e["ts"] / 1e6,
                e["dur"] / 1e6,
                e["args"].get("step", -1),
                e["args"].get("version", -1),
            )
            for e in events
            if e["ph"] == "X"
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: not the timeline of a run: {error!r}") from error


def _group(track: str) -> int:
    return PIPELINE if track in PHASE_TRACKS else WORKERS
