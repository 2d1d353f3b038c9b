"""The page: what happened in a run, in the order in which people ask."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from importlib import resources

from aoffpolicy.recorded import RecordedRun, Row, number
from aoffpolicy.report import gantt, texts
from aoffpolicy.report.svg import Series, escape, figure, legend, line_chart, stacked_bars

TABLE_ROWS = 500
"""Steps in the table, the newest ones."""
COLUMNS = (
    "step",
    "policy_version",
    "reward_mean",
    "reward_std",
    "loss",
    "grad_norm",
    "staleness_max",
    "staleness_mean",
    "time_step",
    "time_generate",
    "time_train",
    "time_sync",
    "time_load",
    "time_wait_rollout",
    "time_wait_trainer",
    "overlap_efficiency",
    "logprob_abs_diff",
    "truncated_fraction",
)
"""Of the table; metrics.jsonl has more."""
TRAINER_TIMES = (
    ("train", "train", "time_train"),
    ("send weights", "send", "time_sync"),
    ("checkpoint", "checkpoint", "time_checkpoint"),
    ("wait for rollouts", "wait", "time_wait_rollout"),
)
ROLLOUT_TIMES = (
    ("generate", "generate", "time_rollout"),
    ("evaluate", "eval", "time_eval"),
    ("weights on their way", "send", "time_sync"),
    ("load weights", "load", "time_load"),
    ("wait for the trainer", "wait", "time_wait_trainer"),
)
"""Name, colour and metric; each list adds up to time_step."""


def render(run: RecordedRun) -> str:
    """The whole page; it holds no script and loads nothing."""
    style = resources.files("aoffpolicy.report").joinpath("style.css").read_text()
    slowest = _section("Slowest groups", texts.groups(run.slowest), "slowest")
    sections = (_head(run), _tiles(run), _gantt(run), _charts(run), _waits(run), slowest, _table(run), _config(run))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(run.name)}</title><style>{style}</style></head><body><main>\n"
        + "\n".join(sections)
        + "\n</main></body></html>\n"
    )


def _head(run: RecordedRun) -> str:
    failure = f"{run.failure.role} {run.failure.rank}: {run.failure.cause}" if run.failure else ""
    return (
        f'<header><h1>{escape(run.name)}</h1><p class="dim" id="state">{escape(run.state)}, '
        f'{len(run.rows)} steps</p><p id="verdict">{escape(run.verdict)}</p>'
        + (f'<p class="failure">{escape(failure)}</p>' if failure else "")
        + "</header>"
    )


def _tiles(run: RecordedRun) -> str:
    steady = [row for row in run.rows[:-1] if not row.get("skipped")] or list(run.rows)
    rewards = [value for value in run.values("reward_mean") if value is not None]
    ends = f"{sum(rewards[:3]) / 3:.2f} → {sum(rewards[-3:]) / 3:.2f}" if len(rewards) >= 3 else "-"
    tokens, seconds = _total(run.rows, "completion_tokens"), _total(run.rows, "time_step")
    tiles = (
        (ends, "mean reward, first and last 3 steps"),
        (f"{figure(_median(steady, 'time_step'))} s", "a step, median"),
        (figure(_median(steady, "overlap_efficiency")), "overlap efficiency, median"),
        (_share(steady, "time_wait_rollout"), "trainer waits for rollouts"),
        (_share(steady, "time_wait_trainer"), "rollouts wait for the trainer"),
        (figure(tokens / seconds) if seconds else "-", "completion tokens trained a second"),
    )
    return (
        '<div class="tiles">'
        + "".join(f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for value, name in tiles)
        + "</div>"
    )


def _gantt(run: RecordedRun) -> str:
    chart = gantt.draw(run.spans)
    if chart is None:
        return _section("Overlap", '<p class="none">no timeline.json yet: it is written from time to time</p>')
    notes = ["Boxes carry their step; generation of step N+1 lies over training of step N."]
    if chart.first_step:
        notes.append(f"Steps before {chart.first_step} are left out here; timeline.json has them.")
    if chart.workers_left_out:
        notes.append(f"{chart.workers_left_out} more workers are in timeline.json.")
    keys = [Series(name, name, ()) for name in chart.styles]
    return _section(
        "Overlap", f'<p class="dim">{" ".join(notes)}</p><div class="scroll">{chart.svg}</div>{legend(keys)}', "gantt"
    )


def _charts(run: RecordedRun) -> str:
    charts = (
        ("Reward", [Series("mean", "generate", run.values("reward_mean")), _evaluation(run)], False),
        ("Loss", [Series("loss", "train", run.values("loss"))], False),
        (
            "Staleness, in versions",
            [
                Series("oldest token", "train", run.values("staleness_max")),
                Series("mean", "generate", run.values("staleness_mean")),
            ],
            True,
        ),
        (
            "Weight sync, in seconds",
            [Series("send", "send", run.values("time_sync")), Series("load", "load", run.values("time_load"))],
            True,
        ),
        ("Gradient norm", [Series("norm", "train", run.values("grad_norm"))], True),
        (
            "Trainer against rollout: mean |Δ log-probability|",
            [Series("|Δ|", "generate", run.values("logprob_abs_diff"))],
            True,
        ),
    )
    steps = _steps(run)
    drawn = []
    for name, every, from_zero in charts:
        series = [s for s in every if any(value is not None for value in s.values)]
        body = line_chart(name, steps, series, from_zero=from_zero) if steps else ""
        drawn.append(_section(name, body + (legend(series) if len(series) > 1 else ""), "chart"))
    return f'<div class="charts">{"".join(drawn)}</div>'


def _evaluation(run: RecordedRun) -> Series:
    return Series("evaluation", "eval", run.values("eval_reward_mean"))


def _waits(run: RecordedRun) -> str:
    drawn = []
    for title, times in (
        ("Where the trainer's time went", TRAINER_TIMES),
        ("Where the rollouts' time went", ROLLOUT_TIMES),
    ):
        series = [Series(name, style, run.values(key)) for name, style, key in times]
        bars = stacked_bars(title, _steps(run), series) + legend(series)
        drawn.append(_section(f"{title}, seconds a step", bars + _totals(run, times), "waits"))
    return f'<div class="charts">{"".join(drawn)}</div>'


def _totals(run: RecordedRun, times: Sequence[tuple[str, str, str]]) -> str:
    wall = _total(run.rows, "time_step")
    rows = ""
    for name, _, key in times:
        seconds = _total(run.rows, key)
        rows += f"<tr><td>{escape(name)}</td>"
        rows += f'<td data-total="{key}" data-value="{seconds!r}">{figure(seconds)}</td>'
        rows += f"<td>{_percent(seconds, wall)}</td></tr>"
    return f"<table><tr><th></th><th>seconds</th><th>share</th></tr>{rows}</table>"


def _table(run: RecordedRun) -> str:
    shown = run.rows[-TABLE_ROWS:]
    head = "".join(f"<th>{name}</th>" for name in COLUMNS)
    body = "".join(
        f'<tr data-step="{int(row["step"])}">' + "".join(_cell(row, name) for name in COLUMNS) + "</tr>"
        for row in shown
    )
    note = f'<p class="dim">the newest {len(shown)} of {len(run.rows)}</p>' if len(shown) < len(run.rows) else ""
    table = f'<div class="scroll"><table id="steps"><tr>{head}</tr>{body}</table></div>'
    return _section("Steps", f"<details><summary>figures of every step</summary>{note}{table}</details>")


def _cell(row: Row, name: str) -> str:
    value = number(row.get(name))
    shown = "skipped" if name == "reward_mean" and row.get("skipped") else figure(value)
    return f'<td data-key="{name}" data-value="{value!r}">{shown}</td>'


def _config(run: RecordedRun) -> str:
    return _section("Config", f"<details><summary>config.toml</summary><pre>{escape(run.config)}</pre></details>")


def _section(title: str, body: str, style: str = "") -> str:
    return f'<section class="{style}"><h2>{escape(title)}</h2>{body}</section>'


def _steps(run: RecordedRun) -> list[int]:
    return [int(row["step"]) for row in run.rows]


def _total(rows: Sequence[Row], key: str) -> float:
    return sum(number(row.get(key)) or 0.0 for row in rows)


def _share(rows: Sequence[Row], key: str) -> str:
    return _percent(_total(rows, key), _total(rows, "time_step"))


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def _median(rows: Sequence[Row], key: str) -> float | None:
    known = [value for row in rows if (value := number(row.get(key))) is not None]
    return statistics.median(known) if known else None
