"""Pictures made of characters: sparklines, and phases as bars over time."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from aoffpolicy.status.picture import Phase

BLOCKS = "▁▂▃▄▅▆▇█"
STYLES = {
    "generate": "cyan",
    "train": "magenta",
    "send": "green",
    "load": "green",
    "eval": "blue",
    "checkpoint": "red",
}
"""Colours of the terminal's own palette, so that they suit a light and a dark one."""


def sparkline(values: Sequence[float], width: int) -> str:
    """The newest values as blocks, the lowest shown being ▁ and the highest █."""
    shown = values[-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((value - low) * scale)] for value in shown)


def phase_bar(phases: Sequence[Phase], start: float, end: float, width: int) -> Text:
    """Phases between two times as a bar with the step's number in each; no phase is too short to be seen.

    Args:
        phases: In the order of time.
        start: Unix seconds at the left edge.
        end: At the right edge.
        width: Characters.
    """
    bar: list[tuple[str, str]] = [("·", "dim")] * width
    per_character = max(end - start, 1e-9) / width
    for phase in phases:
        if phase.end <= start or phase.start >= end:
            continue
        first = max(0, round((phase.start - start) / per_character))
        last = min(width, round((phase.end - start) / per_character))
        first = min(first, width - 1)
        last = max(last, first + 1)
        style = STYLES.get(phase.name, "")
        label = str(phase.step)
        for column in range(first, last):
            inside = column - first
            if inside < len(label) < last - first:
                bar[column] = (label[inside], f"bold {style}")
            else:
                bar[column] = ("█" if phase.step % 2 == 0 else "▓", style)
    text = Text()
    for character, style in bar:
        text.append(character, style)
    return text
