"""Why a run is slow or stands still, in a few sentences that come from measured spans alone."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from aoffpolicy.recorded import number
from aoffpolicy.samples.log import GroupRecord
from aoffpolicy.status.picture import Picture
from aoffpolicy.text import duration, printable
from aoffpolicy.transport.events import PhaseEvent, WorkerEvent

SILENCE_S = 5.0
"""The launcher says something every second while it lives; longer silence is worth a word."""
STALL_FACTOR, STALL_S = 3.0, 10.0
"""A phase is stalled when it takes so many times its median, and is so many seconds over it."""
SLOWER, UNEVEN = 1.25, 0.5
"""Steps have become slower by this factor; a rollout worker is slow at this part of the others' speed."""
FEW = 8
"""Steps needed to speak of a trend."""
STRAGGLER = 2.0
"""A slowest group so many times slower than the median one is worth a word."""
VERBS = {
    "generate": "generating",
    "train": "training",
    "send": "sending the weights of",
    "load": "loading the weights of",
    "eval": "evaluating after",
    "checkpoint": "saving after",
}
ROLES = {"generate": "rollout", "eval": "rollout", "load": "rollout"}
"""Whose logs to look into; the trainer's for the other phases."""
PARTS = {
    "time_train": "training",
    "time_rollout": "generating",
    "time_sync": "sending weights",
    "time_load": "loading weights",
    "time_eval": "evaluating",
    "time_checkpoint": "saving",
}


def explain(picture: Picture, now: float, groups: Sequence[GroupRecord] = ()) -> list[str]:
    """Sentences, the most urgent first.

    Args:
        picture: What is known.
        now: Unix seconds, on the launcher's clock.
        groups: Of the newest step, if their times are known.
    """
    return [*_state(picture, now), *_now(picture, now), *_waits(picture), *_trend(picture), *_uneven(picture, groups)]


def _state(picture: Picture, now: float) -> Iterator[str]:
    run = picture.run
    if run is None:
        yield "Nothing is known of the run yet."
        return
    done = f"{len(picture.rows)} of {run.steps} steps are recorded"
    if run.state == "failed":
        yield f"The run {run.name} has failed; {done}."
    else:
        yield f"The run {run.name} is {run.state}; {done}."
    if not picture.ended and now - picture.time > SILENCE_S:
        yield (
            f"Nothing was heard of it for {duration(now - picture.time)}, although a launcher that lives speaks every "
            "second: it is gone, stopped, or cut off from here; see logs/launch.log."
        )
    yield from (f"Worker {w.role} {w.rank} is lost: {printable(w.detail)}." for w in _in_state(picture, "lost"))
    yield from _restarts(picture)
    if errors := list(picture.errors):
        last = errors[-1]
        yield f"The last error came from {last.role} {last.rank}: {printable(last.cause.splitlines()[0])}."


def _now(picture: Picture, now: float) -> Iterator[str]:
    if picture.state == "starting":
        late = _in_state(picture, "starting")
        if late:
            words = [f"{w.role} {w.rank}" + (f" ({printable(w.detail)})" if w.detail else "") for w in late]
            yield f"It is waiting for {_and(words)} to be ready."
    for phase in sorted(picture.open.values(), key=lambda p: p.time):
        yield _of_phase(picture, phase, max(0.0, now - phase.time))


def _restarts(picture: Picture) -> Iterator[str]:
    """Workers that are being started again, and those that wait for their first weights since."""
    if picture.state != "running":
        return
    for worker in picture.of_role("rollout"):
        if worker.state == "starting":
            yield f"Rollout {worker.rank} is being started again; its groups went to others."
        elif worker.state == "ready" and worker.version < 0:
            yield f"Rollout {worker.rank} was started again and gets weights with the next version."


