"""Spans of a run in Chrome's trace format: `timeline.json` opens in Perfetto or chrome://tracing."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Any

PHASE_TRACKS = ("generate", "train", "weights", "eval", "checkpoint")
"""Of the pipeline as a whole; each worker has a track of its own below them."""
MAX_SPANS = 100_000
"""The oldest spans go first, so that a run of days keeps a file that opens."""
PIPELINE, WORKERS = 0, 1
"""The two groups of tracks; "processes" to the viewer."""


class Timeline:
    """Collects finished spans in memory and writes them as one file."""

    def __init__(self) -> None:
        self._spans: deque[dict[str, Any]] = deque(maxlen=MAX_SPANS)
        self._tracks: dict[str, int] = {track: index for index, track in enumerate(PHASE_TRACKS)}
        """Thread ids; those past `PHASE_TRACKS` are workers."""

    def add(self, track: str, name: str, start_s: float, seconds: float, **details: int) -> None:
        """Record a span.

        Args:
            track: One of `PHASE_TRACKS`, or a worker such as "rollout 0". Spans of one track must not overlap halfway.
            name: What the span's box says.
            start_s: On any clock that all spans share.
            seconds: Length.
            details: Shown when the box is clicked.
        """
        index = self._tracks.setdefault(track, len(self._tracks))
        self._spans.append(
            {
                "ph": "X",
                "pid": PIPELINE if index < len(PHASE_TRACKS) else WORKERS,
                "tid": index,
                "name": name,
                "ts": round(start_s * 1e6),
                "dur": round(seconds * 1e6),
                "args": details,
            }
        )

    def snapshot(self) -> list[dict[str, Any]]:
        """The file's events as they are now, for `write_timeline` in another thread."""
        names: list[dict[str, Any]] = [
            {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
            for pid, name in ((PIPELINE, "pipeline"), (WORKERS, "workers"))
        ]
        names += [
            {
                "ph": "M",
                "pid": PIPELINE if index < len(PHASE_TRACKS) else WORKERS,
                "tid": index,
                "name": "thread_name",
                "args": {"name": track},
            }
            for track, index in self._tracks.items()
        ]
        return [*names, *self._spans]


def write_timeline(path: Path, events: list[dict[str, Any]]) -> None:
    """Write the file whole or not at all; blocks."""
    rewritten = path.with_suffix(".tmp")
    rewritten.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}))
    rewritten.replace(path)
