"""All that is needed to go on where a run stopped; stored with the trainer's checkpoint as one thing."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from aoffpolicy.errors import ProtocolError
from aoffpolicy.samples import SampleGroup
from aoffpolicy.transport.messages import pack, unpack


@dataclass(frozen=True, slots=True)
class OpenStep:
    """A step that was not trained when the state was taken."""

    step: int
    dispatched: int
    retries: int
    dropped: Mapping[str, int]
    """Groups dropped, by reason."""
    pending: tuple[int, ...]
    """uids of prompts that were dispatched and whose groups have to be generated again."""
    finished: tuple[SampleGroup, ...]


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """Where a run stands. Nothing is lost and nothing repeated by going on from it."""

    step: int
    """Steps trained or skipped, which is also the step that comes next."""
    version: int
    """Of the trainer's weights."""
    next_uid: int
    """The first prompt that was never dispatched."""
    open_steps: tuple[OpenStep, ...] = ()

    def pack(self) -> bytes:
        """One byte string. Group by group: packing thousands in a thread leaves the event loop its turns."""
        bare = replace(self, open_steps=tuple(replace(step, finished=()) for step in self.open_steps))
        packed = io.BytesIO()
        for part in (bare, [len(step.finished) for step in self.open_steps]):
            _write(packed, pack(part))
        for step in self.open_steps:
            for group in step.finished:
                _write(packed, pack(group))
        return packed.getvalue()

    @classmethod
    def unpack(cls, data: bytes) -> SchedulerState:
        """The state that `pack` made.

        Raises:
            ProtocolError: The bytes are not a packed state.
        """
        parts = _read(memoryview(data))
        try:
            bare = unpack(next(parts), cls)
            counts = unpack(next(parts), list[int])
            steps = tuple(
                replace(step, finished=tuple(unpack(next(parts), SampleGroup) for _ in range(count)))
                for step, count in zip(bare.open_steps, counts, strict=True)
            )
        except (StopIteration, RuntimeError, ValueError) as error:  # a StopIteration inside turns into a RuntimeError
            raise ProtocolError("a packed scheduler state is cut short") from error
        return replace(bare, open_steps=steps)

    def without_groups(self) -> SchedulerState:
        """The same with finished groups left out: smaller, and their prompts are generated again."""
        return replace(self, open_steps=tuple(map(_all_pending, self.open_steps)))

    def renumbered(self, version: int) -> SchedulerState:
        """The same weights under a version number that no rollout has seen.

        For a roll-back while the rollouts live on: version numbers are never used twice, so the restored weights get
        one above the highest ever sent. Groups that are too old by it are generated again.
        """
        return replace(self, version=version)


def _all_pending(step: OpenStep) -> OpenStep:
    uids = (*step.pending, *(group.prompt.uid for group in step.finished))
    return replace(step, pending=tuple(sorted(uids)), finished=())


def _write(file: io.BytesIO, part: bytes) -> None:
    file.write(len(part).to_bytes(LENGTH_BYTES, "little"))
    file.write(part)


def _read(data: memoryview) -> Iterator[bytes]:
    while data:
        end = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")
        if end > len(data):
            raise ProtocolError("a packed scheduler state is cut short, or is none")
        yield bytes(data[LENGTH_BYTES:end])
        data = data[end:]


LENGTH_BYTES = 8
