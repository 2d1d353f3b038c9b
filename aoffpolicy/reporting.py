"""Where news of a run goes: metrics.jsonl, the status stream, the timeline, samples, the terminal, summary.json."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Literal, Never, Self

import anyio
import anyio.to_thread
import numpy as np

from aoffpolicy.config import Config
from aoffpolicy.console import StepPrinter
from aoffpolicy.errors import PeerLostError, ProcessDiedError, RoleError
from aoffpolicy.outlet import Outlet
from aoffpolicy.plan import PlannedProcess
from aoffpolicy.protocols import GroupRequest
from aoffpolicy.records import PhaseEvent, StepRecord, verdict
from aoffpolicy.run_folder import RunFolder
from aoffpolicy.samples import Batch, SampleGroup
from aoffpolicy.samples.log import record_of
from aoffpolicy.sinks import OpenSink, open_sinks
from aoffpolicy.timeline import Span, Timeline, write_timeline
from aoffpolicy.transport import events
from aoffpolicy.transport.control import Hello, PeerId
from aoffpolicy.transport.events import StatusPublisher, write_status_files
from aoffpolicy.transport.security import KeyPair
from aoffpolicy.transport.tasks import background_tasks
from aoffpolicy.worker_board import WorkerBoard

SUMMARY_STEPS = 3
"""Steps at each end of the run whose mean reward the summary compares."""
PULSE_S = 1.0
"""Between two looks at the workers."""
TIMELINE_EVERY = 20
"""Pulses between two writings of timeline.json while the run goes on."""
OUTLET_CLOSE_S = 10.0
"""For what is still to be written beside the run when it ends."""


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
        self._board = WorkerBoard(self._publisher.publish, self._timeline.add)
        self._version = -1
        """Loaded into the rollouts."""
        self._samples: Outlet[_Groups] = Outlet("samples.jsonl", partial(_write_groups, folder))
        self._timeline_file: Outlet[_Spans] = Outlet("timeline.json", partial(_write_spans, folder))
        self._sinks: list[OpenSink] = []
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Open what others read.

        Raises:
            ConfigError: An address cannot be bound, or a sink cannot be had.
        """
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._publisher)
            stack.push_async_callback(self._close_outlets)
            self._sinks = await anyio.to_thread.run_sync(open_sinks, self._config, self._folder.path)
            tasks = await stack.enter_async_context(background_tasks())
            tasks.start_soon(self._pulse)
            write_status_files(
                self._folder.path,
                self._publisher.address,
                server_public=self._keys.public if self._keys else None,
                reader=self._reader,
                run_id=self._run_id,
            )
            self._stack = stack.pop_all()
        (self._folder.path / "summary.json").unlink(missing_ok=True)  # of the run that this one goes on with
        self._run("starting")
        self._printer.say(
            f"run folder {self._folder.path}; watch it with: python -m aoffpolicy.status {self._folder.path}"
        )
        for sink in self._sinks:
            self._printer.say(f"metrics to {sink.name}: {sink.place}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._stack.__aexit__(kind, error, trace)

    async def _pulse(self) -> Never:
        """Once a second: the workers, and what went wrong beside the run; now and then the timeline."""
        beats = 0
        while True:
            await anyio.sleep(PULSE_S)
            beats += 1
            self._board.refresh()
            self._tell_outlet_news()
            if beats % TIMELINE_EVERY == 0:
                self._timeline_file.put(self._timeline.snapshot())

    async def _close_outlets(self) -> None:
        with anyio.CancelScope(shield=True):
            self._timeline_file.put(self._timeline.snapshot())
            for outlet in self._outlets():
                await anyio.to_thread.run_sync(outlet.close, OUTLET_CLOSE_S)
            self._tell_outlet_news()

    def _outlets(self) -> list[Outlet[Any]]:
        return [self._samples, self._timeline_file, *(sink.outlet for sink in self._sinks)]

    def _tell_outlet_news(self) -> None:
        for outlet in self._outlets():
            if news := outlet.take_news():
                self._publisher.publish(events.ErrorEvent(role="controller", rank=0, cause=news))
                self._printer.say(news)

    # --- Workers ---------------------------------------------------------------------------------------------------

    def planned(self, process: PlannedProcess) -> None:
        self._board.tell(PeerId(process.role, process.rank), state="starting", device=process.device, detail="")

    def arrived(self, peer: PeerId, hello: Hello) -> None:
        self._board.tell(peer, host=hello.host, pid=hello.pid)

    def progress(self, peer: PeerId, text: str) -> None:
        self._printer.say(f"{peer}: {text}")
        self._board.tell(peer, detail=text)

    def ready(self, peer: PeerId) -> None:
        self._board.tell(peer, state="ready")

    def load(self, peer: PeerId, in_flight: int) -> None:
        doing = f"generate v{self._version}" if peer.role == "rollout" else "score"
        self._board.load(peer, in_flight, doing)

    def lost(self, peer: PeerId, cause: str, groups: int, restart_in_s: float | None) -> None:
        """A worker is lost, and the run goes on without it."""
        then = "it is not started again" if restart_in_s is None else f"it is started again in {restart_in_s:g} s"
        self._board.tell(peer, state="lost", detail=cause, version=-1)
        self._publisher.publish(
            events.FaultEvent(role=peer.role, rank=peer.rank, cause=cause, groups=groups, restart_in_s=restart_in_s)
        )
        self._printer.say(f"{peer} is lost: {cause}; {groups} groups go to others; {then}")

    def loaded(self, peers: Collection[PeerId], version: int) -> None:
        """These rollout workers generate under this version now."""
        self._version = version
        for peer in peers:
            self._board.tell(peer, version=version)

    # --- Groups ----------------------------------------------------------------------------------------------------

    def group(self, request: GroupRequest, group: SampleGroup) -> None:
        rank = group.metadata["rollout"]
        self._board.tokens(PeerId("rollout", rank), sum(sample.completion_tokens for sample in group.samples))
        if request.purpose == "eval":
            self._keep(_Groups(request.step, "eval", request.version, (group,), None))

    def batch(self, batch: Batch, advantages: Sequence[np.ndarray]) -> None:
        self._keep(_Groups(batch.step, "train", batch.version, batch.groups, advantages))

    def _keep(self, groups: _Groups) -> None:
        if self._config.samples.max_bytes:
            self._samples.put(groups)

    # --- Steps -----------------------------------------------------------------------------------------------------

    def running(self) -> None:
        """The rollouts have their first weights."""
        self._run("running")

    def phase(self, event: PhaseEvent) -> None:
        """A phase of the scheduler begins or ends."""
        self._publisher.publish(
            events.PhaseEvent(
                name=event.name, step=event.step, version=event.version, state=event.state, seconds=event.seconds
            )
        )
        if event.name == "train":
            self._board.load_role("trainer", int(event.state == "begin"), f"train {event.step}")
        if event.state == "end":
            track = "weights" if event.name in ("send", "load") else event.name
            name, start_s = f"{event.name} {event.step}", event.time - event.seconds
            self._timeline.add(Span(track, name, start_s, event.seconds, event.step, event.version))

    def step(self, record: StepRecord) -> None:
        row = record.as_row()
        self._records.append(record)
        self._folder.append_metrics(row)
        self._publisher.publish(events.StepEvent(step=record.step, metrics=row))
        for sink in self._sinks:
            sink.outlet.put((record.step, row))
        self._printer.step(record)

    # --- End -------------------------------------------------------------------------------------------------------

    def failed(self, cause: BaseException) -> None:
        role, rank, said = ("controller", 0, str(cause))
        if isinstance(cause, RoleError):
            role, rank, said = cause.role, cause.rank, cause.cause
        if isinstance(cause, PeerLostError | ProcessDiedError):
            self._board.tell(PeerId(role, rank), state="lost", detail=cause.cause)
        said = f"{type(cause).__name__}: {said}"
        failure = {"role": role, "rank": rank, "cause": said}
        self._publisher.publish(events.ErrorEvent(role=role, rank=rank, cause=said))
        self._board.ended()
        self._run("failed")
        self._folder.write_json("summary.json", {"state": "failed", "steps": len(self._records), "failure": failure})

    def ended(self, *, interrupted: bool, reward_errors: Counter[str], rollout_restarts: int) -> None:
        state = "interrupted" if interrupted else "finished"
        self._board.ended()
        self._run(state)
        rewards = [record.reward_mean for record in self._records if not record.skipped]
        summary = {
            "state": state,
            "steps": len(self._records),
            "reward_first": _mean(rewards[:SUMMARY_STEPS]),
            "reward_last": _mean(rewards[-SUMMARY_STEPS:]),
            "reward_errors": dict(reward_errors),
            "rollout_restarts": rollout_restarts,
            "nonfinite_steps": sum(record.metrics.get("nonfinite", 0) > 0 for record in self._records),
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


_Spans = tuple[dict[int, str], list[tuple[int, Span]]]
"""What `Timeline.snapshot` returns."""


def _write_spans(folder: RunFolder, snapshot: _Spans) -> None:
    write_timeline(folder.path / "timeline.json", *snapshot)


@dataclass(frozen=True, slots=True)
class _Groups:
    """On their way to samples.jsonl."""

    step: int
    purpose: Literal["train", "eval"]
    version: int
    groups: Sequence[SampleGroup]
    advantages: Sequence[np.ndarray] | None
    """float32 [N] each, one for each trained token."""


def _write_groups(folder: RunFolder, news: _Groups) -> None:
    log = folder.samples
    for index, group in enumerate(news.groups):
        advantages_N = None if news.advantages is None else news.advantages[index]
        log.append(record_of(group, news.step, news.purpose, news.version, advantages_N))


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
