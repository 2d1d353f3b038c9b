"""One evaluation in progress: the held-out set under exactly one version."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from aoffpolicy.records import Evaluation
from aoffpolicy.samples import Prompt
from aoffpolicy.scheduling.groups import Finished, Outcome


class Evaluating:
    """Counts the groups of an evaluation.

    Args:
        version: The version evaluated.
        made_by: The step whose record the result belongs to; -1 for the version that the run starts with.
        prompts: The held-out set.
        now: Seconds on the event loop's clock.
    """

    def __init__(self, version: int, made_by: int, prompts: Sequence[Prompt], now: float) -> None:
        self.version = version
        self.made_by = made_by
        self.waiting = deque(prompts)
        self._missing = len(prompts)
        self._outcomes: list[Outcome] = []
        self._began = now

    def settle(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)
        self._missing -= 1

    @property
    def complete(self) -> bool:
        return self._missing == 0

    def result(self, now: float) -> Evaluation:
        stats = [outcome.stats for outcome in self._outcomes if isinstance(outcome, Finished)]
        return Evaluation.of(self.version, stats, len(self._outcomes) - len(stats), now - self._began)
