"""What becomes of a dispatched group, and the figures that a step's record takes from it."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import numpy as np

from aoffpolicy.errors import SchedulerError
from aoffpolicy.samples import SampleGroup

DropReason = Literal["filtered", "too_stale", "timed_out", "error", "empty"]
DROP_REASONS: tuple[DropReason, ...] = ("filtered", "too_stale", "timed_out", "error", "empty")
"""By a filter; older than allowed; past its deadline; `GroupDropped` by the rollout; without a token to train."""


@dataclass(frozen=True, slots=True)
class GroupStats:
    """Figures of one group, taken once when it arrives."""

    rewards: tuple[float, ...]
    prompt_tokens: int
    """The prompt counted once."""
    completion_tokens: int
    """Tokens that are trained."""
    truncated: int
    """Samples cut off at their length limit."""
    oldest_version: int
    newest_version: int
    version_sum: int
    """Over the trained tokens, for their mean staleness."""

    @classmethod
    def of(cls, group: SampleGroup) -> GroupStats:
        """Take the figures of a scored group.

        Raises:
            SchedulerError: A reward is not finite.
        """
        rewards = tuple(sample.reward for sample in group.samples)
        if not all(map(math.isfinite, rewards)):
            raise SchedulerError(f"prompt {group.prompt.uid} has the rewards {rewards}; they have to be finite")
        versions = [sample.versions_T[sample.loss_mask_T] for sample in group.samples]
        versions_N = np.concatenate(versions) if versions else np.empty(0, np.int32)
        return cls(
            rewards=rewards,
            prompt_tokens=len(group.prompt.token_ids_P),
            completion_tokens=len(versions_N),
            truncated=sum(sample.finish_reason == "length" for sample in group.samples),
            oldest_version=int(versions_N.min()) if len(versions_N) else -1,
            newest_version=int(versions_N.max()) if len(versions_N) else -1,
            version_sum=int(versions_N.sum(dtype=np.int64)),
        )


@dataclass(frozen=True, slots=True)
class BatchStats:
    """Figures of the groups of a batch put together."""

    reward_mean: float
    """Over all samples; nan without any, like the next."""
    reward_std: float
    staleness_max: int
    staleness_mean: float
    """Over all trained tokens."""
    prompt_tokens: int
    completion_tokens: int
    truncated_fraction: float

    @classmethod
    def of(cls, groups: Collection[GroupStats], version: int) -> BatchStats:
        """Put groups together that train `version`."""
        rewards = np.array([reward for group in groups for reward in group.rewards])
        tokens = sum(group.completion_tokens for group in groups)
        versions_behind = version * tokens - sum(group.version_sum for group in groups)
        return cls(
            reward_mean=float(rewards.mean()) if len(rewards) else math.nan,
            reward_std=float(rewards.std()) if len(rewards) else math.nan,
            staleness_max=max((version - group.oldest_version for group in groups), default=0),
            staleness_mean=versions_behind / tokens if tokens else 0.0,
            prompt_tokens=sum(group.prompt_tokens for group in groups),
            completion_tokens=tokens,
            truncated_fraction=sum(group.truncated for group in groups) / max(len(rewards), 1),
        )


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a group that can be used."""

    group: SampleGroup
    stats: GroupStats
    retries: int


@dataclass(frozen=True, slots=True)
class Dropped:
    """The end of a group that is given up."""

    reason: DropReason
    retries: int


Outcome = Finished | Dropped
