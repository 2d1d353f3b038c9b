"""A fault at every await point: an exception, a cancellation or a hang at each of them in turn.

The run must end promptly and with the first cause, leave no group being generated, and going on from `state()` must
train exactly what an undisturbed run trains.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio
import pytest

from aoffpolicy import (
    Batch,
    GroupRequest,
    PhaseEvent,
    RoleError,
    RolloutsLost,
    SampleGroup,
    Scheduler,
    SchedulerSettings,
    SchedulerState,
)
from aoffpolicy.errors import DeadlineError
from tests.simulated import SimulatedRoles, VirtualLoop, World, always, drive, group, prompts, run_virtually

STEPS, PER_STEP, ROWS = 4, 2, 100
DURATION = always(generate=1.0, train=1.5, send=0.2, load=0.3, save=0.4)
DEADLINE_S = 5.0
WHOLE = {m: tuple(range(m * PER_STEP, (m + 1) * PER_STEP)) for m in range(STEPS)}
"""What an undisturbed run trains."""


class Injected(Exception):
    """The fault."""


def settings(staleness: int) -> SchedulerSettings:
    return SchedulerSettings(
        steps=STEPS,
        prompts_per_step=PER_STEP,
        max_staleness=staleness,
        checkpoint_every=2,
        eval_every=1,
        group_deadline_s=DEADLINE_S,
        max_attempts=2,
        train_deadline_s=DEADLINE_S,
        sync_deadline_s=DEADLINE_S,
        save_deadline_s=DEADLINE_S,
    )


class FaultAt:
    """Counts the awaits of the roles, before and after their effects, and strikes at one of them, once."""

    def __init__(self, number: int, strike: Callable[[], Awaitable[None]]) -> None:
        self.count = 0
        self.struck: str | None = None
        self.struck_at = 0.0
        self._number = number
        self._strike = strike

    async def __call__(self, where: str) -> None:
        self.count += 1
        if self.count == self._number:
            self.struck, self.struck_at = where, anyio.current_time()
            await self._strike()


async def raise_it() -> None:
    raise Injected


async def cancel_itself() -> None:
    raise asyncio.CancelledError


async def hang() -> None:
    await anyio.sleep_forever()


async def run_with(fault: FaultAt, world: World, staleness: int) -> tuple[BaseException | None, Scheduler, float]:
    """Run until the end or the fault; how it ended, and the seconds from the fault to the end."""
    roles = SimulatedRoles(world, DURATION, hook=fault)
    scheduler = Scheduler(roles, roles, roles, prompts(ROWS), settings(staleness), eval_prompts=prompts(1))
    ended: BaseException | None = None
    try:
        async with scheduler:
            async for _ in scheduler.run():
                pass
    except Exception as error:
        ended = error
    return ended, scheduler, anyio.current_time() - fault.struck_at


def awaits(staleness: int) -> int:
    """The number of awaits of a whole run."""
    fault = FaultAt(0, raise_it)
    ended, _, _ = run_virtually(lambda: run_with(fault, World(), staleness))
    assert ended is None
    return fault.count


def assert_goes_on(world: World, state: SchedulerState, staleness: int) -> None:
    world.swapping = world.training = False  # the processes are new
    world.sent.clear()
    roles = SimulatedRoles(world, DURATION)
    result = run_virtually(
        lambda: drive(roles, settings(staleness), prompts(ROWS), state=state.pack(), eval_prompts=prompts(1))
    )
    assert world.trained == WHOLE
    assert [record.step for record in result.records] == list(range(state.step, STEPS))
    assert all(behind <= staleness for behind in world.staleness)


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_an_exception_at_any_await_of_a_role_ends_the_run_at_once_with_that_exception(staleness: int) -> None:
    total = awaits(staleness)
    assert total > 50
    for number in range(1, total + 1):
        world, fault = World(), FaultAt(number, raise_it)
        ended, scheduler, seconds = run_virtually(partial(run_with, fault, world, staleness))
        assert type(ended) is Injected, fault.struck
        assert seconds == 0, fault.struck
        assert not +world.generating
        assert f"raised by {role_of(fault.struck)}" in " ".join(ended.__notes__)
        assert_goes_on(world, scheduler.state(), staleness)


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_a_role_that_cancels_itself_ends_the_run_with_an_error_and_not_in_silence(staleness: int) -> None:
    for number in range(1, awaits(staleness) + 1):
        world, fault = World(), FaultAt(number, cancel_itself)
        ended, scheduler, seconds = run_virtually(partial(run_with, fault, world, staleness))
        assert isinstance(ended, RoleError) and "cancelled from within" in str(ended), fault.struck
        assert seconds == 0, fault.struck
        assert_goes_on(world, scheduler.state(), staleness)


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_a_hang_at_any_await_of_a_role_ends_at_its_deadline(staleness: int) -> None:
    for number in range(1, awaits(staleness) + 1):
        world, fault = World(), FaultAt(number, hang)
        ended, scheduler, seconds = run_virtually(partial(run_with, fault, world, staleness))
        assert fault.struck is not None
        if fault.struck.startswith("generate"):  # another attempt, and the run goes on
            assert ended is None and world.trained == WHOLE
            continue
        assert isinstance(ended, DeadlineError) and "deadline_s" in str(ended), fault.struck
        assert seconds <= DEADLINE_S, fault.struck
        assert_goes_on(world, scheduler.state(), staleness)


def role_of(where: str | None) -> str:
    call = (where or "").partition(":")[0]
    return {"generate": "rollout", "train": "trainer", "save": "trainer"}.get(call, "weight_sync") + "." + call


# --- From outside, at every turn of the event loop: wherever the pipeline waits, its own awaits included ------------


class AtTurn:
    """Counts the turns of the event loop during a run, and acts at one of them."""

    def __init__(self, number: int, act: Callable[[Scheduler, anyio.CancelScope], None]) -> None:
        self.count = 0
        self.acted_at: float | None = None
        self._number = number
        self._act = act

    def run(self, world: World, staleness: int) -> tuple[Scheduler, float]:
        """The scheduler, and the seconds from the act to the end."""
        return run_virtually(lambda: self._run(world, staleness))

    async def _run(self, world: World, staleness: int) -> tuple[Scheduler, float]:
        roles = SimulatedRoles(world, DURATION)
        scheduler = Scheduler(roles, roles, roles, prompts(ROWS), settings(staleness), eval_prompts=prompts(1))
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)

        def count() -> bool:
            self.count += 1
            if self.count != self._number:
                return False
            self.acted_at = loop.time()
            self._act(scheduler, scope)
            return True

        with anyio.CancelScope() as scope:
            async with scheduler:
                loop.at_every_turn(count)
                async for _ in scheduler.run():
                    pass
        loop.at_every_turn(None)
        return scheduler, loop.time() - (self.acted_at or 0.0)


def turns(staleness: int) -> int:
    """Turns of the event loop in an undisturbed run."""
    undisturbed = AtTurn(0, lambda scheduler, scope: None)
    undisturbed.run(World(), staleness)
    return undisturbed.count


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_a_cancellation_at_any_turn_of_the_event_loop_ends_the_run_at_once_and_can_be_gone_on_from(
    staleness: int,
) -> None:
    total = turns(staleness)
    assert total > 80
    for number in range(1, total):
        world = World()
        scheduler, seconds = AtTurn(number, lambda scheduler, scope: scope.cancel()).run(world, staleness)
        assert seconds == 0
        assert not +world.generating and not world.training
        assert_goes_on(world, scheduler.state(), staleness)


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_an_interrupt_at_any_turn_ends_the_run_soon_with_a_checkpoint_that_can_be_gone_on_from(staleness: int) -> None:
    for number in range(1, turns(staleness)):
        world = World()
        at_turn = AtTurn(number, lambda scheduler, scope: scheduler.interrupt())
        scheduler, seconds = at_turn.run(world, staleness)
        if at_turn.acted_at is None:
            continue
        assert scheduler.interrupted
        assert seconds <= 1.5 + 0.2 + 0.3 + 0.4 + 0.4 + 1e-6, "more than a train, a swap, a save and the last save"
        assert not +world.generating and not world.training and not world.swapping
        step, packed = world.saved[-1]
        assert step == scheduler.step
        assert_goes_on(world, SchedulerState.unpack(packed), staleness)


# --- Faults of other kinds -----------------------------------------------------------------------------------------


async def end_of(roles: Any, *, data: Any = None, observer: Any = None, **changes: Any) -> BaseException | None:
    """How a run with these roles ends."""
    asked = SchedulerSettings(steps=STEPS, prompts_per_step=PER_STEP, **changes)
    try:
        async with Scheduler(roles, roles, roles, data or prompts(ROWS), asked, observer=observer) as scheduler:
            async for _ in scheduler.run():
                pass
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize("number", [1, 2, 5, 9, 14])
def test_an_exception_in_a_role_ends_a_run_on_trio_just_the_same(number: int) -> None:
    fault = FaultAt(number, raise_it)
    ended = run_virtually(lambda: end_of(SimulatedRoles(World(), DURATION, hook=fault)), "trio")
    assert type(ended) is Injected and fault.struck


@pytest.mark.parametrize("phase", ["generate", "train", "send", "load", "checkpoint"])
@pytest.mark.parametrize("state", ["begin", "end"])
def test_an_exception_in_the_observer_ends_the_run_with_that_exception(phase: str, state: str) -> None:
    def observer(event: PhaseEvent) -> None:
        if (event.name, event.state) == (phase, state):
            raise Injected

    roles = SimulatedRoles(World(), DURATION)
    assert type(run_virtually(lambda: end_of(roles, observer=observer, checkpoint_every=1))) is Injected


def test_an_exception_in_the_filter_or_the_data_ends_the_run_with_that_exception() -> None:
    class BrokenData:
        def __getitem__(self, uid: int) -> Any:
            raise Injected

    def broken_filter(group: SampleGroup) -> bool:
        raise Injected

    roles = SimulatedRoles(World(), DURATION)
    assert type(run_virtually(lambda: end_of(roles, data=BrokenData()))) is Injected
    assert type(run_virtually(lambda: end_of(roles, keep=broken_filter))) is Injected


class Answers(SimulatedRoles):
    """A rollout that answers every order with what a function makes of it."""

    def __init__(self, answer: Callable[[GroupRequest], SampleGroup]) -> None:
        super().__init__(World(), DURATION)
        self._answer = answer

    async def generate(self, request: GroupRequest) -> SampleGroup:
        await super().generate(request)
        return self._answer(request)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda r: group(r.prompt, r.version + 1), "tokens of version 1"),
        (lambda r: group(prompts(9)[8], r.version), "with prompt 8"),
        (lambda r: group(r.prompt, r.version, rewards=(1.0, float("nan"))), "finite"),
        (lambda r: group(r.prompt, r.version, tokens=0), "no group of step 0 could be generated: 8 empty"),
        (lambda r: group(r.prompt, r.version - 2), "no group of step 0 could be generated: 8 too_stale"),
    ],
    ids=["version never loaded", "other prompt", "reward nan", "no tokens", "older than allowed"],
)
def test_an_impossible_answer_of_the_rollout_is_refused_and_named(
    answer: Callable[[GroupRequest], SampleGroup], message: str
) -> None:
    ended = run_virtually(lambda: end_of(Answers(answer)))
    assert ended is not None and message in str(ended)


def test_the_first_of_several_failures_is_raised_also_when_others_fail_while_they_are_cancelled() -> None:
    class Both(SimulatedRoles):
        async def train(self, step: int, batch: Batch) -> dict[str, float]:
            try:
                await anyio.sleep(1)
            except BaseException as error:
                raise RuntimeError("failed while it was cleaning up") from error
            return {}

        async def generate(self, request: GroupRequest) -> SampleGroup:
            if request.step == 1:
                await anyio.sleep(0.5)
                raise Injected
            return await super().generate(request)

    for backend in ("asyncio", "trio"):
        ended = run_virtually(lambda: end_of(Both(World())), backend)
        assert type(ended) is Injected


def test_the_own_history_of_an_exception_is_kept() -> None:
    async def strike() -> None:
        try:
            raise KeyError("before")
        except KeyError:
            raise Injected  # noqa: B904

    ended = run_virtually(lambda: end_of(SimulatedRoles(World(), DURATION, hook=FaultAt(3, strike))))
    assert type(ended) is Injected and isinstance(ended.__context__, KeyError)


def test_a_group_of_exceptions_from_a_role_is_unwrapped_to_its_first() -> None:
    async def strike() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(raise_it)

    ended = run_virtually(lambda: end_of(SimulatedRoles(World(), DURATION, hook=FaultAt(3, strike))))
    assert type(ended) is Injected


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_failure_ends_the_loop_body_of_whoever_reads_the_records(backend: str) -> None:
    async def main() -> None:
        roles = SimulatedRoles(World(), DURATION, hook=FaultAt(25, raise_it))
        asked = SchedulerSettings(steps=STEPS, prompts_per_step=PER_STEP)
        async with Scheduler(roles, roles, roles, prompts(ROWS), asked) as scheduler:
            async for _ in scheduler.run():
                await anyio.sleep_forever()

    with pytest.raises(Injected):
        run_virtually(main, backend)


def test_an_exception_of_whoever_reads_the_records_is_the_one_that_is_raised_and_ends_the_run() -> None:
    world = World()

    async def main() -> int:
        roles = SimulatedRoles(world, DURATION)
        asked = SchedulerSettings(steps=STEPS, prompts_per_step=PER_STEP)
        with pytest.raises(Injected):
            async with Scheduler(roles, roles, roles, prompts(ROWS), asked) as scheduler:
                async for _ in scheduler.run():
                    raise Injected
        return len(asyncio.all_tasks())

    assert run_virtually(main) == 1, "a task is left"
    assert not +world.generating


def test_a_native_cancellation_on_asyncio_goes_through_and_leaves_no_task() -> None:
    async def main() -> tuple[bool, int]:
        roles = SimulatedRoles(World(), DURATION)
        asked = SchedulerSettings(steps=STEPS, prompts_per_step=PER_STEP)

        async def whole() -> None:
            async with Scheduler(roles, roles, roles, prompts(ROWS), asked) as scheduler:
                async for _ in scheduler.run():
                    pass

        task = asyncio.create_task(whole())
        await asyncio.sleep(2.0)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled(), len(asyncio.all_tasks())

    assert run_virtually(main) == (True, 1)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("number", [1, 3])
def test_when_no_rollout_will_come_the_run_ends_in_good_order_and_can_be_gone_on_from(
    number: int, backend: str
) -> None:
    class Stranded(SimulatedRoles):
        async def send(self, version: int) -> None:
            if version == number:
                raise RolloutsLost("all gone")
            await super().send(version)

    world = World()
    result = run_virtually(
        lambda: drive(Stranded(world, DURATION), settings(1), prompts(ROWS), eval_prompts=prompts(2)), backend
    )
    assert str(result.scheduler.stranded) == "all gone"
    assert [record.step for record in result.records] == list(range(number))
    step, packed = world.saved[-1]
    assert step == number == result.scheduler.step
    state = SchedulerState.unpack(packed)
    again = World(trained=dict(world.trained))
    rest = run_virtually(
        lambda: drive(
            SimulatedRoles(again, DURATION), settings(1), prompts(ROWS), state=state, eval_prompts=prompts(2)
        ),
        backend,
    )
    assert again.trained == WHOLE
    assert rest.scheduler.stranded is None
