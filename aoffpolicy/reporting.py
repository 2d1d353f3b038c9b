"""Where news of a run goes: metrics.jsonl, the status stream, the timeline, the terminal, summary.json."""

from __future__ import annotations

from collections import Counter
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

import msgspec

from aoffpolicy.config import Config
from aoffpolicy.console import StepPrinter
from aoffpolicy.errors import RoleError
from aoffpolicy.plan import PlannedProcess
from aoffpolicy.records import PhaseEvent, StepRecord, verdict
from aoffpolicy.run_folder import RunFolder
from aoffpolicy.timeline import Timeline
from aoffpolicy.transport import events
from aoffpolicy.transport.control import Hello, PeerId
from aoffpolicy.transport.events import StatusPublisher, write_status_files
from aoffpolicy.transport.security import KeyPair

SUMMARY_STEPS = 3
"""Steps at each end of the run whose mean reward the summary compares."""


class Reporter:
    """Tells everybody what happens; an async context manager that holds the status stream open.

    Args:
        config: The resolved config.
        folder: The run's folder.
        printer: The terminal.
        run_id: Stamped on every event.
    """

    def __init__(self, config: Config, folder: RunFolder, printer: StepPrinter, run_id: str) -> None:
        self._config = config
        self._folder = folder
        self._printer = printer
        self._run_id = run_id
        self._keys = KeyPair.generate() if config.control.curve else None
        self._reader = KeyPair.generate() if config.control.curve else None
        self._publisher = StatusPublisher(
            config.status.address or config.control.host,
            keys=self._keys,
            reader_public=self._reader.public if self._reader else None,
            run_id=run_id,
        )
        self._timeline = Timeline()
        self._records: list[StepRecord] = []
        self._workers: dict[PeerId, events.WorkerEvent] = {}
        """What was last said of each worker."""
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self._publisher)
        write_status_files(
            self._folder.path,
            self._publisher.address,
            server_public=self._keys.public if self._keys else None,
            reader=self._reader,
            run_id=self._run_id,
        )
        self._run("starting")
        self._printer.say(
            f"run folder {self._folder.path}; watch it with: python -m aoffpolicy.status {self._folder.path}"
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self._timeline.write(self._folder.path / "timeline.json")
        return await self._stack.__aexit__(kind, error, trace)

    # --- Workers ---------------------------------------------------------------------------------------------------

    def planned(self, process: PlannedProcess) -> None:
        self._worker(PeerId(process.role, process.rank), device=process.device)

    def arrived(self, peer: PeerId, hello: Hello) -> None:
        self._worker(peer, host=hello.host, pid=hello.pid)

    def progress(self, peer: PeerId, text: str) -> None:
        self._printer.say(f"{peer}: {text}")
        self._worker(peer, detail=text)

    def ready(self, peer: PeerId) -> None:
        self._worker(peer, state="ready")

    def _worker(self, peer: PeerId, **news: Any) -> None:
        known = self._workers.get(peer) or events.WorkerEvent(role=peer.role, rank=peer.rank, state="starting")
        self._workers[peer] = msgspec.structs.replace(known, **news)
        self._publisher.publish(self._workers[peer])

    # --- Steps -----------------------------------------------------------------------------------------------------

    def running(self) -> None:
        self._run("running")

    def phase(self, event: PhaseEvent) -> None:
        """A phase of the scheduler begins or ends."""
        self._publisher.publish(
            events.PhaseEvent(
                name=event.name, step=event.step, version=event.version, state=event.state, seconds=event.seconds
            )
        )
        if event.state == "end":
            track = "weights" if event.name in ("send", "load") else event.name
            start_s = event.time - event.seconds
            name = f"{event.name} {event.step}"
            self._timeline.add(track, name, start_s, event.seconds, step=event.step, version=event.version)

    def step(self, record: StepRecord) -> None:
        row = record.as_row()
        self._records.append(record)
        self._folder.append_metrics(row)
        self._publisher.publish(events.StepEvent(step=record.step, metrics=row))
        self._printer.step(record)

    # --- End -------------------------------------------------------------------------------------------------------

    def failed(self, cause: BaseException) -> None:
        role, rank = (cause.role, cause.rank) if isinstance(cause, RoleError) else ("controller", 0)
        self._publisher.publish(events.ErrorEvent(role=role, rank=rank, cause=f"{type(cause).__name__}: {cause}"))
        self._run("failed")

    def ended(self, *, interrupted: bool, reward_errors: Counter[str]) -> None:
        state = "interrupted" if interrupted else "finished"
        self._run(state)
        rewards = [record.reward_mean for record in self._records if not record.skipped]
        summary = {
            "state": state,
            "steps": len(self._records),
            "reward_first": _mean(rewards[:SUMMARY_STEPS]),
            "reward_last": _mean(rewards[-SUMMARY_STEPS:]),
            "reward_errors": dict(reward_errors),
            "verdict": verdict(self._records),
        }
        self._folder.write_json("summary.json", summary)
        if rewards:
            self._printer.say(
                f"mean reward {summary['reward_first']:.3f} over the first {len(rewards[:SUMMARY_STEPS])} steps, "
                f"{summary['reward_last']:.3f} over the last"
            )
        self._printer.say(f"{state}; {summary['verdict']}")
        if interrupted:
            self._printer.say("go on with the same command and --resume auto")

    def _run(self, state: str) -> None:
        self._publisher.publish(
            events.RunEvent(
                name=self._config.run.name, state=state, steps=self._config.run.steps, run_dir=str(self._folder.path)
            )
        )


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
