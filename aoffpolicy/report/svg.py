"""Small inline SVG charts: lines over steps, and bars stacked of named seconds. All text is escaped here."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeGuard

from aoffpolicy.text import printable

WIDTH, HEIGHT = 560, 220
LEFT, RIGHT, TOP, BOTTOM = 54, 14, 12, 26
MAX_POINTS = 400
"""Of a line; longer ones keep the lowest and the highest point of every stretch, so that no spike is lost."""

Point = tuple[int, float]
"""step, value"""


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    style: str
    """CSS class that gives the colour."""
    values: Sequence[float | None]
    """One for each step; None leaves a gap."""


def escape(text: object) -> str:
    """Text that is safe in HTML, also in attributes."""
    return html.escape(printable(str(text)))


def figure(value: float | None) -> str:
    """A figure as people read it: four digits."""
    if value is None or not math.isfinite(value):
        return "-"
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.4g}"
    return f"{value:.1e}"


def line_chart(label: str, steps: Sequence[int], series: Sequence[Series], *, from_zero: bool = False) -> str:
    """Lines over steps.

    Args:
        label: What a screen reader says.
        steps: x of every value.
        series: At most a few; each has as many values as there are steps.
        from_zero: Let the axis begin at 0.
    """
    known = [value for s in series for value in s.values if _drawable(value)]
    if not known:
        return '<p class="none">nothing was recorded</p>'
    low, high = _bounds(min([*known, 0.0] if from_zero else known), max(known))
    frame = _Frame(steps[0], steps[-1], low, high)
    body = "".join(_line(frame, steps, s) for s in series)
    return _svg(label, frame.axes() + body)


def stacked_bars(label: str, steps: Sequence[int], series: Sequence[Series]) -> str:
    """One bar for every step, made of the series' values from bottom to top; many steps share a bar by their mean."""
    if not steps:
        return '<p class="none">nothing was recorded</p>'
    stretches = _stretches(len(steps), MAX_POINTS // 2)
    means = [[_mean([s.values[i] for i in stretch]) for s in series] for stretch in stretches]
    frame = _Frame(steps[0] - 0.5, steps[-1] + 0.5, 0.0, _bounds(0.0, max(map(sum, means)))[1])
    bars = []
    for stretch, values in zip(stretches, means, strict=True):
        left, right = frame.x(steps[stretch[0]] - 0.5), frame.x(steps[stretch[-1]] + 0.5)
        gap = min(2.0, (right - left) * 0.2)
        bottom = 0.0
        for s, value in zip(series, values, strict=True):
            title = f"{_span_of(steps, stretch)}: {s.name} {figure(value)} s"
            top = bottom + value
            bars.append(
                f'<rect class="{s.style} bar" x="{left + gap / 2:.2f}" width="{right - left - gap:.2f}" '
                f'y="{frame.y(top):.2f}" height="{frame.y(bottom) - frame.y(top):.2f}" data-step="{steps[stretch[0]]}" '
                f'data-series="{escape(s.name)}" data-value="{value!r}"><title>{escape(title)}</title></rect>'
            )
            bottom = top
    return _svg(label, frame.axes() + "".join(bars))


def legend(series: Sequence[Series]) -> str:
    keys = (f'<span class="key"><i class="{s.style}"></i>{escape(s.name)}</span>' for s in series)
    return f'<div class="legend">{"".join(keys)}</div>'


class _Frame:
    """Where steps and values are in the picture."""

    def __init__(self, first: float, last: float, low: float, high: float) -> None:
        if first == last:
            first, last = first - 1, last + 1
        self._first, self._last, self._low, self._high = first, last, low, high

    def x(self, step: float) -> float:
        return LEFT + (step - self._first) / (self._last - self._first) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self._low) / (self._high - self._low) * (HEIGHT - TOP - BOTTOM)

    def axes(self) -> str:
        parts = []
        for value in ticks(self._low, self._high, 5):
            y = self.y(value)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.2f}" y2="{y:.2f}"/>')
            parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.2f}" text-anchor="end">{figure(value)}</text>')
        for step in ticks(self._first, self._last, 7):
            if step == int(step):
                x = self.x(step)
                parts.append(f'<text class="tick" x="{x:.2f}" y="{HEIGHT - 8}" text-anchor="middle">{int(step)}</text>')
        return "".join(parts)


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round values between two bounds, roughly so many."""
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    stride = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first = math.ceil(low / stride - 1e-9)
    last = math.floor(high / stride + 1e-9)
    return [round(index * stride, 12) for index in range(first, last + 1)]


def _line(frame: _Frame, steps: Sequence[int], series: Series) -> str:
    pieces: list[list[Point]] = [[]]
    for index in _kept(series.values):
        value = series.values[index]
        if _drawable(value):
            pieces[-1].append((steps[index], value))
        elif pieces[-1]:
            pieces.append([])
    drawn = []
    for piece in filter(None, pieces):
        path = " ".join(f"{frame.x(step):.2f},{frame.y(value):.2f}" for step, value in piece)
        drawn.append(f'<polyline class="{series.style} line" points="{path}"/>')
        drawn += [
            f'<circle class="{series.style} dot" cx="{frame.x(step):.2f}" cy="{frame.y(value):.2f}" r="2.6" '
            f'data-step="{step}" data-series="{escape(series.name)}" data-value="{value!r}">'
            f"<title>step {step}: {escape(series.name)} {figure(value)}</title></circle>"
            for step, value in piece
        ]
    return "".join(drawn)


def _kept(values: Sequence[float | None]) -> list[int]:
    """Indices of the points that are drawn."""
    if len(values) <= MAX_POINTS:
        return list(range(len(values)))
    kept: set[int] = {0, len(values) - 1}
    for stretch in _stretches(len(values), MAX_POINTS // 2):
        known = [(value, i) for i in stretch if _drawable(value := values[i])]
        kept |= {min(known)[1], max(known)[1]} if known else {stretch[0]}
    return sorted(kept)


def _stretches(count: int, most: int) -> list[range]:
    """0..count-1 in at most so many parts of nearly equal length."""
    parts = min(count, most)
    cuts = [count * part // parts for part in range(parts + 1)]
    return [range(start, end) for start, end in pairwise(cuts)]


def _span_of(steps: Sequence[int], stretch: range) -> str:
    first, last = steps[stretch[0]], steps[stretch[-1]]
    return f"step {first}" if first == last else f"mean of steps {first} to {last}"


def _bounds(low: float, high: float) -> tuple[float, float]:
    """Room around the values, so that a flat line is in the middle."""
    if high - low < 1e-12 * max(1.0, abs(high)):
        margin = abs(high) * 0.1 or 1.0
        return low - margin if low else 0.0, high + margin
    margin = (high - low) * 0.06
    return (low - margin if low else 0.0), high + margin


def _drawable(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else 0.0


def _svg(label: str, body: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">{body}</svg>'
