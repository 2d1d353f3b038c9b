"""A run on one screen: pipeline, overlap of the last steps, curves, workers, who waits for whom, what went wrong."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.text import Text

from aoffpolicy.recorded import number
from aoffpolicy.status.bars import STYLES, phase_bar, sparkline
from aoffpolicy.status.picture import Phase, Picture
from aoffpolicy.status.workers_table import LEAST_LINES, workers_table
from aoffpolicy.text import duration, printable
from aoffpolicy.transport.events import WorkerEvent

MOST_COLUMNS = 160
"""A wider terminal is not filled."""
LABEL = 10
STEPS_SHOWN = 4
"""Of the overlap bars."""
RUN_STYLES = {"running": "green", "finished": "green", "failed": "bold red"}


class Screen:
    """Draws a picture for the width and height that it is given; no line is wider than that.

    Args:
        picture: What is known.
        now: Unix seconds, on the launcher's clock.
        note: Said under everything, for instance where the picture comes from.
    """

    def __init__(self, picture: Picture, now: float, note: str = "") -> None:
        self._picture = picture
        self._now = now
        self._note = note

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        picture, now = self._picture, self._now
        width = min(options.max_width, MOST_COLUMNS)
        height = options.height or (console.height if console.is_terminal else 10_000)
        head = _head(picture, now, width)
        middle = [*_overlap(picture, now, width), *_curves(picture, width)]
        below = [*_verdict(picture, width), *_errors(picture, width)]
        if self._note:
            below.append(_one_line(self._note, width, "dim"))
        pipeline = _pipeline(picture, now, width)
        room = height - 1 - len(middle) - len(below)
        if room - len(pipeline) < min(len(picture.workers) + 2, LEAST_LINES):
            pipeline = []  # on a low screen the workers matter more
        yield Group(head, *pipeline, *middle, *workers_table(picture, width, room - len(pipeline)), *below)


def _head(picture: Picture, now: float, width: int) -> Text:
    run = picture.run
    if run is None:
        return Text("no news of a run yet", "dim")
    text = Text().append(printable(run.name), "bold").append(f"  {run.state}", RUN_STYLES.get(run.state, ""))
    text.append(f"  {max(picture.rows, default=-1) + 1} of {run.steps} steps")
    step_s = picture.median("time_step")
    left = run.steps - len(picture.rows) if not picture.rows else run.steps - max(picture.rows) - 1
    if run.state == "running" and step_s and left > 0:
        text.append(f"  about {duration(left * step_s)} to go", "dim")
    if not picture.ended and now - picture.time > 5:
        text.append(f"  silent for {duration(now - picture.time)}", "bold red")
    text.truncate(width, overflow="ellipsis")
    return text


# --- Pipeline ------------------------------------------------------------------------------------------------------


def _pipeline(picture: Picture, now: float, width: int) -> list[Text]:
    """Three boxes, samples going right and weights going back; of a run's folder nobody knows the workers."""
    if not picture.workers:
        return []
    box = (width - 10) // 3
    contents = [
        (("rollout", STYLES["generate"]), _rollout_lines(picture, now)),
        (("reward", ""), _reward_lines(picture)),
        (("trainer", STYLES["train"]), _trainer_lines(picture, now)),
    ]
    top, bottom = Text(" "), Text(" ")
    middle = [Text(" "), Text(" ")]
    for index, ((name, style), lines) in enumerate(contents):
        joint = "    " if index else ""
        top.append(joint).append("╭ ").append(name, f"bold {style}").append(" " + "─" * (box - len(name) - 4) + "╮")
        for line, content in zip(middle, lines, strict=True):
            arrow = " ─► " if index and line is middle[0] else joint
            line.append(arrow).append("│ ").append(_fit(content, box - 4)).append(" │")
        bottom.append(joint).append("╰" + "─" * (box - 2) + "╯")
    return [top, *middle, bottom, _weights_line(picture, now, width, box)]


def _rollout_lines(picture: Picture, now: float) -> tuple[str, str]:
    workers = picture.of_role("rollout")
    doing = _doing(picture, now, "load", "eval", "generate")
    return doing, f"{_count(workers, 'worker')}, load {sum(w.load for w in workers)}"


def _reward_lines(picture: Picture) -> tuple[str, str]:
    workers = picture.of_role("reward")
    load = sum(w.load for w in workers)
    return (f"scores {load} groups" if load else "waits"), _count(workers, "worker")


def _trainer_lines(picture: Picture, now: float) -> tuple[str, str]:
    doing = _doing(picture, now, "checkpoint", "send", "train")
    return doing, _count(picture.of_role("trainer"), "rank")


