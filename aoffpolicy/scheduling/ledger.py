"""Accounts of the groups of one step: each that is dispatched ends as finished or dropped, exactly once."""

from __future__ import annotations

import math
from collections import Counter, deque

from aoffpolicy.samples import SampleGroup
from aoffpolicy.scheduling.groups import DROP_REASONS, DropReason, Finished, GroupStats, Outcome
from aoffpolicy.scheduling.state import OpenStep


class StepLedger:
    """The groups of one step.

    Args:
        step: The training step.
        wanted: Groups in a full batch.
        limit: Groups that may be dispatched in all, replacements of dropped ones included.
    """

    def __init__(self, step: int, wanted: int, limit: int) -> None:
        self.step = step
        self.dispatched = 0
        self.retries = 0
        self.dropped: Counter[DropReason] = Counter()
        self.again: deque[int] = deque()
        """Prompts dispatched once whose groups were lost, with a restart or with all rollouts."""
        self.in_flight: set[int] = set()
        self.finished: dict[int, Finished] = {}
        self.first_dispatch: float | None = None
        self.last_scored: float | None = None
        self.reported = False
        """The end of generation was told to the observer."""
        self._wanted = wanted
        self._limit = limit

    @classmethod
    def restored(cls, saved: OpenStep, wanted: int, limit: int, oldest_allowed: int) -> StepLedger:
        """Go on with the groups of a step; those that are too old by now are generated again."""
        ledger = cls(saved.step, wanted, limit)
        ledger.dispatched = saved.dispatched
        ledger.retries = saved.retries
        ledger.dropped = Counter({reason: n for reason in DROP_REASONS if (n := saved.dropped.get(reason, 0))})
        again = list(saved.pending)
        for group in saved.finished:
            stats = GroupStats.of(group)
            if stats.oldest_version < oldest_allowed:
                again.append(group.prompt.uid)
            else:
                ledger.finished[group.prompt.uid] = Finished(group, stats, retries=0)
        ledger.again.extend(sorted(again))
        if not (ledger.finished or ledger.again or ledger.dropped["filtered"]):
            ledger._limit += ledger.dispatched  # the run ended because nothing came; now it may be tried again
        return ledger

    def save(self) -> OpenStep:
        """What `restored` needs; groups in flight are pending there."""
        return OpenStep(
            step=self.step,
            dispatched=self.dispatched,
            retries=self.retries,
            dropped={str(reason): count for reason, count in self.dropped.items()},
            pending=tuple(sorted({*self.again, *self.in_flight})),
            finished=self.groups,
        )

    @property
    def missing(self) -> int:
        """Fresh prompts that the batch still needs."""
        promised = len(self.finished) + len(self.in_flight) + len(self.again)
        return min(self._wanted - promised, self._limit - self.dispatched)

    @property
    def unfinished(self) -> bool:
        return bool(self.in_flight or self.again)

    @property
    def groups(self) -> tuple[SampleGroup, ...]:
        """The batch in the order of the data, so that it does not depend on who finished first."""
        return tuple(self.finished[uid].group for uid in sorted(self.finished))

    @property
    def stats(self) -> tuple[GroupStats, ...]:
        return tuple(finished.stats for finished in self.finished.values())

    @property
    def generate_s(self) -> float:
        """Seconds from the first dispatch to the last scored group."""
        return self.generated_since(-math.inf)

    def generated_since(self, time: float) -> float:
        """The part of `generate_s` after a point in time."""
        if self.first_dispatch is None or self.last_scored is None:
            return 0.0
        return max(0.0, self.last_scored - max(self.first_dispatch, time))

    def dispatch(self, uid: int, now: float, *, fresh: bool) -> None:
        """A group is started: of a fresh prompt, or of one whose earlier group was lost."""
        self.dispatched += fresh
        self.in_flight.add(uid)
        if self.first_dispatch is None:
            self.first_dispatch = now

    def lose(self, uid: int) -> None:
        """A group in flight was lost with all rollouts: its prompt has to be dispatched again."""
        self.in_flight.remove(uid)
        self.retries += 1
        self.again = deque(sorted([*self.again, uid]))

    def settle(self, uid: int, outcome: Outcome, now: float) -> None:
        """A group in flight has come to its end."""
        self.in_flight.remove(uid)
        self.retries += outcome.retries
        self.last_scored = now
        if isinstance(outcome, Finished):
            self.finished[uid] = outcome
        else:
            self.dropped[outcome.reason] += 1
