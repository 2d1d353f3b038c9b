"""The pipeline: groups of later steps are generated while one step trains. Follow a step from top to bottom.

    prompts -> dispatch -> Rollout.generate -> ledger of the step -> Trainer.train -> WeightSync.send -> load

`v_0` are the initial weights; step m trains `v_m` and makes `v_{m+1}`. One rule holds for every mode: a group for step
m may start under version v only if m - v <= max_staleness. It is kept by pacing dispatch, not by discarding groups.
While weights are swapped nothing is dispatched; unless `settings.swap` says otherwise, running groups finish first.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Self

import anyio
from anyio.lowlevel import checkpoint

from aoffpolicy.errors import RoleError, SchedulerError, first_cause
from aoffpolicy.protocols import GroupRequest, Prompts, Rollout, RolloutsLost, Trainer, WeightSync
from aoffpolicy.records import PhaseEvent, StepRecord
from aoffpolicy.samples import Batch, Prompt
from aoffpolicy.scheduling.attempts import GroupAttempts
from aoffpolicy.scheduling.calls import call_role
from aoffpolicy.scheduling.change import Change
from aoffpolicy.scheduling.evaluating import Evaluating
from aoffpolicy.scheduling.groups import Outcome
from aoffpolicy.scheduling.ledger import StepLedger
from aoffpolicy.scheduling.phases import Phases
from aoffpolicy.scheduling.record_queue import RecordQueue
from aoffpolicy.scheduling.settings import SchedulerSettings
from aoffpolicy.scheduling.state import SchedulerState
from aoffpolicy.scheduling.windows import Windows

__all__ = ["Scheduler", "SchedulerSettings"]

logger = logging.getLogger(__name__)


class Scheduler:
    """Drives a `Rollout`, a `Trainer` and a `WeightSync` through the steps.

    An async context manager that owns its tasks:

        async with Scheduler(rollout, trainer, weight_sync, prompts, settings) as scheduler:
            async for record in scheduler.run():
                ...

    Leaving the block early cancels everything; `interrupt` ends the run in good order. When anything fails, the block
    is cancelled wherever it is and the first cause is raised from it. The rollouts are expected to hold the weights
    of `scheduler.version` (0, or the restored one) when the run begins.

    Args:
        rollout: Generates groups.
        trainer: Trains batches and stores checkpoints.
        weight_sync: Brings the trainer's weights to the rollouts.
        prompts: The data in dispatch order; a list will do.
        settings: What is asked for.
        eval_prompts: The held-out set, needed if `settings.eval_every` is set.
        state: Where an earlier run stopped, as it is or packed.
        observer: Called with every phase that begins or ends; must not block.

    Raises:
        SchedulerError: Something impossible is asked for.
    """

    def __init__(
        self,
        rollout: Rollout,
        trainer: Trainer,
        weight_sync: WeightSync,
        prompts: Prompts,
        settings: SchedulerSettings,
        *,
        eval_prompts: Sequence[Prompt] | None = None,
        state: SchedulerState | bytes | None = None,
        observer: Callable[[PhaseEvent], None] | None = None,
    ) -> None:
        if settings.eval_every and not eval_prompts:
            raise SchedulerError(f"eval_every = {settings.eval_every} needs eval_prompts, and there are none")
        self._trainer = trainer
        self._weight_sync = weight_sync
        self._prompts = prompts
        self._settings = settings
        self._eval_prompts = eval_prompts or ()
        self._attempts = GroupAttempts(rollout, settings, loaded=lambda: self._loaded, sent=lambda: self._sent)

        state = SchedulerState.unpack(state) if isinstance(state, bytes) else state or SchedulerState(0, 0, 0)
        self._step = state.step  # steps trained or skipped, so also the step that comes next
        self._version = state.version  # of the trainer's weights
        self._next_uid = state.next_uid  # first prompt never dispatched
        self._ledgers = {  # of the steps that are not trained yet
            saved.step: StepLedger.restored(
                saved, settings.prompts_per_step, settings.group_limit, self._oldest_allowed(saved.step)
            )
            for saved in state.open_steps
        }
        self._loaded = self._sent = self._version  # of the rollouts' weights, and of those on their way to them
        self._in_flight = 0  # groups being generated, evaluation included
        self._training = False
        self._saving = False
        self._draining = False  # a new version waits for the rollouts to become idle
        self._swapping = False  # weights are on their way: no generation
        self._lost = False  # no rollout holds weights: no generation until they are sent again
        self._data_ended = False
        self._interrupted = False
        self._stranded: RolloutsLost | None = None
        self._evaluation: Evaluating | None = None
        self._evaluated = -1  # newest version evaluated

        self._change = Change()
        self._phases = Phases(observer)
        self._records = RecordQueue()
        self._saved = self._step  # of the newest checkpoint
        self._started = False

    # --- For the caller --------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Steps trained or skipped; also the step that comes next."""
        return self._step

    @property
    def version(self) -> int:
        """Version of the trainer's weights."""
        return self._version

    @property
    def interrupted(self) -> bool:
        return self._interrupted

    @property
    def stranded(self) -> RolloutsLost | None:
        """Why the run was interrupted, if it was because nobody is left to generate."""
        return self._stranded

    async def __aenter__(self) -> Self:
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        if error is None:
            self._tasks.cancel_scope.cancel()
        try:
            return await self._tasks.__aexit__(kind, error, trace)
        except BaseExceptionGroup as group:
            cause = first_cause(group)
        finally:
            self._records.close()
        if cause is error:
            return False
        context = cause.__context__
        try:
            raise cause
        finally:
            cause.__context__ = context  # its own history, not the group it was found in

    def run(self) -> AsyncIterator[StepRecord]:
        """Start, and iterate over the records of the steps, in order.

        The run does not wait for who reads the records. Step m's record comes when step m + 1 begins to train (its
        window ends then) and its evaluation, if one was due, is done.
        """
        if self._started:
            raise SchedulerError("a Scheduler runs once; make another one from state() to go on")
        self._started = True
        self._tasks.start_soon(self._run, name="scheduler")
        return self._records

    def interrupt(self) -> None:
        """End soon and in good order: a training step in progress completes, a checkpoint is saved, `run` ends."""
        self._interrupted = True
        if self._started:
            self._change.notify()

    def state(self) -> SchedulerState:
        """Where the run stands now, also after it has failed: all that `Scheduler(state=...)` needs to go on."""
        return SchedulerState(
            step=self._step,
            version=self._version,
            next_uid=self._next_uid,
            open_steps=tuple(ledger.save() for _, ledger in sorted(self._ledgers.items()) if ledger.dispatched),
        )

    # --- The run ---------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        self._windows = Windows(self._phases, self._settings.max_staleness)
        async with anyio.create_task_group() as self._groups:
            self._groups.start_soon(self._dispatch, name="dispatch")
            if self._settings.eval_initial and self._step == 0:
                self._evaluate(self._version, made_by=-1)
            await self._train_steps()
            await self._change.until(lambda: not self._swapping)  # no rollout is left with half of its weights
            if not self._interrupted:
                await self._evaluate_final()
            self._groups.cancel_scope.cancel()
        if self._interrupted or (self._settings.checkpoint_every and self._saved != self._step):
            await self._save()
        self._records.put(self._windows.close())
        self._records.end()

    async def _train_steps(self) -> None:
        """The trainer's line: one step after the other, while groups are generated beside it."""
        while (ledger := await self._next_batch()) is not None:
            self._records.put(self._windows.open(ledger, self._version))
            if ledger.finished:
                await self._train(ledger)
                await self._swap_weights(made_by=ledger.step)
            else:
                self._skip(ledger)
            if self._checkpoint_due() and not self._interrupted:
                await self._save()

    async def _next_batch(self) -> StepLedger | None:
        """Wait until all groups of the next step are there; None if there is no next step or the run is to end."""
        if self._step >= self._settings.steps:
            return None
        ledger = self._ledger(self._step)
        await self._until_generated(lambda: self._is_complete(ledger))
        if self._interrupted or not ledger.dispatched:
            return None
        self._end_of_generation(ledger)
        return ledger

    async def _until_generated(self, condition: Callable[[], bool]) -> None:
        """Wait, between two training steps, for what the rollouts bring; if all are lost, send the weights again."""
        while True:
            await self._change.until(lambda: self._interrupted or self._lost or condition())
            if self._interrupted or condition():
                return
            logger.warning("no rollout holds weights: version %d is sent again", self._version)
            await self._swap_weights(made_by=self._step - 1)

    # --- 1. Dispatch: which group may start now? -------------------------------------------------------------------

    async def _dispatch(self) -> None:
        """Start groups in the order of the data as soon as they may; those to train on before those to evaluate."""
        while True:
            ledger, evaluation = self._ledger_to_fill(), self._evaluation
            if self._has_room() and ledger is not None:
                self._dispatch_one(ledger)
            elif self._has_room() and evaluation is not None and evaluation.waiting and self._may_generate():
                self._in_flight += 1
                self._phases.begin("rollout", "occupied")
                self._groups.start_soon(self._generate_to_evaluate, evaluation, evaluation.waiting.popleft())
            else:
                await self._change.next()
                continue
            await checkpoint()  # one a turn: they begin in this order, and thousands do not hold up the event loop

    def _has_room(self) -> bool:
        return self._settings.max_in_flight is None or self._in_flight < self._settings.max_in_flight

    def _may_generate(self) -> bool:
        return not (self._swapping or self._lost)

    def _ledger_to_fill(self) -> StepLedger | None:
        """The first step that needs a group and may have it started now."""
        if not self._may_generate():
            return None
        first = self._step + self._training
        end = self._step + self._settings.batches_ahead + (self._training or self._saving)
        if self._draining:  # only the step that the trainer waits for goes on under the old weights
            end = first + 1
        for step in range(first, min(end, self._settings.steps)):
            if self._loaded < self._oldest_allowed(step):
                return None
            ledger = self._ledger(step)
            if ledger.again or (ledger.missing > 0 and not self._data_ended):
                return ledger
        return None

    def _oldest_allowed(self, step: int) -> int:
        """The lowest version that a group of this step may come from; lower still if steps before it are skipped."""
        return self._version + (step - self._step) - self._settings.max_staleness

    def _dispatch_one(self, ledger: StepLedger) -> None:
        fresh = not ledger.again
        uid = self._next_uid if fresh else ledger.again[0]
        try:
            prompt = self._prompts[uid]
        except IndexError:
            if uid == 0:
                raise SchedulerError("there are no prompts: prompts[0] raises IndexError") from None
            if not fresh:
                raise SchedulerError(f"the state to resume from needs prompt {uid}, but the data ends before") from None
            self._data_ended = True
            self._change.notify()
            return
        if prompt.uid != uid:
            raise SchedulerError(f"prompts[{uid}] has uid {prompt.uid}; a prompt's uid is its position")
        if fresh:
            self._next_uid += 1
        else:
            ledger.again.popleft()
        if ledger.first_dispatch is None:
            self._phases.tell("generate", ledger.step, self._loaded, "begin", anyio.current_time())
        ledger.dispatch(uid, anyio.current_time(), fresh=fresh)
        self._in_flight += 1
        self._phases.begin("rollout", "generate", "occupied")
        self._groups.start_soon(self._generate_to_train, ledger, prompt)

    def _ledger(self, step: int) -> StepLedger:
        if step not in self._ledgers:
            self._ledgers[step] = StepLedger(step, self._settings.prompts_per_step, self._settings.group_limit)
        return self._ledgers[step]

    # --- 2. Generate: one task a group -----------------------------------------------------------------------------

    async def _generate_to_train(self, ledger: StepLedger, prompt: Prompt) -> None:
        request = GroupRequest(prompt, ledger.step, self._loaded)
        outcome = await self._outcome(request, self._oldest_allowed(ledger.step))
        self._phases.end("rollout", "generate", "occupied")
        if outcome is None:
            ledger.lose(prompt.uid)
        else:
            ledger.settle(prompt.uid, outcome, anyio.current_time())
        self._in_flight -= 1
        if self._is_complete(ledger):
            self._end_of_generation(ledger)
        self._change.notify()

    async def _outcome(self, request: GroupRequest, oldest_allowed: int) -> Outcome | None:
        """What became of a group; None if it was lost with all rollouts."""
        try:
            return await self._attempts.group(request, oldest_allowed)
        except RolloutsLost:
            self._lost = True
            return None

    def _is_complete(self, ledger: StepLedger) -> bool:
        return not ledger.unfinished and (ledger.missing <= 0 or self._data_ended)

    def _end_of_generation(self, ledger: StepLedger) -> None:
        if ledger.last_scored is not None and not ledger.reported:
            ledger.reported = True
            self._phases.tell("generate", ledger.step, self._loaded, "end", ledger.last_scored, ledger.generate_s)

    # --- 3. Train --------------------------------------------------------------------------------------------------

    async def _train(self, ledger: StepLedger) -> None:
        batch = Batch(ledger.step, self._version, ledger.groups)
        self._training = True
        self._change.notify()
        with self._phases("train", ledger.step, self._version):
            metrics = await call_role(
                "trainer",
                f"trainer.train of step {ledger.step}",
                self._trainer.train(ledger.step, batch),
                self._settings.train_deadline_s,
                "train_deadline_s",
            )
        self._windows.metrics = metrics
        self._training = False
        self._version += 1
        self._leave_behind(ledger)
        if self._evaluation_due(self._version):
            self._records.hold(ledger.step)

    def _skip(self, ledger: StepLedger) -> None:
        """Nothing to train: the version stays, and there is nothing to send."""
        dropped = ", ".join(f"{count} {reason}" for reason, count in ledger.dropped.items())
        last_of_many = self._data_ended and self._version > 0
        if not (ledger.dropped["filtered"] or last_of_many):  # going on would burn through the data and train nothing
            raise RoleError("rollout", 0, f"no group of step {ledger.step} could be generated: {dropped}")
        logger.warning("step %d is skipped: every group was dropped: %s", ledger.step, dropped)
        self._leave_behind(ledger)

    def _leave_behind(self, ledger: StepLedger) -> None:
        """The step is over: the frontier moves on."""
        del self._ledgers[ledger.step]
        self._step += 1
        self._change.notify()

    # --- 4. Swap weights: nothing is dispatched from before `send` until after `load` ------------------------------

    async def _swap_weights(self, made_by: int) -> None:
        """Send the new weights once the rollouts may take them; loading goes on beside the next training step."""
        self._draining = self._settings.swap == "boundary"
        self._change.notify()
        await self._change.until(lambda: self._interrupted or self._rollouts_may_swap())
        self._draining = False
        if self._interrupted:
            return
        self._swapping, self._lost = True, False
        self._give_up_evaluation()
        self._sent = self._version
        self._phases.begin("occupied")
        with self._phases("send", made_by, self._version):
            try:
                await self._call_sync("trainer", "send", self._version)
            except RolloutsLost as stranded:
                self._stranded = stranded
        if self._stranded is not None:
            self._phases.end("occupied")
            self._swapping = False
            self.interrupt()
            return
        self._groups.start_soon(self._load, self._version, made_by)

    def _rollouts_may_swap(self) -> bool:
        if self._lost:
            return not (self._swapping or self._in_flight)
        if self._settings.swap == "boundary":
            return self._rollouts_idle()
        return not self._swapping and self._evaluation is None

    def _rollouts_idle(self) -> bool:
        """Nothing is being generated, and nothing more may be under the weights that are loaded."""
        evaluating = self._evaluation is not None
        return not (self._swapping or self._in_flight or evaluating or self._ledger_to_fill() is not None)

    async def _load(self, version: int, made_by: int) -> None:
        with self._phases("load", made_by, version):
            await self._call_sync("rollout", "load", version)
        self._phases.end("occupied")
        self._loaded = version
        self._swapping = False
        if self._evaluation_due(version) and self._evaluated != version:
            self._evaluate(version, made_by)
        self._change.notify()

    async def _call_sync(self, role: str, method: str, version: int) -> None:
        call = self._weight_sync.send(version) if method == "send" else self._weight_sync.load(version)
        deadline_s = self._settings.sync_deadline_s
        await call_role(role, f"weight_sync.{method} of version {version}", call, deadline_s, "sync_deadline_s")

    # --- Beside the steps: evaluation, checkpoints, records --------------------------------------------------------

    def _evaluation_due(self, version: int) -> bool:
        return self._settings.eval_every > 0 and version % self._settings.eval_every == 0

    def _evaluate(self, version: int, made_by: int) -> None:
        """Have the held-out set generated under exactly this version: no other is sent before it is done."""
        now = anyio.current_time()
        self._evaluation = Evaluating(version, made_by, self._eval_prompts, now)
        self._evaluated = version
        self._phases.tell("eval", made_by, version, "begin", now)
        self._change.notify()

    async def _generate_to_evaluate(self, evaluation: Evaluating, prompt: Prompt) -> None:
        request = GroupRequest(prompt, evaluation.made_by, evaluation.version, purpose="eval")
        outcome = await self._outcome(request, evaluation.version)
        self._phases.end("rollout", "occupied")
        self._in_flight -= 1
        if outcome is None:
            evaluation.waiting.append(prompt)
        else:
            evaluation.settle(outcome)
        if evaluation.complete:
            now = anyio.current_time()
            result = evaluation.result(now)
            self._evaluation = None
            self._phases.tell("eval", evaluation.made_by, evaluation.version, "end", now, result.time)
            self._records.evaluated(evaluation.made_by, result)
        self._change.notify()

    def _give_up_evaluation(self) -> None:
        """All rollouts were lost, and what is sent now is not what was being evaluated: nobody holds that any more."""
        evaluation = self._evaluation
        if evaluation is None or evaluation.version == self._version:
            return
        logger.warning("version %d is not evaluated: every rollout that held it was lost", evaluation.version)
        self._evaluation = None
        self._phases.tell("eval", evaluation.made_by, evaluation.version, "end", anyio.current_time())
        self._records.release(evaluation.made_by)

    async def _evaluate_final(self) -> None:
        """Evaluate the weights that the run ends with, whatever their number."""
        if self._settings.eval_every and self._windows.is_open and self._evaluated != self._version:
            self._evaluate(self._version, made_by=self._step - 1)
        await self._until_generated(lambda: self._evaluation is None)

    def _checkpoint_due(self) -> bool:
        every = self._settings.checkpoint_every
        return every > 0 and (self._step % every == 0 or self._step == self._settings.steps)

    async def _save(self) -> None:
        self._saving = True
        self._change.notify()
        with self._phases("checkpoint", self._step, self._version):
            packed = await anyio.to_thread.run_sync(self.state().pack)
            await call_role(
                "trainer",
                f"trainer.save after {self._step} steps",
                self._trainer.save(self._step, packed),
                self._settings.save_deadline_s,
                "save_deadline_s",
            )
        self._saved = self._step
        self._saving = False
