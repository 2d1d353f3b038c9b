"""One run, from empty processes to final weights: start the roles, form the weight group, drive the scheduler."""

from __future__ import annotations

import gc
import logging
import secrets
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack

import anyio
from anyio.abc import TaskGroup
from rich.console import Console

from aoffpolicy import algorithms
from aoffpolicy.algorithms import Algorithm
from aoffpolicy.child import package_versions
from aoffpolicy.config import Config
from aoffpolicy.console import StepPrinter
from aoffpolicy.controller import RemoteRollout, RemoteTrainer, RemoteWeightSync, Shards, call_all
from aoffpolicy.data.prompts import build_eval_prompts, build_prompts, load_tokenizer
from aoffpolicy.errors import PeerLostError, ProcessDiedError, RoleError, first_cause
from aoffpolicy.fleet import RolloutFleet
from aoffpolicy.plan import PlannedProcess
from aoffpolicy.processes import RunProcesses
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
        self._fleet: RolloutFleet | None = None
        """Once the rollout workers have started."""
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

            def takes_over(loss: RoleError) -> bool:
                return self._takes_over(loss, server)

            supervisor = await stack.enter_async_context(
                Supervisor(self._folder.logs, self._config.supervisor.stop_timeout_s, takes_over)
            )
            try:
                async with anyio.create_task_group() as watchers:
                    watchers.start_soon(self._obey_signals, watchers.cancel_scope)
                    watchers.start_soon(supervisor.watch)
                    watchers.start_soon(server.watch, takes_over)
                    await self._train(server, store, supervisor, reporter, watchers)
                    watchers.cancel_scope.cancel()
            except BaseException as error:
                cause = await self._first_cause(error, supervisor)
                reporter.failed(cause)
                raise cause from None
            reporter.ended(
                interrupted=self._interrupted,
                reward_errors=self._reward_errors,
                rollout_restarts=self._fleet.restarts if self._fleet else 0,
            )
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
                if self._fleet is not None:
                    self._fleet.close()
                everything.deadline = anyio.current_time() + self._config.supervisor.interrupt_timeout_s
        self._interrupted = True
        everything.cancel()

    def _takes_over(self, loss: RoleError, server: ControlServer) -> bool:
        """Whether the run goes on although this child is lost."""
        if self._fleet is None or not self._fleet.takes_over(loss):
            return False
        if isinstance(loss, ProcessDiedError):
            server.lose(PeerId(loss.role, loss.rank), loss.cause)
        return True

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
        self,
        server: ControlServer,
        store: RendezvousStore,
        supervisor: Supervisor,
        reporter: Reporter,
        tasks: TaskGroup,
    ) -> None:
        tokenizer = await anyio.to_thread.run_sync(load_tokenizer, self._config)
        prompts = await anyio.to_thread.run_sync(build_prompts, self._config, tokenizer)
        eval_prompts = await anyio.to_thread.run_sync(build_eval_prompts, self._config, tokenizer)
        self._printer.say(f"{self._config.data.source}: {prompts.counts}")
        self._printer.say("starting " + ", ".join(f"{p.role} {p.rank} on {p.device}" for p in self._plan))
        server_public = self._keys.public if self._keys else b""
        processes = RunProcesses(
            self._config, self._plan, self._run_id, server, server_public, store, supervisor, reporter
        )
        peers = await processes.start_all()
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
        fleet = self._fleet = RolloutFleet(rollouts, processes, self._config.supervisor, reporter)
        tasks.start_soon(fleet.run)
        rollout = RemoteRollout(server, self._config, fleet, rewards, self._reward_errors, reporter)
        async with Coordinator(server.call, store, trainers, self._group_settings(store)) as plane:
            self._printer.say("forming the weight group")
            weight_sync = RemoteWeightSync(plane, fleet)
            scheduler = Scheduler(
                rollout,
                trainer,
                weight_sync,
                prompts,
                self._settings(2 * sum(rollouts.values()), algorithm),
                eval_prompts=eval_prompts,
                state=started[trainers[0]].scheduler_state or None,
                observer=reporter.phase,
            )
            await self._drive(scheduler, weight_sync, reporter)
        fleet.close()
        await self._stop(server, supervisor, [peer for peer in peers if peer.role != "rollout" or peer in fleet.here])

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

    async def _drive(self, scheduler: Scheduler, weight_sync: RemoteWeightSync, reporter: Reporter) -> None:
        self._folder.keep_metrics_before(scheduler.step)
        await anyio.to_thread.run_sync(self._folder.samples.keep_before, scheduler.step)
        await weight_sync.send(scheduler.version)
        await weight_sync.load(scheduler.version)
        self._printer.say(
            f"policy version {scheduler.version} is on every rollout worker; step {scheduler.step} is next"
        )
        reporter.running()
        _calm_garbage_collector()
        async with scheduler:
            self._scheduler = scheduler
            async for record in scheduler.run():
                reporter.step(record)
        if scheduler.stranded is not None and not self._interrupted:
            self._printer.say(f"checkpoint after {scheduler.step} steps; go on with --resume auto")
            raise scheduler.stranded

    async def _stop(self, server: ControlServer, supervisor: Supervisor, peers: Sequence[PeerId]) -> None:
        """Let every child leave in good order; whoever does not is ended by the supervisor."""
        supervisor.expect_exits()
        timeout_s = self._config.supervisor.stop_timeout_s

        async def leave(peer: PeerId) -> None:
            try:
                await server.call(peer, Stop(), timeout_s)
            except RoleError as error:
                logger.warning("%s did not leave in good order: %s", peer, error.cause)

        async with anyio.create_task_group() as tasks:
            for peer in peers:
                tasks.start_soon(leave, peer)
        await supervisor.wait_all(timeout_s)


def _calm_garbage_collector() -> None:
    """Keep full collections, which walk everything that torch and transformers made, out of the event loop's way."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 5, 1_000_000)
