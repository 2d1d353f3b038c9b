"""The window of a step: from the start of its training to the start of the next step's; every second has a name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from aoffpolicy.records import StepRecord
from aoffpolicy.scheduling.groups import BatchStats
from aoffpolicy.scheduling.ledger import StepLedger


@dataclass(slots=True)
class Window:
    """A step that has begun; `close` turns it into its record."""

    ledger: StepLedger
    version: int
    opened: float
    busy_before: Mapping[str, float]
    """The meter at the start of the window."""
    fill_s: float
    metrics: Mapping[str, float] = field(default_factory=dict)

    def close(
        self, now: float, busy_after: Mapping[str, float], following: StepLedger | None, max_staleness: int
    ) -> StepRecord:
        """The step's record.

        Args:
            now: End of the window.
            busy_after: The meter at the end of the window.
            following: The next step's groups; None when there is no next step.
            max_staleness: Of the run: it decides how the overlap is computed.
        """
        busy = Counter(busy_after)
        busy.subtract(self.busy_before)
        wall = now - self.opened
        skipped = not self.ledger.finished
        batch = BatchStats.of(self.ledger.stats, self.version)
        return StepRecord(
            step=self.ledger.step,
            policy_version=self.version,
            skipped=skipped,
            reward_mean=batch.reward_mean,
            reward_std=batch.reward_std,
            staleness_max=batch.staleness_max,
            staleness_mean=batch.staleness_mean,
            prompt_tokens=batch.prompt_tokens,
            completion_tokens=batch.completion_tokens,
            truncated_fraction=batch.truncated_fraction,
            groups_dispatched=self.ledger.dispatched,
            groups_trained=len(self.ledger.finished),
            groups_dropped=dict(self.ledger.dropped),
            groups_retried=self.ledger.retries,
            time_step=wall,
            time_fill=self.fill_s,
            time_generate=self.ledger.generate_s,
            time_train=busy["train"],
            time_sync=busy["send"],
            time_load=busy["load"],
            time_checkpoint=busy["checkpoint"],
            time_eval=busy["rollout"] - busy["generate"],
            time_rollout=busy["generate"],
            time_wait_rollout=max(0.0, wall - busy["train"] - busy["send"] - busy["checkpoint"]),
            time_wait_trainer=max(0.0, wall - busy["rollout"] - busy["send"] - busy["load"]),
            overlap_efficiency=None
            if skipped or following is None
            else overlap_efficiency(wall, busy, following.generate_s, max_staleness),
            metrics=self.metrics,
        )


def overlap_efficiency(
    wall: float, busy: Mapping[str, float], next_generate: float, max_staleness: int
) -> float | None:
    """How much of a step's time its longer phase accounts for; 1 is perfect, 0.5 is one phase after the other.

    Args:
        wall: Length of the step's window in seconds.
        busy: Seconds in it that each activity was going on.
        next_generate: Seconds from first dispatch to last scored group of the next step.
        max_staleness: Above 1 several steps are generated at once, so that the rollouts' busy time counts instead.
    """
    if wall <= 0:
        return None
    generate = next_generate if max_staleness <= 1 else busy["rollout"]
    return max(generate, busy["train"]) / wall
