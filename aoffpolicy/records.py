"""What the scheduler tells of a run: a record for every step, phases as they begin and end, and a verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Protocol

from aoffpolicy.scheduling.groups import DROP_REASONS, DropReason, GroupStats

PhaseName = Literal["generate", "train", "send", "load", "eval", "checkpoint"]


@dataclass(frozen=True, slots=True)
class PhaseEvent:
    """A phase begins or ends."""

    name: PhaseName
    step: int
    """Step that the phase belongs to; for send, load and eval the one that made the version (-1: the initial one)."""
    version: int
    """That it uses (generate, train, eval), brings to the rollouts (send, load) or saves (checkpoint)."""
    state: Literal["begin", "end"]
    time: float
    """Seconds on the event loop's clock."""
    seconds: float = 0.0
    """Duration, at the end; 0 at the beginning."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The held-out set on exactly one version."""

    version: int
    reward_mean: float
    """Over all samples; nan if every group was dropped."""
    groups: int
    groups_dropped: int
    completion_tokens: int
    truncated_fraction: float
    time: float
    """Seconds from the first dispatch to the last scored group."""

    @classmethod
    def of(cls, version: int, stats: Sequence[GroupStats], dropped: int, seconds: float) -> Evaluation:
        rewards = [reward for group in stats for reward in group.rewards]
        return cls(
            version=version,
            reward_mean=_mean(rewards),
            groups=len(stats),
            groups_dropped=dropped,
            completion_tokens=sum(group.completion_tokens for group in stats),
            truncated_fraction=sum(group.truncated for group in stats) / max(len(rewards), 1),
            time=seconds,
        )


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Everything about one step. Times are seconds on the event loop's clock.

    The **window** of a step goes from the start of its training to the start of the next step's, for the last step
    to the end of the run. In it, exactly, for the trainer and for the rollouts:

        time_step = time_train + time_sync + time_checkpoint + time_wait_rollout
        time_step = time_rollout + time_eval + time_sync + time_load + time_wait_trainer
    """

    step: int
    policy_version: int
    """Version that the step trained."""
    skipped: bool
    """Every group was dropped: nothing was trained, and the version stays."""

    reward_mean: float
    """Over the samples trained; nan if skipped, like the next."""
    reward_std: float
    staleness_max: int
    """Versions that the oldest trained token was behind; 0 if skipped, like the next."""
    staleness_mean: float
    """Over the trained tokens."""
    prompt_tokens: int
    """Every group's prompt counted once."""
    completion_tokens: int
    truncated_fraction: float
    """Of the samples trained: cut off at their length limit."""

    groups_dispatched: int
    """Equals groups_trained + the sum of groups_dropped."""
    groups_trained: int
    groups_dropped: Mapping[DropReason, int]
    groups_retried: int
    """Attempts that were dispatched again, in vain or not; the group is counted once."""

    time_step: float
    """Length of the window."""
    time_fill: float
    """First step only: seconds from the start of the run to the window; 0 later."""
    time_generate: float
    """First dispatch to last scored group of this step's batch; for max_staleness 1 this was in the window before."""
    time_train: float
    """Batch received to optimizer done."""
    time_sync: float
    """In the window: sending weights; neither training nor generation runs."""
    time_load: float
    """In the window: rollouts load weights; no generation runs, training may."""
    time_checkpoint: float
    """In the window: saving; generation may run."""
    time_eval: float
    """In the window: rollouts evaluate and generate nothing to train on."""
    time_rollout: float
    """In the window: at least one group to train on is being generated."""
    time_wait_rollout: float
    """In the window: the trainer is idle, for want of samples or until rollouts are ready for new weights."""
    time_wait_trainer: float
    """In the window: rollouts are idle, for want of new weights."""
    overlap_efficiency: float | None
    """max(generate of the next step, train of this one) / time_step; with max_staleness over 1 the busier of rollouts
    and trainer / time_step. None for the last step and for skipped ones: there is nothing to overlap."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """What `Trainer.train` returned."""
    evaluation: Evaluation | None = None
    """Of the version that this step made, if one was due."""
    initial_evaluation: Evaluation | None = None
    """First step only: of the version that the run started with, if asked for."""

    def as_row(self) -> dict[str, Any]:
        """Flat and ready for JSON; where a trainer's metric has the name of a field, the field stands."""
        row: dict[str, Any] = dict(self.metrics)
        row |= {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _NESTED}
        row |= {f"groups_dropped_{reason}": self.groups_dropped.get(reason, 0) for reason in DROP_REASONS}
        for prefix, evaluation in (("eval_", self.evaluation), ("eval_initial_", self.initial_evaluation)):
            if evaluation is not None:
                row |= {prefix + f.name: getattr(evaluation, f.name) for f in fields(evaluation)}
        return {key: None if value != value else value for key, value in row.items()}  # nan is no JSON