def _doing(picture: Picture, now: float, *phases: str) -> str:
    """The first of these phases that goes on, its step, and for how long."""
    for name in phases:
        if (phase := picture.going_on(name)) is not None:
            return f"{name} {phase.step}, {max(0.0, now - phase.time):.1f} s"
    return "stopped" if picture.ended else "waits"


def _weights_line(picture: Picture, now: float, width: int, box: int) -> Text:
    versions = [w.version for w in picture.of_role("rollout")]
    said = f" weights v{min(versions)} " if versions and min(versions) >= 0 else " weights "
    sent = picture.last("send")
    if picture.going_on("send") is not None:
        said = " weights on their way "
    elif sent is not None:
        said += f"sent in {sent.seconds:.2f} s "
    left, right = 1 + box // 2, 1 + 2 * (box + 4) + box // 2
    line = "◄" + said.center(right - left - 1, "═") + "╯"
    return Text(" " * (left - 1)).append("╰" + line, STYLES["send"])


def _count(workers: Sequence[WorkerEvent], noun: str) -> str:
    lost = sum(worker.state == "lost" for worker in workers)
    text = f"{len(workers)} {noun}{'' if len(workers) == 1 else 's'}"
    return f"{text}, {lost} lost" if lost else text


# --- Overlap and curves --------------------------------------------------------------------------------------------


def _overlap(picture: Picture, now: float, width: int) -> list[Text]:
    """Bars of the last steps that move to the left as time goes on."""
    end = picture.time if picture.ended or picture.state == "not finished" else now
    going_on = [Phase(p.name, p.step, p.version, p.time, now) for p in picture.open.values()]
    phases = sorted([*picture.phases, *going_on], key=lambda phase: phase.start)
    if not phases:
        return []
    span = max(STEPS_SHOWN * picture.median("time_step"), 10.0)
    room = width - LABEL - 1
    names = (("generate", ("generate", "eval")), ("train", ("train", "checkpoint")), ("weights", ("send", "load")))
    lines = [Text("")]
    for label, wanted in names:
        shown = [phase for phase in phases if phase.name in wanted]
        lines.append(Text(f"{label:<{LABEL}}").append(phase_bar(shown, end - span, end, room)))
    ago, until = f"{duration(span)} ago", "end" if picture.ended else "now"
    lines.append(Text(" " * LABEL + ago + until.rjust(room - len(ago)), "dim"))
    return lines


def _curves(picture: Picture, width: int) -> list[Text]:
    lines = [Text("")] if picture.rows else []
    for label, key, style in (("reward", "reward_mean", ""), ("loss", "loss", ""), ("step s", "time_step", "")):
        values = picture.values(key)
        if not values:
            continue
        room = min(64, width - LABEL - 36)
        line = Text(f"{label:<{LABEL}}").append(f"{sparkline(values, room):<{room}}", style or "cyan")
        line.append(f"  {values[-1]:<9.4g}", "bold").append(f" from {min(values):.4g} to {max(values):.4g}", "dim")
        line.truncate(width)
        lines.append(line)
    return lines


# --- Verdict and errors --------------------------------------------------------------------------------------------


def _verdict(picture: Picture, width: int) -> list[Text]:
    lines = [Text("")]
    if picture.rows:
        said = picture.verdict
        parts = [said] if len(said) <= width else said.split("; ")
        lines += [_one_line(part, width, "bold") for part in parts]
        row = picture.steps[-1]
        waits = ", ".join(
            f"{name} {seconds:.1f} s"
            for name, key in (("trainer waited", "time_wait_rollout"), ("rollouts waited", "time_wait_trainer"))
            if (seconds := number(row.get(key))) is not None
        )
        lines.append(_one_line(f"step {max(picture.rows)}: {waits}", width, "dim"))
    return lines


def _errors(picture: Picture, width: int) -> list[Text]:
    lines = []
    for error in list(picture.errors)[-3:]:
        when = time.strftime("%H:%M:%S", time.localtime(error.time))
        cause = printable(error.cause.splitlines()[0] if error.cause else "")
        lines.append(_one_line(f"{when}  {error.role} {error.rank}: {cause}", width, "red"))
    return lines


def _one_line(text: str, width: int, style: str) -> Text:
    line = Text(text, style)
    line.truncate(width, overflow="ellipsis")
    return line


def _fit(text: str, width: int) -> str:
    return text[: width - 1] + "…" if len(text) > width else text.ljust(width)
