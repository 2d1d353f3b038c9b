"""What is known of a run at one moment, gathered from its events or from its folder."""

from __future__ import annotations

import statistics
import tomllib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aoffpolicy.recorded import number, read_run
from aoffpolicy.records import StepTimes, verdict
from aoffpolicy.timeline import PHASE_TRACKS
from aoffpolicy.transport.events import AnyEvent, ErrorEvent, FaultEvent, PhaseEvent, RunEvent, StepEvent, WorkerEvent

ENDED = ("finished", "failed", "interrupted")
"""States of a run that are its last."""
PHASES_KEPT = 1000
ERRORS_KEPT = 5


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase that went on from `start` to `end`, Unix seconds."""

    name: str
    step: int
    version: int
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(slots=True)
class Picture:
    """Fold events in with `add`, in any order that a subscriber gives them."""

    run: RunEvent | None = None
    rows: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    """Rows of metrics.jsonl by step, as far as they are known."""
    phases: deque[Phase] = field(default_factory=lambda: deque(maxlen=PHASES_KEPT))
    """That have ended, in the order of their ends."""
    open: dict[tuple[str, int], PhaseEvent] = field(default_factory=dict)
    """Begins of phases that go on, by name and step."""
    workers: dict[tuple[str, int], WorkerEvent] = field(default_factory=dict)
    errors: deque[ErrorEvent | FaultEvent] = field(default_factory=lambda: deque(maxlen=ERRORS_KEPT))
    """What failed, whether the run went on or not."""
    time: float = 0.0
    """Of the newest event, Unix seconds on the launcher's clock."""

    def add(self, event: AnyEvent) -> None:
        self.time = max(self.time, event.time)
        match event:
            case RunEvent():
                self.run = event
                if event.state in ENDED:
                    self.open.clear()
            case StepEvent():
                self.rows[event.step] = event.metrics
            case PhaseEvent(state="begin"):
                self.open[event.name, event.step] = event
            case PhaseEvent():
                self.open.pop((event.name, event.step), None)
                start = event.time - event.seconds
                self.phases.append(Phase(event.name, event.step, event.version, start, event.time))
            case WorkerEvent():
                self.workers[event.role, event.rank] = event
            case ErrorEvent() | FaultEvent():
                self.errors.append(event)

    # --- Questions that screen and explanation share ---------------------------------------------------------------

    @property
    def state(self) -> str:
        return self.run.state if self.run is not None else "unknown"

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def steps(self) -> Sequence[Mapping[str, Any]]:
        """The rows in the order of steps."""
        return [row for _, row in sorted(self.rows.items())]

    def values(self, key: str) -> list[float]:
        """A metric of every step that has it, in order."""
        return [value for row in self.steps if (value := number(row.get(key))) is not None]

    def median(self, key: str) -> float:
        """Of a metric over the known steps; 0 without any."""
        return statistics.median(self.values(key) or [0.0])

    @property
    def verdict(self) -> str:
        return verdict([StepTimes.of_row(row) for row in self.steps])

    def of_role(self, role: str) -> list[WorkerEvent]:
        return [worker for (name, _), worker in sorted(self.workers.items()) if name == role]

    def going_on(self, name: str) -> PhaseEvent | None:
        """The phase of this name that goes on, of the earliest step if there are several."""
        return min((p for (n, _), p in self.open.items() if n == name), key=lambda p: p.step, default=None)

    def last(self, name: str) -> Phase | None:
        """The newest phase of this name that has ended."""
        return next((phase for phase in reversed(self.phases) if phase.name == name), None)

    def lasted(self, name: str) -> list[float]:
        """Seconds of the phases of this name that have ended."""
        return [phase.seconds for phase in self.phases if phase.name == name]


def picture_of_folder(folder: Path) -> Picture:
    """What a run left in its folder, for runs that do not answer any more.

    Raises:
        DataError: It is no run folder with a recorded step, or a file in it is damaged.
    """
    recorded = read_run(folder)
    picture = Picture(rows={int(row["step"]): row for row in recorded.rows}, time=recorded.changed)
    spans = [span for span in recorded.spans if span.track in PHASE_TRACKS]
    shift = picture.time - max((span.end_s for span in spans), default=0.0)  # from the run's clock to Unix time
    for span in spans:
        name = span.name.rpartition(" ")[0]
        picture.phases.append(Phase(name, span.step, span.version, span.start_s + shift, span.end_s + shift))
    planned = tomllib.loads(recorded.config).get("run", {}).get("steps", len(recorded.rows))
    picture.run = RunEvent(name=recorded.name, state=recorded.state, steps=int(planned), run_dir=str(folder))
    if (failure := recorded.failure) is not None:
        picture.errors.append(ErrorEvent(role=failure.role, rank=failure.rank, cause=failure.cause, time=picture.time))
    return picture
