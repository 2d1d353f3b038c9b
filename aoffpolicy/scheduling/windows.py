"""The window of a step: from the start of its training to the start of the next step's; every second has a name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import anyio

from aoffpolicy.records import StepRecord
from aoffpolicy.scheduling.groups import BatchStats
from aoffpolicy.scheduling.ledger import StepLedger
from aoffpolicy.scheduling.phases import Phases


class Windows:
    """Makes the records: one when the next step begins, the last one at the end of the run.

    Args:
        phases: The times.
        max_staleness: Of the run: it decides how the overlap is computed.
    """

    def __init__(self, phases: Phases, max_staleness: int) -> None:
        self._phases = phases
        self._max_staleness = max_staleness
        self._began = anyio.current_time()
        self._fill_s = 0.0
        self._ledger: StepLedger | None = None
        self._version = 0
        self._opened = 0.0
        self._busy_before: Mapping[str, float] = {}
        self.metrics: Mapping[str, float] = {}
        """What the trainer says of the step whose window is open."""

    @property
    def is_open(self) -> bool:
        return self._ledger is not None

    def open(self, ledger: StepLedger, version: int) -> StepRecord | None:
        """A step begins; returns the record of the one before."""
        record = self.close(ledger)
        self._opened = anyio.current_time()
        self._fill_s = self._opened - self._began if record is None else 0.0
        self._ledger, self._version = ledger, version
        self._busy_before = self._phases.read()
        self.metrics = {}
        return record

    def close(self, following: StepLedger | None = None) -> StepRecord | None:
        """The record of the step whose window is open; without a following step it is the last one."""
        if self._ledger is None:
            return None
        ledger, self._ledger = self._ledger, None
        now = anyio.current_time()
        wall = now - self._opened
        busy = _since(self._busy_before, self._phases.read())
        evaluating = max(0.0, busy["rollout"] - busy["generate"])
        swapping = busy["send"] + busy["load"]
        batch = BatchStats.of(ledger.stats, self._version)
        overlap = None
        if following is not None and ledger.finished:
            overlap = overlap_efficiency(wall, busy, following.generated_since(self._opened), self._max_staleness)
        return StepRecord(
            step=ledger.step,
            policy_version=self._version,
            skipped=not ledger.finished,
            reward_mean=batch.reward_mean,
            reward_std=batch.reward_std,
            staleness_max=batch.staleness_max,
            staleness_mean=batch.staleness_mean,
            prompt_tokens=batch.prompt_tokens,
            completion_tokens=batch.completion_tokens,
            truncated_fraction=batch.truncated_fraction,
            groups_dispatched=ledger.dispatched,
            groups_trained=len(ledger.finished),
            groups_dropped=dict(ledger.dropped),
            groups_retried=ledger.retries,
            time_step=wall,
            time_fill=self._fill_s,
            time_generate=ledger.generate_s,
            time_train=busy["train"],
            time_sync=busy["send"],
            time_load=busy["load"],
            time_checkpoint=busy["checkpoint"],
            time_eval=evaluating,
            time_rollout=max(0.0, busy["occupied"] - swapping - evaluating),
            time_wait_rollout=max(0.0, wall - busy["train"] - busy["send"] - busy["checkpoint"]),
            time_wait_trainer=max(0.0, wall - busy["occupied"]),
            overlap_efficiency=overlap,
            metrics=self.metrics,
        )


def overlap_efficiency(
    wall: float, busy: Mapping[str, float], next_generate: float, max_staleness: int
) -> float | None:
    """How much of a step's time its longer phase accounts for; 1 is perfect, 0.5 is one phase after the other.

    Args:
        wall: Length of the step's window in seconds.
        busy: Seconds in it that each activity was going on.
        next_generate: Seconds from first dispatch to last scored group of the next step, inside the window.
        max_staleness: Above 1 several steps are generated at once, so that the rollouts' busy time counts instead.
    """
    if wall < CLOCK_TICK_S:
        return None
    generate = next_generate if max_staleness <= 1 else busy["rollout"]
    return max(generate, busy["train"]) / wall


CLOCK_TICK_S = 1e-6
"""Shorter windows are none."""


def _since(before: Mapping[str, float], after: Mapping[str, float]) -> Mapping[str, float]:
    """Seconds of each activity between two readings; 0 for those that never were."""
    return defaultdict(float, {name: max(0.0, seconds - before.get(name, 0.0)) for name, seconds in after.items()})