_NESTED = {"metrics", "groups_dropped", "evaluation", "initial_evaluation"}


class StepLike(Protocol):
    """What a verdict needs to know of a step; a `StepRecord` has it."""

    @property
    def skipped(self) -> bool: ...
    @property
    def time_step(self) -> float: ...
    @property
    def time_train(self) -> float: ...
    @property
    def time_sync(self) -> float: ...
    @property
    def time_load(self) -> float: ...
    @property
    def time_eval(self) -> float: ...
    @property
    def time_rollout(self) -> float: ...
    @property
    def time_wait_rollout(self) -> float: ...
    @property
    def time_wait_trainer(self) -> float: ...


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The same, from a row of metrics.jsonl or of a `StepEvent`. Seconds; see `StepRecord`."""

    skipped: bool
    time_step: float
    time_train: float
    time_sync: float
    time_load: float
    time_eval: float
    time_rollout: float
    time_wait_rollout: float
    time_wait_trainer: float

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> StepTimes:
        """Times that the row does not have are 0."""
        times = {f.name: float(row.get(f.name) or 0.0) for f in fields(cls) if f.name != "skipped"}
        return cls(skipped=bool(row.get("skipped")), **times)


def verdict(records: Sequence[StepLike], rollout_workers: int | None = None) -> str:
    """Who waits for whom, and what would help, in one line.

    Args:
        records: A run's records in order; the last drain and skipped steps are left out.
        rollout_workers: Number of equal rollout workers, if known: the advice is then in workers.
    """
    steady = [r for r in records[:-1] if not r.skipped and r.time_step > 0]
    if not steady:
        return "too few steps to tell who waits for whom"
    wall = sum(r.time_step for r in steady)
    train = sum(r.time_train for r in steady) / wall
    generate = sum(r.time_rollout + r.time_eval for r in steady) / wall
    trainer_idle = sum(r.time_wait_rollout for r in steady) / wall
    rollout_idle = sum(r.time_wait_trainer for r in steady) / wall
    swap = sum(r.time_sync + r.time_load for r in steady) / wall
    if train + generate + swap < 1.001 and min(train, generate) > SMALL:  # nothing ran beside anything else
        return (
            f"sequential: generating {generate:.0%}, training {train:.0%} of the step; "
            f"overlapping them (max_staleness 1) would save up to {min(train, generate):.0%}"
        )
    if swap > max(trainer_idle, rollout_idle, SMALL):
        return f"sync-bound: sending and loading weights takes {swap:.0%} of the step"
    if max(trainer_idle, rollout_idle) <= SMALL:
        return f"balanced: trainer idle {trainer_idle:.0%}, rollouts idle {rollout_idle:.0%}"
    if trainer_idle >= rollout_idle:
        saving = generate - max(train, generate / 2)
        help_by = "rollouts twice as fast"
        if rollout_workers:
            more = max(1, round(rollout_workers * generate / max(train, 0.01)) - rollout_workers)
            saving = generate - max(train, generate * rollout_workers / (rollout_workers + more))
            help_by = f"{more} more rollout worker{'s' if more > 1 else ''}"
        return f"rollout-bound: trainer idle {trainer_idle:.0%}; {help_by} would save about {saving:.0%} of the step"
    saving = train - max(generate, train / 2)
    return (
        f"trainer-bound: rollouts idle {rollout_idle:.0%}; a trainer twice as fast would save about "
        f"{saving:.0%} of the step"
    )


SMALL = 0.05
"""Shares of a step below this are not worth advice."""


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
