"""What a person at the terminal sees of a run: progress of the start, then a line for every step."""

from __future__ import annotations

import time

from rich.console import Console

from aoffpolicy.records import StepRecord

COLUMNS = (
    ("step", 5),
    ("reward", 7),
    ("generate", 9),
    ("train", 8),
    ("sync", 6),
    ("load", 6),
    ("step s", 8),
    ("waited for", 17),
    ("overlap", 8),
    ("stale", 6),
    ("Δlogprob", 9),
)


class StepPrinter:
    """Prints plain lines, so that a log file reads like the terminal did."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._started = time.monotonic()
        self._header_due = True

    def say(self, text: str) -> None:
        self._console.print(f"[dim]{time.monotonic() - self._started:7.1f} s[/dim]  {text}", highlight=False)

    def step(self, record: StepRecord) -> None:
        if self._header_due:
            self._header_due = False
            self._console.print("  ".join(f"{name:>{width}}" for name, width in COLUMNS), style="bold")
        cells = zip(COLUMNS, _cells(record), strict=True)
        self._console.print("  ".join(f"{text:>{width}}" for (_, width), text in cells), highlight=False)


def _cells(record: StepRecord) -> tuple[str, ...]:
    row = record.as_row()
    return (
        str(record.step),
        f"{row['reward_mean']:.3f}" if not record.skipped else "skipped",
        f"{row['time_generate']:.1f}",
        f"{row['time_train']:.1f}",
        f"{row['time_sync']:.2f}",
        f"{row['time_load']:.2f}",
        f"{row['time_step']:.1f}",
        _waited(row["time_wait_rollout"], row["time_wait_trainer"]),
        f"{row['overlap_efficiency']:.2f}" if row["overlap_efficiency"] is not None else "-",
        str(row["staleness_max"]),
        f"{row['logprob_abs_diff']:.1e}" if "logprob_abs_diff" in row else "-",
    )


def _waited(for_rollout_s: float, for_trainer_s: float) -> str:
    """The longer of the two waits: the trainer's for samples, or the rollouts' for new weights."""
    if for_rollout_s >= for_trainer_s:
        return f"rollout {for_rollout_s:5.1f} s"
    return f"trainer {for_trainer_s:5.1f} s"
