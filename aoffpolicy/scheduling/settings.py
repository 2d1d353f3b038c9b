"""What the scheduler can be asked for, and which combinations cannot be had."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from aoffpolicy.errors import SchedulerError
from aoffpolicy.samples import SampleGroup

REFILL_FACTOR = 4
"""Unless set, a step gives up refilling after so many times `prompts_per_step` groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """Settings of one `Scheduler`; everything but `steps` and `prompts_per_step` has a sensible default.

    Raises:
        SchedulerError: The settings contradict each other; the message names every fault.
    """

    steps: int
    """Training steps; fewer are done if the prompts end."""
    prompts_per_step: int
    """Groups in a batch."""
    max_staleness: int = 1
    """Versions that a trained token may be behind the version it trains; 0 is strictly on-policy."""
    ahead: int | None = None
    """Batches that may be generated, or wait, ahead of the one that trains; None: `max(max_staleness, 1)`, the most."""
    max_in_flight: int | None = None
    """Groups being generated at once, evaluation included; None leaves queueing to the `Rollout`."""

    swap: Literal["boundary", "in_flight"] = "boundary"
    """Weights are swapped between generations, or while groups are in flight, which then have tokens of several
    versions; the rollouts must be able to do that. What is evaluated is of one version either way."""

    filter_zero_variance: bool = False
    """Drop groups whose rewards are all equal: their advantages are zero."""
    keep: Callable[[SampleGroup], bool] | None = None
    """Custom filter: False drops the group."""
    on_filtered: Literal["refill", "shrink"] = "refill"
    """A dropped group, for whatever reason: dispatch the next prompt in its place, or train a smaller batch."""
    max_groups_per_step: int | None = None
    """Groups that refilling may dispatch for one step; the batch is trained as it is then. None: 4 batches."""

    group_deadline_s: float | None = None
    """Seconds for one attempt at a group; then it is cancelled and dispatched again. None: no deadline, as below."""
    max_attempts: int = 2
    """Attempts at one group, timed out or too stale, before it is dropped."""
    train_deadline_s: float | None = None
    sync_deadline_s: float | None = None
    """Seconds for one `send` and for one `load`."""
    save_deadline_s: float | None = None

    checkpoint_every: int = 0
    """Steps between checkpoints, with one more at the end; 0: only when interrupted."""
    eval_every: int = 0
    """Policy versions between evaluations, the final version always being evaluated; 0: none."""
    eval_initial: bool = False
    """Evaluate the version that the run starts with, too."""

    def __post_init__(self) -> None:
        if faults := list(self._faults()):
            raise SchedulerError("; ".join(faults))

    def _faults(self) -> Iterator[str]:
        for name, lowest in (("steps", 1), ("prompts_per_step", 1), ("max_staleness", 0), ("max_attempts", 1)):
            if getattr(self, name) < lowest:
                yield f"{name} = {getattr(self, name)} is below {lowest}"
        for name in ("ahead", "max_in_flight"):
            if (value := getattr(self, name)) is not None and value < 1:
                yield f"{name} = {value}: nothing could ever be generated"
        for name in ("group_deadline_s", "train_deadline_s", "sync_deadline_s", "save_deadline_s"):
            if (value := getattr(self, name)) is not None and not value > 0:
                yield f"{name} = {value} is no time at all; None means no deadline"
        for name in ("checkpoint_every", "eval_every"):
            if getattr(self, name) < 0:
                yield f"{name} = {getattr(self, name)} is negative; 0 means never"
        if self.eval_initial and not self.eval_every:
            yield "eval_initial = True, but evaluation is off: set eval_every"
        if self.ahead is not None and self.ahead > max(self.max_staleness, 1):
            yield (
                f"ahead = {self.ahead} cannot be had with max_staleness = {self.max_staleness}: the last of "
                f"{self.ahead} batches ahead would be trained {self.ahead} versions after the one that made it; "
                "lower ahead or raise max_staleness"
            )
        if self.max_groups_per_step is not None and self.max_groups_per_step < self.prompts_per_step:
            yield (
                f"max_groups_per_step = {self.max_groups_per_step} is less than prompts_per_step = "
                f"{self.prompts_per_step}: no batch could ever be full"
            )

    @property
    def batches_ahead(self) -> int:
        return max(self.max_staleness, 1) if self.ahead is None else self.ahead

    @property
    def group_limit(self) -> int:
        """Groups that may be dispatched for one step."""
        if self.on_filtered == "shrink":
            return self.prompts_per_step
        return self.max_groups_per_step or REFILL_FACTOR * self.prompts_per_step

    def keeps(self, group: SampleGroup) -> bool:
        """Whether the group passes the filters."""
        if self.filter_zero_variance and len({sample.reward for sample in group.samples}) <= 1:
            return False
        return self.keep is None or self.keep(group)
