"""The table of workers, those that are worth a look before the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from aoffpolicy.status.picture import Picture
from aoffpolicy.text import printable, size
from aoffpolicy.transport.events import WorkerEvent

LEAST_LINES = 6
"""Lines for a blank, a header, a few workers and a word about the others."""
FIRST_STATES = ("lost", "starting", "busy", "ready", "stopped")
"""Workers in the order in which they are worth a look."""
STATE_STYLES = {"lost": "bold red", "starting": "blue", "busy": "green"}


@dataclass(frozen=True, slots=True)
class Column:
    """Of the table of workers."""

    name: str
    cell: Callable[[WorkerEvent], Text]
    least: int
    """Characters that it never falls below."""
    most: int | None = None
    right: bool = False
    from_width: int = 0
    """Shown on screens at least so wide."""


def _last_word(worker: WorkerEvent) -> Text:
    return Text(printable(worker.detail.splitlines()[-1]) if worker.detail else "", "dim")


COLUMNS = (
    Column("worker", lambda w: Text(f"{w.role} {w.rank}"), 10),
    Column("state", lambda w: Text(w.state, STATE_STYLES.get(w.state, "")), 8),
    Column("load", lambda w: Text(str(w.load)), 4, right=True),
    Column("version", lambda w: Text(f"v{w.version}" if w.version >= 0 else ""), 7, right=True, from_width=80),
    Column("tok/s", lambda w: Text(f"{w.tokens_per_s:.0f}" if w.tokens_per_s else ""), 5, right=True),
    Column("memory", lambda w: Text(size(w.memory_bytes)), 8, right=True, from_width=80),
    Column("device", lambda w: Text(printable(w.device)), 6, 13, from_width=80),
    Column("host", lambda w: Text(printable(w.host)), 6, 24, from_width=120),
    Column("pid", lambda w: Text(str(w.pid or "")), 7, right=True, from_width=120),
    Column("last word", _last_word, 9),
)


def workers_table(picture: Picture, width: int, room: int) -> list[RenderableType]:
    """The table, with a word about those for whom there is no room in so many lines; nothing without workers."""
    workers = sorted(picture.workers.values(), key=lambda w: (_urgency(w), w.role, w.rank))
    if not workers:
        return []
    shown = workers if len(workers) <= room - 2 else workers[: max(room - 3, 1)]
    columns = [column for column in COLUMNS if column.from_width <= width]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False, width=width)
    for column in columns:
        table.add_column(
            column.name,
            justify="right" if column.right else "left",
            min_width=column.least,
            max_width=column.most,
            no_wrap=True,
            overflow="ellipsis",
        )
    for worker in sorted(shown, key=lambda w: (w.role, w.rank)):
        table.add_row(*(column.cell(worker) for column in columns))
    rest = Counter(worker.state for worker in workers[len(shown) :])
    more = [Text("and " + ", ".join(f"{n} more {state}" for state, n in rest.items()), "dim")] if rest else []
    return [Text(""), table, *more]


def _urgency(worker: WorkerEvent) -> int:
    return FIRST_STATES.index(worker.state) if worker.state in FIRST_STATES else len(FIRST_STATES)