def _of_phase(picture: Picture, phase: PhaseEvent, seconds: float) -> str:
    said = f"It has been {VERBS.get(phase.name, phase.name)} step {phase.step} for {duration(seconds)}"
    lasted = picture.lasted(phase.name)
    if not lasted:
        return f"{said}, and there is none before it to compare with."
    median = statistics.median(lasted)
    said += f"; such a phase takes {median:.1f} s in the median"
    if seconds > max(STALL_FACTOR * median, median + STALL_S):
        role = ROLES.get(phase.name, "trainer")
        return (
            f"{said}, so this one is stalled or {seconds / max(median, 1e-9):.0f} times slower: see logs/{role}-*.log."
        )
    return f"{said}."


def _waits(picture: Picture) -> Iterator[str]:
    rows = [row for row in picture.steps[:-1] if not row.get("skipped")]
    wall = sum(number(row.get("time_step")) or 0.0 for row in rows)
    if not wall:
        yield "There are too few steps to tell who waits for whom."
        return
    yield f"{picture.verdict[0].upper()}{picture.verdict[1:]}."
    shares = [
        f"{text} {total / len(rows):.1f} s ({total / wall:.0%})"
        for key, text in (
            ("time_wait_rollout", "the trainer waits for rollouts"),
            ("time_wait_trainer", "the rollouts wait for new weights"),
            ("time_sync", "sending weights takes"),
            ("time_load", "loading them"),
            ("time_eval", "evaluation"),
            ("time_checkpoint", "saving"),
        )
        if (total := sum(number(row.get(key)) or 0.0 for row in rows)) / wall >= 0.01
    ]
    yield f"Of a step of {wall / len(rows):.1f} s in the mean, " + (_and(shares) or "nobody waits") + "."


def _trend(picture: Picture) -> Iterator[str]:
    rows = [row for row in picture.steps[:-1] if not row.get("skipped")]
    if len(rows) < FEW:
        return
    quarter = len(rows) // 4
    early, late = rows[:quarter], rows[-quarter:]
    before, after = _median(early, "time_step"), _median(late, "time_step")
    if after < SLOWER * before:
        return
    grown = {name: _median(late, key) - _median(early, key) for key, name in PARTS.items()}
    most = max(grown, key=lambda name: grown[name])
    tokens = _median(early, "completion_tokens"), _median(late, "completion_tokens")
    yield (
        f"Steps have become slower, from {before:.1f} to {after:.1f} s; most of it is {most} (+{grown[most]:.1f} s)"
        + (f", with {tokens[1] / tokens[0]:.1f} times the completion tokens." if tokens[0] else ".")
    )


def _uneven(picture: Picture, groups: Sequence[GroupRecord]) -> Iterator[str]:
    speeds = {w.rank: w.tokens_per_s for w in picture.of_role("rollout") if w.tokens_per_s > 0}
    if len(speeds) > 1:
        slowest = min(speeds, key=lambda rank: speeds[rank])
        median = statistics.median(speeds.values())
        if speeds[slowest] < UNEVEN * median:
            yield (
                f"Rollout {slowest} makes {speeds[slowest]:.0f} tokens a second where the median of all is "
                f"{median:.0f}: its device is slow or shared."
            )
    yield from _straggler(groups)


def _straggler(groups: Sequence[GroupRecord]) -> Iterator[str]:
    """What the slowest group of a step cost, if it is far slower than the others."""
    if len(groups) < 2:
        return
    slowest = max(groups, key=lambda group: group.generate_s)
    median = statistics.median(group.generate_s for group in groups)
    if slowest.generate_s > STRAGGLER * max(median, 1e-9):
        tokens = max((c.tokens for c in slowest.completions), default=0)
        yield (
            f"In step {slowest.step} the slowest group (prompt {slowest.uid}, up to {tokens} tokens, rollout "
            f"{slowest.rollout}) took {slowest.generate_s:.1f} s, the median one {median:.1f} s: generation waits for "
            "stragglers."
        )


def _in_state(picture: Picture, state: str) -> list[WorkerEvent]:
    return [worker for _, worker in sorted(picture.workers.items()) if worker.state == state]


def _median(rows: Sequence[object], key: str) -> float:
    known = [value for row in rows if isinstance(row, dict) and (value := number(row.get(key))) is not None]
    return statistics.median(known) if known else 0.0


def _and(parts: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1]))) if parts else ""
