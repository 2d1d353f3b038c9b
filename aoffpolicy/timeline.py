"""Spans of a run in Chrome's trace format: `timeline.json` opens in Perfetto or chrome://tracing."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Any

TRACKS = ("generate", "train", "weights", "eval", "checkpoint")
MAX_SPANS = 100_000
"""The oldest spans go first, so that a run of days keeps a file that opens."""


class Timeline:
    """Collects finished spans in memory and writes them as one file."""

    def __init__(self) -> None:
        self._spans: deque[dict[str, Any]] = deque(maxlen=MAX_SPANS)

    def add(self, track: str, name: str, start_s: float, seconds: float, **details: int) -> None:
        """Record a span.

        Args:
            track: One of `TRACKS`.
            name: What the span's box says.
            start_s: On any clock that all spans share.
            seconds: Length.
            details: Shown when the box is clicked.
        """
        self._spans.append(
            {
                "ph": "X",
                "pid": 0,
                "tid": TRACKS.index(track),
                "name": name,
                "ts": round(start_s * 1e6),
                "dur": round(seconds * 1e6),
                "args": details,
            }
        )

    def write(self, path: Path) -> None:
        names = [
            {"ph": "M", "pid": 0, "tid": index, "name": "thread_name", "args": {"name": track}}
            for index, track in enumerate(TRACKS)
        ]
        path.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": [*names, *self._spans]}))
