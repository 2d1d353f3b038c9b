"""Events as lines, for pipes and log files."""

from __future__ import annotations

import time

import msgspec
from rich.console import Console
from rich.text import Text

from aoffpolicy.text import printable
from aoffpolicy.transport.events import (
    AnyEvent,
    ErrorEvent,
    FaultEvent,
    PhaseEvent,
    RunEvent,
    StepEvent,
    WorkerEvent,
    kind_of,
)

_STYLES = {
    "run": "bold cyan",
    "step": "bold green",
    "phase": "blue",
    "worker": "magenta",
    "fault": "red",
    "error": "bold red",
}
_FIRST_METRICS = ("reward_mean", "time_step", "time_generate", "time_train", "time_sync", "overlap_efficiency", "loss")
"""Metrics that a step's line shows; `--json` has all of them."""


def print_json(event: AnyEvent) -> None:
    print(msgspec.json.encode(event).decode(), flush=True)


class LinePrinter:
    """Prints what is new: a worker that says the same as a second ago is left out."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, soft_wrap=True)
        self._said: dict[tuple[str, int], str] = {}

    def show(self, event: AnyEvent) -> None:
        said = printable(describe(event))
        if isinstance(event, WorkerEvent):
            if self._said.get((event.role, event.rank)) == said:
                return
            self._said[event.role, event.rank] = said
        kind = kind_of(event)
        self._console.print(
            Text(time.strftime("%H:%M:%S ", time.localtime(event.time)), style="dim"),
            Text(f"{kind:<7}", style=_STYLES[kind]),
            Text(said, style="dim" if event.replay else ""),
            sep="",
        )


def describe(event: AnyEvent) -> str:
    """One event in one line, without its time and kind."""
    match event:
        case RunEvent():
            return f"{event.name} {event.state}, {event.steps} steps, {event.run_dir}"
        case StepEvent():
            known = [(name, event.metrics.get(name)) for name in _FIRST_METRICS]
            shown = [f"{name} {value:.4g}" for name, value in known if isinstance(value, int | float)]
            return f"{event.step} " + ("skipped" if event.metrics.get("skipped") else "  ".join(shown))
        case PhaseEvent():
            took = f" after {event.seconds:.2f} s" if event.state == "end" else ""
            return f"step {event.step}, version {event.version}: {event.name} {event.state}{took}"
        case WorkerEvent():
            place = ", ".join(filter(None, (event.host, f"pid {event.pid}" if event.pid else "", event.device)))
            return f"{event.role} {event.rank} {event.state}" + (f" ({place})" if place else "") + _after(event.detail)
        case FaultEvent():
            then = "not started again" if event.restart_in_s is None else f"started again in {event.restart_in_s:g} s"
            return f"{event.role} {event.rank} is lost, {event.groups} groups go to others, {then}: {event.cause}"
        case ErrorEvent():
            return f"{event.role} {event.rank}: {event.cause}"


def _after(detail: str) -> str:
    return f": {detail}" if detail else ""
