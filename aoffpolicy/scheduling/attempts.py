"""Getting one group out of the rollouts: deadlines, further attempts, and the reasons to refuse what came."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import anyio

from aoffpolicy.errors import SchedulerError
from aoffpolicy.protocols import GroupDropped, GroupRequest, Rollout
from aoffpolicy.samples import SampleGroup
from aoffpolicy.scheduling.calls import CallDeadlineError, call_role
from aoffpolicy.scheduling.groups import Dropped, DropReason, Finished, GroupStats, Outcome
from aoffpolicy.scheduling.settings import SchedulerSettings

logger = logging.getLogger(__name__)


class GroupAttempts:
    """Asks the rollouts for groups.

    An attempt that runs past its deadline is cancelled before the next one starts, so that a late answer finds nobody
    who waits for it, and a group arrives at most once.

    Args:
        rollout: Generates groups.
        settings: Deadlines and filters.
        loaded: The version that the rollouts have now.
        sent: The newest version that they may have, being sent or loaded.
    """

    def __init__(
        self, rollout: Rollout, settings: SchedulerSettings, *, loaded: Callable[[], int], sent: Callable[[], int]
    ) -> None:
        self._rollout = rollout
        self._settings = settings
        self._loaded = loaded
        self._sent = sent
        self._desk = anyio.Lock()

    async def group(self, request: GroupRequest, oldest_allowed: int) -> Outcome:
        """One group, in as many attempts as are allowed.

        Args:
            request: The order, attempt 0.
            oldest_allowed: The lowest policy version that its tokens may come from.

        Raises:
            SchedulerError: The answer is impossible: tokens of a version never loaded, another prompt, a reward of nan.
        """
        attempt = 0
        while True:
            order = replace(request, attempt=attempt, version=self._loaded())
            outcome = await self._attempt(order, oldest_allowed)
            if isinstance(outcome, Finished) or outcome.reason not in ("timed_out", "too_stale"):
                return outcome
            if attempt + 1 == self._settings.max_attempts:
                logger.warning("prompt %d is dropped: %s", request.prompt.uid, outcome.reason)
                return outcome
            attempt += 1
            logger.warning("prompt %d: attempt %d was %s", request.prompt.uid, attempt, outcome.reason)

    async def _attempt(self, request: GroupRequest, oldest_allowed: int) -> Outcome:
        what = f"rollout.generate for prompt {request.prompt.uid} of step {request.step} ({request.purpose})"
        call = self._rollout.generate(request)
        try:
            group = await call_role("rollout", what, call, self._settings.group_deadline_s, "group_deadline_s")
        except CallDeadlineError:
            return Dropped("timed_out", request.attempt)
        except GroupDropped as dropped:
            logger.warning("prompt %d is dropped: %s", request.prompt.uid, dropped.reason)
            return Dropped("error", request.attempt)
        async with self._desk:  # one group a turn of the event loop: thousands may arrive at once
            stats = GroupStats.of(group)
        refusal = self._refusal(request, group, stats, oldest_allowed)
        return Finished(group, stats, request.attempt) if refusal is None else Dropped(refusal, request.attempt)

    def _refusal(
        self, request: GroupRequest, group: SampleGroup, stats: GroupStats, oldest_allowed: int
    ) -> DropReason | None:
        """Why the group cannot be used; None if it can. The version of every token is looked at, never assumed."""
        uid = request.prompt.uid
        if group.prompt.uid != uid:
            raise SchedulerError(f"the rollout answered the order for prompt {uid} with prompt {group.prompt.uid}")
        newest = self._sent()
        if stats.newest_version > newest:
            raise SchedulerError(
                f"prompt {uid} has tokens of version {stats.newest_version}, but the newest version that the rollouts "
                f"were given is {newest}"
            )
        if stats.completion_tokens and stats.oldest_version < oldest_allowed:
            return "too_stale"
        if request.purpose == "eval":
            return None
        if not stats.completion_tokens:
            return "empty"
        return None if self._settings.keeps(group) else "filtered"
