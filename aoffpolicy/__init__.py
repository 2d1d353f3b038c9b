"""One-step-off-policy RL post-training. The names below are imported on first use: no torch, no zmq."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aoffpolicy.errors import AoffpolicyError, RoleError, SchedulerError
    from aoffpolicy.protocols import GroupDropped, GroupRequest, Prompts, Rollout, RolloutsLost, Trainer, WeightSync
    from aoffpolicy.records import PhaseEvent, StepRecord, verdict
    from aoffpolicy.samples import Batch, Prompt, Sample, SampleGroup
    from aoffpolicy.scheduler import Scheduler
    from aoffpolicy.scheduling.settings import SchedulerSettings
    from aoffpolicy.scheduling.state import SchedulerState

__all__ = [
    "AoffpolicyError",
    "Batch",
    "GroupDropped",
    "GroupRequest",
    "PhaseEvent",
    "Prompt",
    "Prompts",
    "RoleError",
    "Rollout",
    "RolloutsLost",
    "Sample",
    "SampleGroup",
    "Scheduler",
    "SchedulerError",
    "SchedulerSettings",
    "SchedulerState",
    "StepRecord",
    "Trainer",
    "WeightSync",
    "verdict",
]

_HOMES = {
    "errors": ("AoffpolicyError", "RoleError", "SchedulerError"),
    "protocols": ("GroupDropped", "GroupRequest", "Prompts", "Rollout", "RolloutsLost", "Trainer", "WeightSync"),
    "records": ("PhaseEvent", "StepRecord", "verdict"),
    "samples": ("Batch", "Prompt", "Sample", "SampleGroup"),
    "scheduler": ("Scheduler",),
    "scheduling.settings": ("SchedulerSettings",),
    "scheduling.state": ("SchedulerState",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"aoffpolicy.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
