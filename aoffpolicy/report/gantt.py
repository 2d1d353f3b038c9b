"""Who did what when: a row for every phase and every worker, so that generation over training is seen."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aoffpolicy.report.svg import escape, figure, ticks
from aoffpolicy.timeline import PHASE_TRACKS, Span

MAX_STEPS = 150
"""Steps drawn, the newest ones."""
MAX_WORKERS = 24
"""Workers with a row of their own."""
STEP_PX = 70
"""Of a step of ordinary length."""
LEAST_PX, MOST_PX = 1200, 14_000
ROW, BAR, LEFT, TOP, BOTTOM = 24, 17, 92, 8, 24
LETTER_PX = 6.4
STYLES = ("generate", "train", "send", "load", "eval", "checkpoint", "score")


@dataclass(frozen=True, slots=True)
class Gantt:
    svg: str
    first_step: int
    """The first step drawn; spans before it were left out."""
    workers_left_out: int
    styles: Sequence[str]
    """The colours in it."""


def draw(spans: Sequence[Span]) -> Gantt | None:
    """The chart, or None where there is nothing to draw."""
    last = max((span.step for span in spans), default=-1)
    first = max(0, last - MAX_STEPS + 1)
    since = min((span.start_s for span in spans if span.step >= first), default=0.0)
    shown = [span for span in spans if span.start_s >= since and (span.step >= first or span.step < 0)]
    if not shown:
        return None
    tracks = {span.track for span in shown}
    phases = [track for track in PHASE_TRACKS if track in tracks]
    workers = sorted(tracks - set(phases), key=_worker_order)
    rows = {track: index for index, track in enumerate(phases + workers[:MAX_WORKERS])}
    end = max(span.end_s for span in shown)
    scale = _pixels_per_second(shown, end - since)
    width = LEFT + (end - since) * scale + 16
    height = TOP + len(rows) * ROW + BOTTOM
    body = _axis(end - since, scale, height) + "".join(
        _row_name(track, row, first_worker=row == len(phases), width=width) for track, row in rows.items()
    )
    body += "".join(_box(span, rows[span.track], since, scale) for span in shown if span.track in rows)
    svg = (
        f'<svg class="gantt" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" height="{height}" role="img" '
        f'aria-label="phases and workers over time">{body}</svg>'
    )
    styles = sorted({_style(span) for span in shown}, key=STYLES.index)
    return Gantt(svg, first, max(0, len(workers) - MAX_WORKERS), styles)


def _pixels_per_second(spans: Sequence[Span], seconds: float) -> float:
    trains = [span.seconds for span in spans if span.track == "train"] or [span.seconds for span in spans]
    wanted = STEP_PX / max(statistics.median(trains), 1e-6)
    seconds = max(seconds, 1e-6)
    return min(max(wanted, (LEAST_PX - LEFT) / seconds), MOST_PX / seconds)


def _worker_order(track: str) -> tuple[str, int]:
    role, _, rank = track.rpartition(" ")
    return role, int(rank) if rank.isdecimal() else -1


def _axis(seconds: float, scale: float, height: int) -> str:
    parts = []
    for time in ticks(0.0, max(seconds, 1e-6), max(4, int(seconds * scale / 120))):
        x = LEFT + time * scale
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{height - BOTTOM}"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{height - 8}" text-anchor="middle">{figure(time)} s</text>')
    return "".join(parts)


def _row_name(track: str, row: int, *, first_worker: bool, width: float) -> str:
    y = TOP + row * ROW
    divider = f'<line class="grid" x1="0" x2="{width:.0f}" y1="{y - 2}" y2="{y - 2}"/>' if first_worker else ""
    return f'{divider}<text class="tick" x="{LEFT - 8}" y="{y + 14}" text-anchor="end">{escape(track)}</text>'


def _box(span: Span, row: int, since: float, scale: float) -> str:
    x, width = LEFT + (span.start_s - since) * scale, max(span.seconds * scale, 1.0)
    y = TOP + row * ROW + 2
    label = str(span.step) if span.step >= 0 else ""
    text = ""
    if label and width > len(label) * LETTER_PX + 4:
        text = f'<text class="in" x="{x + width / 2:.1f}" y="{y + 13}" text-anchor="middle">{label}</text>'
    parity = " odd" if span.step >= 0 and span.step % 2 else ""
    title = f"{span.name}: {figure(span.seconds)} s from {figure(span.start_s - since)} s"
    if span.version >= 0:
        title += f", version {span.version}"
    return (
        f'<g><rect class="{_style(span)} bar{parity}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" rx="2" '
        f'data-track="{escape(span.track)}" data-step="{span.step}" data-seconds="{span.seconds!r}"/>'
        f"{text}<title>{escape(title)}</title></g>"
    )


_STYLE_OF_ROLE: Mapping[str, str] = {"rollout": "generate", "trainer": "train", "reward": "score"}


def _style(span: Span) -> str:
    if span.track == "weights":
        return "load" if span.name.startswith("load") else "send"
    return span.track if span.track in PHASE_TRACKS else _STYLE_OF_ROLE.get(span.track.split()[0], "score")
