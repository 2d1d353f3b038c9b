"""`python -m aoffpolicy.samples RUN_FOLDER`: page through what was asked, answered and rewarded."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console, Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from aoffpolicy.errors import AoffpolicyError, ConfigError
from aoffpolicy.samples.index import ORDERS, SampleIndex
from aoffpolicy.samples.log import CompletionRecord, GroupRecord
from aoffpolicy.text import printable

EXIT_FAILED, EXIT_INTERRUPTED = 1, 130
HELP = "Enter or n: next   p: previous   a number: go to that group   q: quit "


def main(argv: Sequence[str] | None = None) -> int:
    """Show groups one a page at a terminal, or all that were asked for in a pipe; returns the exit code."""
    options = _parser().parse_args(argv)
    try:
        if not options.run.is_dir():
            raise ConfigError([f"{options.run}: not a run folder"])
        purpose = "eval" if options.eval else "train"
        with SampleIndex(options.run, step=options.step, purpose=purpose, order=options.order) as index:
            if options.json:
                for record in index:
                    print(msgspec.json.encode(record).decode(), flush=True)
            elif sys.stdin.isatty() and sys.stdout.isatty() and index:
                _page(index, Console())
            else:
                _print_all(index, Console(), options.limit)
    except AoffpolicyError as error:
        print(f"aoffpolicy.samples: {error}", file=sys.stderr)
        return EXIT_FAILED
    except BrokenPipeError:  # as with `| head`; nobody reads what is still buffered
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (KeyboardInterrupt, EOFError):
        return EXIT_INTERRUPTED
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m aoffpolicy.samples", description="Page through a run's prompts, completions and rewards."
    )
    parser.add_argument("run", metavar="RUN_FOLDER", type=Path)
    parser.add_argument("--step", type=int, help="only the groups of this step")
    parser.add_argument("--eval", action="store_true", help="evaluations instead of training")
    parser.add_argument("--order", choices=list(ORDERS), default="time", help="which groups come first (default: time)")
    parser.add_argument("--limit", type=int, default=20, metavar="N", help="groups printed without a terminal (20)")
    parser.add_argument("--json", action="store_true", help="one JSON object a line, all of them")
    return parser


def _page(index: SampleIndex, console: Console) -> None:
    position = 0
    while True:
        console.clear()
        console.print(page(index[position], position, len(index)))
        word = console.input(f"[dim]{HELP}[/dim]").strip()
        if word == "q":
            return
        position = min(max(_moved(word, position), 0), len(index) - 1)


def _moved(word: str, position: int) -> int:
    if word.isdecimal():
        return int(word) - 1
    return position + {"p": -1, "n": 1, "": 1}.get(word, 0)


def _print_all(index: SampleIndex, console: Console, limit: int) -> None:
    for position, record in enumerate(index):
        if position == limit:
            console.print(f"{len(index) - limit} more; --limit N or --json for them", style="dim")
            return
        console.print(page(record, position, len(index)))
    if not index:
        console.print("no such groups in what is kept of the samples")


def page(record: GroupRecord, position: int, total: int) -> RenderableType:
    """One group: its prompt, then each completion beside its figures, the best first."""
    title = f"group {position + 1} of {total}   step {record.step}   version {record.version}   prompt {record.uid}"
    facts = f"mean reward {record.reward_mean:.3f}"
    if record.generate_s:
        facts += (
            f"   generated in {record.generate_s:.2f} s by rollout {record.rollout}, scored in {record.score_s:.2f} s"
        )
    table = Table(box=None, expand=True, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("reward", "advantage", "tokens", "version"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("completion", ratio=1, overflow="fold")
    for completion in sorted(record.completions, key=lambda c: -c.reward):
        table.add_row(*_cells(completion))
    answer = [Text("answer  ", style="dim").append(printable(record.answer), style="bold")] if record.answer else []
    return Group(
        Rule(Text(title), align="left"),
        Text(printable(record.prompt), style="cyan"),
        *answer,
        Text(facts, "dim"),
        table,
        "",
    )


def _cells(completion: CompletionRecord) -> tuple[Text, ...]:
    oldest, newest = completion.versions
    cut = "" if completion.finish_reason == "stop" else " (cut off)"
    return (
        Text(f"{completion.reward:.3f}"),
        Text("-" if completion.advantage is None else f"{completion.advantage:+.2f}"),
        Text(str(completion.tokens)),
        Text(str(oldest) if oldest == newest else f"{oldest}-{newest}"),
        Text(printable(completion.text)).append(cut, style="dim"),
    )


if __name__ == "__main__":
    sys.exit(main())
