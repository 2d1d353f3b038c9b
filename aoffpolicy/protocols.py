"""The scheduler's collaborators: three small protocols. An embedding user implements these, nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from aoffpolicy.samples import Batch, Prompt, SampleGroup


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """An order for one group."""

    prompt: Prompt
    step: int
    """Training step the group is for; for evaluations, the step that made the version (-1: the initial weights)."""
    version: int
    """Policy version loaded when the group was dispatched."""
    purpose: Literal["train", "eval"] = "train"
    attempt: int = 0
    """0, then 1, 2, ... when the same prompt is dispatched again."""


class GroupDropped(Exception):
    """Raised by `Rollout.generate` to drop this group with a reason instead of ending the run."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class RolloutsLost(Exception):
    """No rollout is left.

    Raised by `Rollout.generate` it means that nobody holds weights: they are sent again, and the group is generated
    after that. Raised by `WeightSync.send` it means that nobody will come to take them: the run ends in good order.
    """


class Prompts(Protocol):
    """The data in dispatch order; a list will do."""

    def __getitem__(self, uid: int, /) -> Prompt:
        """The prompt whose `uid` this is; asked for 0, 1, 2, ...

        Raises:
            IndexError: The data has ended.
        """
        ...


class Rollout(Protocol):
    async def generate(self, request: GroupRequest) -> SampleGroup:
        """Sample and score one group under the loaded weights.

        Called concurrently, once for each group in flight; balancing over workers is the implementation's.
        Cancellation aborts the group.

        Raises:
            GroupDropped: The group is to be counted as dropped; the run goes on.
            RolloutsLost: Nobody can generate until weights are sent again.
        """
        ...


class Trainer(Protocol):
    async def train(self, step: int, batch: Batch) -> Mapping[str, float]:
        """Do one step on the batch and return its metrics.

        Idempotent by step: a run that goes on after a fault may ask for the step that was in progress once more.
        """
        ...

    async def save(self, step: int, state: bytes) -> None:
        """Store a checkpoint: `step` steps are trained, and `state` (the scheduler's) belongs to it, atomically."""
        ...


class WeightSync(Protocol):
    """Both calls of one version come in order, and no other version is in between."""

    async def send(self, version: int) -> None:
        """Send the trainer's weights as this version; returns when the trainer may go on.

        With swap "boundary" no generation runs from before this call until `load` returns. After `RolloutsLost` a
        version may be sent once more.

        Raises:
            RolloutsLost: There is nobody to send to, nor will there be.
        """
        ...

    async def load(self, version: int) -> None:
        """Returns when every rollout that is not lost generates under this version."""
        ...
