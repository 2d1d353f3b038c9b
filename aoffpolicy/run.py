"""One run, from empty processes to final weights: start the roles, form the weight group, drive the scheduler."""

from __future__ import annotations

import gc
import logging
import os
import secrets
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack

import anyio
from rich.console import Console

from aoffpolicy import algorithms
from aoffpolicy.algorithms import Algorithm
from aoffpolicy.child import Bootstrap, package_versions
from aoffpolicy.config import Config
from aoffpolicy.console import StepPrinter
from aoffpolicy.controller import RemoteRollout, RemoteTrainer, RemoteWeightSync, Shards, call_all
from aoffpolicy.data.prompts import build_eval_prompts, build_prompts, load_tokenizer
from aoffpolicy.errors import PeerLostError, first_cause
from aoffpolicy.plan import PlannedProcess
from aoffpolicy.reporting import Reporter
from aoffpolicy.run_folder import RunFolder
from aoffpolicy.scheduler import Scheduler, SchedulerSettings
from aoffpolicy.supervisor import Supervisor
from aoffpolicy.trainer.checkpoint import latest
from aoffpolicy.transport.control import ControlServer, PeerId
from aoffpolicy.transport.coordinator import Coordinator, GroupSettings
from aoffpolicy.transport.messages import Start, Started, Stop
from aoffpolicy.transport.rendezvous import RendezvousStore
from aoffpolicy.transport.security import KeyPair

logger = logging.getLogger(__name__)
DEATH_NOTICE_S = 1.0
"""A dead process is often noticed first by its peers: so long their errors wait for the news of its death."""


