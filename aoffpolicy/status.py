"""`python -m aoffpolicy.status`: watch a run from outside."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.text import Text

from aoffpolicy.errors import AoffpolicyError
from aoffpolicy.transport.events import (
    AnyEvent,
    ErrorEvent,
    PhaseEvent,
    RunEvent,
    StatusSubscriber,
    StepEvent,
    WorkerEvent,
    kind_of,
    subscriber_for,
)

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
_STYLES = {"run": "bold cyan", "step": "bold green", "phase": "blue", "worker": "magenta", "error": "bold red"}
_FIRST_METRICS = ("reward_mean", "time_step", "time_generate", "time_train", "time_sync", "overlap_efficiency", "loss")
"""Metrics that a step's line shows; `--json` has all of them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print a run's events until it ends; returns the exit code."""
    options = _parser().parse_args(argv)
    show = _print_json if options.json else _line_printer()
    try:
        with subscriber_for(options.run, options.key) as subscriber:
            for event in _events(subscriber, options.timeout, once=options.once):
                show(event)
    except AoffpolicyError as error:
        print(f"aoffpolicy.status: {error}", file=sys.stderr)
        return EXIT_FAILED
    except BrokenPipeError:  # as with `| head`; nobody reads what is still buffered
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m aoffpolicy.status", description="Watch a run from outside.")
    parser.add_argument(
        "run", metavar="ADDRESS_OR_RUN_FOLDER", help="a run's folder, or host:port of its status stream"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line, with everything")
    parser.add_argument("--once", action="store_true", help="print the last value of everything and leave")
    parser.add_argument("--key", type=Path, metavar="FILE", help="the run's status.key, where it is not in the folder")
    parser.add_argument(
        "--timeout", type=float, default=5.0, metavar="S", help="seconds to wait for the first answer (default 5)"
    )
    return parser


def _events(subscriber: StatusSubscriber, timeout_s: float, *, once: bool) -> Iterator[AnyEvent]:
    """The last values, then the news until the run has ended."""
    over = False
    for event in subscriber.snapshot(timeout_s):
        yield event
        over = over or _ends(event)
    if once or over:
        return
    for event in subscriber.blocking():
        yield event
        if _ends(event):
            return


def _ends(event: AnyEvent) -> bool:
    return isinstance(event, RunEvent) and event.state in ("finished", "failed", "interrupted")


def _print_json(event: AnyEvent) -> None:
    print(msgspec.json.encode(event).decode(), flush=True)


def _line_printer() -> Callable[[AnyEvent], None]:
    console = Console(highlight=False, soft_wrap=True)

    def show(event: AnyEvent) -> None:
        kind = kind_of(event)
        console.print(
            Text(time.strftime("%H:%M:%S ", time.localtime(event.time)), style="dim"),
            Text(f"{kind:<7}", style=_STYLES[kind]),
            Text(describe(event), style="dim" if event.replay else ""),
            sep="",
        )

    return show


def describe(event: AnyEvent) -> str:
    """One event in one line, without its time and kind."""
    match event:
        case RunEvent():
            return f"{event.name} {event.state}, {event.steps} steps, {event.run_dir}"
        case StepEvent():
            shown = [
                f"{name} {event.metrics[name]:.4g}" for name in _FIRST_METRICS if _is_number(event.metrics.get(name))
            ]
            return f"{event.step} " + ("skipped" if event.metrics.get("skipped") else "  ".join(shown))
        case PhaseEvent():
            took = f" after {event.seconds:.2f} s" if event.state == "end" else ""
            return f"step {event.step}, version {event.version}: {event.name} {event.state}{took}"
        case WorkerEvent():
            place = ", ".join(filter(None, (event.host, f"pid {event.pid}" if event.pid else "", event.device)))
            return f"{event.role} {event.rank} {event.state}" + (f" ({place})" if place else "") + _after(event.detail)
        case ErrorEvent():
            return f"{event.role} {event.rank}: {event.cause}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _after(detail: str) -> str:
    return f": {detail}" if detail else ""


if __name__ == "__main__":
    sys.exit(main())
