"""`python -m aoffpolicy.status [why] [ADDRESS | RUN_FOLDER]`: watch a run from outside."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live

from aoffpolicy.errors import AoffpolicyError, ConfigError, DeadlineError, PeerLostError
from aoffpolicy.recorded import is_held
from aoffpolicy.samples.index import SampleIndex
from aoffpolicy.samples.log import GroupRecord, files_of
from aoffpolicy.status.lines import LinePrinter, print_json
from aoffpolicy.status.picture import ENDED, Picture, picture_of_folder
from aoffpolicy.status.screen import Screen
from aoffpolicy.status.why import explain
from aoffpolicy.transport.events import AnyEvent, RunEvent, StatusSubscriber, subscriber_for
from aoffpolicy.transport.status_files import STATUS_FILE

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
FRAME_S = 0.25
"""Between two frames of the live view."""
RECONNECT_S = 10.0
"""For a connection that was lost, as over ssh."""
RUNS = Path("runs")
"""Where the newest run is looked for when none is named."""


def main(argv: Sequence[str] | None = None) -> int:
    """Show a run until it ends, or once, or explain it; returns the exit code."""
    options = _parser().parse_args(argv)
    try:
        place = _place(options.words)
        if options.words[:1] == ["why"]:
            _explain(place, options)
        elif options.once and not options.json:
            picture, note = _picture(place, options)
            Console().print(Screen(picture, picture.time, note))
        else:
            with subscriber_for(place, options.key, reconnect_s=RECONNECT_S) as subscriber:
                _follow(subscriber, options)
    except AoffpolicyError as error:
        print(f"aoffpolicy.status: {error}", file=sys.stderr)
        return EXIT_FAILED
    except BrokenPipeError:  # as with `| head`; nobody reads what is still buffered
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m aoffpolicy.status",
        description="Watch a run from outside, or have explained why it is slow or stands still.",
        usage="%(prog)s [why] [ADDRESS | RUN_FOLDER] [--once] [--json] [--key FILE] [--timeout S]",
    )
    parser.add_argument(
        "words",
        metavar="[why] [ADDRESS | RUN_FOLDER]",
        nargs="*",
        help=f"host:port of a status stream, or a run's folder; without one the newest in {RUNS}/",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line, with everything")
    parser.add_argument("--once", action="store_true", help="show how it is now and leave")
    parser.add_argument("--key", type=Path, metavar="FILE", help="the run's status.key, where it is not in the folder")
    parser.add_argument(
        "--timeout", type=float, default=5.0, metavar="S", help="seconds to wait for the first answer (default 5)"
    )
    return parser


def _place(words: Sequence[str]) -> str:
    places = list(words[1:] if words[:1] == ["why"] else words)
    if len(places) > 1:
        raise ConfigError([f"{' '.join(words)}: one run at a time, please"])
    return places[0] if places else str(_newest_run())


def _newest_run() -> Path:
    status_files = sorted(RUNS.glob(f"*/{STATUS_FILE}"), key=lambda path: path.stat().st_mtime)
    if not status_files:
        raise ConfigError([f"no run in {RUNS.absolute()}; name a run's folder or an address"])
    return status_files[-1].parent


# --- Live ----------------------------------------------------------------------------------------------------------


def _follow(subscriber: StatusSubscriber, options: argparse.Namespace) -> None:
    """The last values, then the news until the run has ended: as a screen at a terminal, otherwise as lines."""
    console = Console()
    if options.json or not console.is_terminal:
        show = print_json if options.json else LinePrinter().show
        for event in _events(subscriber, options.timeout, once=options.once):
            show(event)
    else:
        _animate(subscriber, options.timeout, console)


def _events(subscriber: StatusSubscriber, timeout_s: float, *, once: bool) -> Iterator[AnyEvent]:
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
    return isinstance(event, RunEvent) and event.state in ENDED


def _animate(subscriber: StatusSubscriber, timeout_s: float, console: Console) -> None:
    """Redraw a few times a second on the terminal's second screen; what was last seen stays on the first."""
    picture = Picture()
    for event in subscriber.snapshot(timeout_s):
        picture.add(event)
    ahead_s = picture.time - time.time()  # the launcher's clock against ours; events come at least every second
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while not picture.ended:
                live.update(Screen(picture, time.time() + ahead_s), refresh=True)
                until = time.monotonic() + FRAME_S
                while (left_s := until - time.monotonic()) > 0:
                    news = subscriber.take(left_s)
                    if news is not None:
                        picture.add(news)
                        ahead_s = max(ahead_s, news.time - time.time())
    finally:
        console.print(Screen(picture, picture.time))


# --- At one moment -------------------------------------------------------------------------------------------------


def _picture(place: str, options: argparse.Namespace) -> tuple[Picture, str]:
    """The run as it is now, from its stream or, where that is silent, from its folder; with a note about the latter."""
    try:
        with subscriber_for(place, options.key) as subscriber:
            picture = Picture()
            for event in subscriber.snapshot(options.timeout):
                picture.add(event)
            return picture, ""
    except (DeadlineError, PeerLostError):
        if not (Path(place) / "metrics.jsonl").is_file():
            raise
    picture = picture_of_folder(Path(place))
    note = "from the run's folder"
    if not picture.ended:
        note += "; a launcher holds it, but does not answer" if is_held(Path(place)) else "; its launcher is gone"
    return picture, note


def _explain(place: str, options: argparse.Namespace) -> None:
    picture, note = _picture(place, options)
    folder = Path(place if Path(place).is_dir() else picture.run.run_dir if picture.run else place)
    for sentence in explain(picture, picture.time, _newest_groups(folder, picture)):
        print(sentence)
    if note:
        print(f"({note})")


def _newest_groups(folder: Path, picture: Picture) -> list[GroupRecord]:
    if not picture.rows or not files_of(folder):
        return []
    with SampleIndex(folder, step=max(picture.rows), purpose="train") as index:
        return list(index)


if __name__ == "__main__":
    sys.exit(main())