class Run:
    """Everything that one launcher process does, once.

    Args:
        config: The resolved config.
        plan: The processes to start.
        folder: The run's folder, held by this launcher.
        console: Where progress is printed.
        resume: Go on from the newest checkpoint in the folder, if there is one.
    """

    def __init__(
        self, config: Config, plan: Sequence[PlannedProcess], folder: RunFolder, console: Console, *, resume: bool
    ) -> None:
        self._config = config
        self._plan = plan
        self._folder = folder
        self._printer = StepPrinter(console, config.run.steps)
        self._checkpoint = latest(folder.checkpoints) if resume else None
        self._run_id = f"{config.run.name}-{secrets.token_hex(4)}"
        self._keys = KeyPair.generate() if config.control.curve else None
        self._scheduler: Scheduler | None = None
        self._reward_errors: Counter[str] = Counter()
        self._interrupted = False

    async def run(self) -> bool:
        """Run to the end; returns whether it was interrupted.

        Raises:
            AoffpolicyError: The first cause of failure.
        """
        async with AsyncExitStack() as stack:
            reporter = await stack.enter_async_context(
                Reporter(self._config, self._folder, self._printer, self._run_id)
            )
            server = await stack.enter_async_context(self._control_server(reporter))
            store = RendezvousStore(server.address.host)
            stack.callback(store.close)
            supervisor = await stack.enter_async_context(
                Supervisor(self._folder.logs, self._config.supervisor.stop_timeout_s)
            )
            try:
                async with anyio.create_task_group() as watchers:
                    watchers.start_soon(self._obey_signals, watchers.cancel_scope)
                    watchers.start_soon(supervisor.watch)
                    watchers.start_soon(server.watch)
                    await self._train(server, store, supervisor, reporter)
                    watchers.cancel_scope.cancel()
            except BaseException as error:
                cause = await self._first_cause(error, supervisor)
                reporter.failed(cause)
                raise cause from None
            reporter.ended(interrupted=self._interrupted, reward_errors=self._reward_errors)
        return self._interrupted

    def _control_server(self, reporter: Reporter) -> ControlServer:
        return ControlServer(
            self._config.control.host,
            run_id=self._run_id,
            keys=self._keys,
            heartbeat_timeout_s=self._config.control.heartbeat_timeout_s,
            on_progress=reporter.progress,
            versions={"aoffpolicy": package_versions()["aoffpolicy"]},  # torch may differ between roles
        )

    async def _obey_signals(self, everything: anyio.CancelScope) -> None:
        """The first Ctrl-C or SIGTERM ends the run in good order, within a bound; a second one ends it at once."""
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async for number in signals:
                if self._interrupted or self._scheduler is None:
                    break
                self._interrupted = True
                self._printer.say(f"{number.name}: finishing the training step, then a checkpoint; again to stop now")
                self._scheduler.interrupt()
                everything.deadline = anyio.current_time() + self._config.supervisor.interrupt_timeout_s
        self._interrupted = True
        everything.cancel()

    async def _first_cause(self, error: BaseException, supervisor: Supervisor) -> BaseException:
        """A child's violent death explains what its peers complain about, so it is the cause."""
        cause = first_cause(error)
        with anyio.CancelScope(shield=True):
            death = await supervisor.death_within(DEATH_NOTICE_S)
        if death is not None and (death.by_signal or isinstance(cause, PeerLostError)):
            return death
        return cause

    # --- Start -----------------------------------------------------------------------------------------------------

    async def _train(
        self, server: ControlServer, store: RendezvousStore, supervisor: Supervisor, reporter: Reporter
    ) -> None:
        tokenizer = await anyio.to_thread.run_sync(load_tokenizer, self._config)
        prompts = await anyio.to_thread.run_sync(build_prompts, self._config, tokenizer)
        eval_prompts = await anyio.to_thread.run_sync(build_eval_prompts, self._config, tokenizer)
        self._printer.say(f"{self._config.data.source}: {prompts.counts}")
        peers = await self._start_processes(server, store, supervisor, reporter)
        started = await self._start_roles(server, peers)
        for peer in peers:
            reporter.ready(peer)
        trainers = [peer for peer in peers if peer.role == "trainer"]
        rollouts = {peer: started[peer].capacity for peer in peers if peer.role == "rollout"}
        rewards = {peer: started[peer].capacity for peer in peers if peer.role == "reward"}

        algorithm = algorithms.build(self._config)
        trainer = RemoteTrainer(
            server,
            self._config,
            algorithm,
            Shards.of({t: started[t] for t in trainers}),
            self._folder.checkpoints,
            reporter,
        )
        rollout = RemoteRollout(server, self._config, rollouts, rewards, self._reward_errors, reporter)
        async with Coordinator(server.call, store, trainers, list(rollouts), self._group_settings(store)) as plane:
            self._printer.say("forming the weight group")
            await plane.form()
            scheduler = Scheduler(
                rollout,
                trainer,
                RemoteWeightSync(plane),
                prompts,
                self._settings(2 * sum(rollouts.values()), algorithm),
                eval_prompts=eval_prompts,
                state=started[trainers[0]].scheduler_state or None,
                observer=reporter.phase,
            )
            await self._drive(scheduler, plane, reporter)
        await self._stop(server, supervisor, peers)

    async def _start_processes(
        self, server: ControlServer, store: RendezvousStore, supervisor: Supervisor, reporter: Reporter
    ) -> tuple[PeerId, ...]:
        """Spawn every planned process and wait until each has said hello."""
        self._printer.say("starting " + ", ".join(f"{p.role} {p.rank} on {p.device}" for p in self._plan))
        peers = tuple(PeerId(process.role, process.rank) for process in self._plan)
        for peer, process in zip(peers, self._plan, strict=True):
            keys = KeyPair.generate() if self._keys else None
            server.allow(peer, keys.public if keys else b"")
            await supervisor.spawn(self._bootstrap(process, server, store, keys))
            reporter.planned(process)
        for peer in peers:
            reporter.arrived(peer, await server.wait_for(peer, self._config.supervisor.start_timeout_s))
        return peers

    def _bootstrap(
        self, process: PlannedProcess, server: ControlServer, store: RendezvousStore, keys: KeyPair | None
    ) -> Bootstrap:
        return Bootstrap(
            role=process.role,
            rank=process.rank,
            world_size=process.world_size,
            config=self._config,
            device_kind=process.device_kind,
            device_index=process.device_index,
            threads=process.threads,
            cores=process.cores,
            run_id=self._run_id,
            parent_pid=os.getpid(),
            control_url=server.address.url,
            store_host=store.host,
            store_port=store.port,
            public_key=keys.public if keys else b"",
            secret_key=keys.secret if keys else b"",
            server_key=self._keys.public if self._keys else b"",
        )

    async def _start_roles(self, server: ControlServer, peers: Sequence[PeerId]) -> Mapping[PeerId, Started]:
        """Have every role load what it needs, all at once."""
        if self._checkpoint is not None:
            self._printer.say(f"resuming from {self._checkpoint}")
        starts = {
            peer: Start(resume_from=str(self._checkpoint) if self._checkpoint and peer.role == "trainer" else "")
            for peer in peers
        }
        return await call_all(server, starts, self._config.supervisor.start_timeout_s)

    def _group_settings(self, store: RendezvousStore) -> GroupSettings:
        weights = self._config.weights
        return GroupSettings(
            backend=weights.backend,
            interface=store.host,
            bucket_bytes=weights.bucket_bytes,
            join_timeout_s=weights.join_timeout_s,
            sync_timeout_s=weights.sync_timeout_s,
        )

    def _settings(self, max_in_flight: int, algorithm: Algorithm) -> SchedulerSettings:
        config = self._config
        return SchedulerSettings(
            steps=config.run.steps,
            prompts_per_step=config.data.prompts_per_step,
            max_staleness=config.run.max_staleness,
            max_in_flight=max_in_flight,
            swap="boundary" if config.weights.swap == "boundary" else "in_flight",
            filter_zero_variance=algorithm.filter_zero_variance,
            on_filtered=config.algorithm.on_filtered,
            group_deadline_s=config.rollout.group_deadline_s,
            checkpoint_every=config.checkpoint.every,
            eval_every=config.eval.every,
        )

    # --- Steps and end ---------------------------------------------------------------------------------------------

    async def _drive(self, scheduler: Scheduler, plane: Coordinator, reporter: Reporter) -> None:
        self._folder.keep_metrics_before(scheduler.step)
        await anyio.to_thread.run_sync(self._folder.samples.keep_before, scheduler.step)
        await plane.send(scheduler.version)
        await plane.load(scheduler.version)
        self._printer.say(
            f"policy version {scheduler.version} is on every rollout worker; step {scheduler.step} is next"
        )
        reporter.running(scheduler.version)
        _calm_garbage_collector()
        async with scheduler:
            self._scheduler = scheduler
            async for record in scheduler.run():
                reporter.step(record)

    async def _stop(self, server: ControlServer, supervisor: Supervisor, peers: Sequence[PeerId]) -> None:
        """Let every child leave in good order; whoever does not is ended by the supervisor."""
        supervisor.expect_exits()
        timeout_s = self._config.supervisor.stop_timeout_s
        await call_all(server, dict.fromkeys(peers, Stop()), timeout_s)
        await supervisor.wait_all(timeout_s)


def _calm_garbage_collector() -> None:
    """Keep full collections, which walk everything that torch and transformers made, out of the event loop's way."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 5, 1_000_000)
