"""The invariants of the pipeline over thousands of simulated runs in virtual time.

1. Steps 0..N-1 are each trained or recorded as skipped exactly once, in order; nothing is generated beyond their need.
2. Staleness of every trained token is at most max_staleness, by the version that really produced it.
3. No generation runs while weights are swapped (asserted inside the simulated roles), unless that is asked for.
4. Faults: tests/test_scheduler_faults.py.
5. Every group dispatched is trained once or dropped with a reason; dispatch order is that of the data.
6. The end of the data, a short batch, `steps = 1` are ordinary cases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import anyio
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from aoffpolicy import RoleError, Scheduler, SchedulerSettings, SchedulerState, StepRecord
from tests.simulated import Duration, Result, SimulatedRoles, World, drive, prompts, run_virtually

CLOSE = 1e-6
Swap = Literal["boundary", "in_flight"]
CALLS = ("generate", "train", "send", "load", "save")


@dataclass(frozen=True)
class Case:
    """One simulated run."""

    settings: SchedulerSettings
    rows: int
    """Prompts in the data."""
    durations: tuple[float, ...]
    filtered: frozenset[int]
    failing: frozenset[int]
    """uids that the rollout gives up on."""
    losses: tuple[float, ...] = ()
    """Moments at which all rollouts are lost."""

    def duration(self) -> Duration:
        """Every call takes its own time, always the same."""
        return lambda call, number: self.durations[(7 * number + CALLS.index(call)) % len(self.durations)]

    def roles(self, world: World) -> SimulatedRoles:
        return SimulatedRoles(
            world,
            self.duration(),
            drop=self.failing.__contains__,
            rewards=lambda uid: (1.0, 1.0) if uid in self.filtered else (0.0, 1.0),
            in_flight=self.settings.swap == "in_flight",
            losses=self.losses,
        )

    def run(self, backend: str = "asyncio") -> tuple[World, Result]:
        world = World()
        evaluation = prompts(3) if self.settings.eval_every else None
        result = run_virtually(
            lambda: drive(self.roles(world), self.settings, prompts(self.rows), eval_prompts=evaluation), backend
        )
        return world, result


@st.composite
def cases(draw: st.DrawFn, *, dropping: bool = True, swaps: Sequence[Swap] = ("boundary",)) -> Case:
    steps = draw(st.integers(1, 20))
    per_step = draw(st.integers(1, 5))
    staleness = draw(st.integers(0, 4))
    rows = draw(st.one_of(st.just(4 * steps * per_step), st.integers(1, steps * per_step + 3)))
    eval_every = draw(st.sampled_from([0, 0, 1, 2, 5]))
    uids = st.frozensets(st.integers(0, 60), max_size=25) if dropping else st.just(frozenset[int]())
    return Case(
        SchedulerSettings(
            steps=steps,
            prompts_per_step=per_step,
            max_staleness=staleness,
            ahead=draw(st.one_of(st.none(), st.integers(1, max(staleness, 1)))),
            max_in_flight=draw(st.one_of(st.none(), st.integers(1, 8))),
            swap=draw(st.sampled_from(swaps)),
            filter_zero_variance=True,
            on_filtered=draw(st.sampled_from(["refill", "shrink"])),
            max_groups_per_step=draw(st.one_of(st.none(), st.integers(per_step, per_step + 4))),
            checkpoint_every=draw(st.sampled_from([0, 0, 0, 1, 3])),
            eval_every=eval_every,
            eval_initial=eval_every > 0 and draw(st.booleans()),
        ),
        rows,
        tuple(draw(st.lists(st.sampled_from([0.0, 0.1, 1.0, 3.0, 20.0]), min_size=1, max_size=12))),
        filtered=draw(uids),
        failing=draw(uids) if draw(st.booleans()) else frozenset(),
    )


def check_everything(case: Case, world: World, result: Result) -> None:
    settings, records = case.settings, result.records
    train = [request for request in world.dispatched if request.purpose == "train"]

    # 1 and 6: the steps, in order, as many as the data allows
    assert [record.step for record in records] == list(range(len(records)))
    assert {record.step for record in records if not record.skipped} == set(world.trained)
    assert result.scheduler.step == len(records)
    if len(records) < settings.steps:
        assert result.state.next_uid == case.rows, "the run ended before the steps and before the data"
    assert result.state.open_steps == (), "groups were generated that no step needed"

    # 2: staleness by the version that the roles really had
    assert all(staleness <= settings.max_staleness for staleness in world.staleness)
    assert max((record.staleness_max for record in records), default=0) == max(world.staleness, default=0)

    # 5: every group has one end, and the order is that of the data
    assert [request.prompt.uid for request in train] == list(range(result.state.next_uid))
    trained = Counter(uid for uids in world.trained.values() for uid in uids)
    assert set(trained.values()) <= {1}
    for record in records:
        assert record.groups_dispatched == record.groups_trained + sum(record.groups_dropped.values())
        assert record.groups_trained == len(world.trained.get(record.step, ()))
        assert record.groups_trained <= settings.prompts_per_step
        assert record.groups_dispatched <= settings.group_limit
    assert sum(record.groups_dispatched for record in records) == len(train)
    assert sum(record.groups_trained for record in records) == trained.total()
    assert not trained.keys() & (case.filtered | case.failing)

    # versions: every one is sent once, in order, and the last one is where the run ends
    assert world.sent == list(range(1, result.scheduler.version + 1))
    assert world.loaded == result.scheduler.version == len(world.trained)

    check_evaluations(case, world, records)
    check_times(world, result)


def check_evaluations(case: Case, world: World, records: list[StepRecord]) -> None:
    """Each evaluation is on the version it says, and on none other; the final one is never left out."""
    every = case.settings.eval_every
    asked = Counter(request.version for request in world.dispatched if request.purpose == "eval")
    assert set(asked.values()) <= {3}
    told = {record.evaluation.version: record for record in records if record.evaluation is not None}
    initial = [record.initial_evaluation for record in records if record.initial_evaluation is not None]
    assert len(told) + len(initial) == len(asked)
    if every and records:
        final = len(world.trained)
        due = {version for version in range(1, final + 1) if version % every == 0}
        assert set(asked) == due | {final} | ({0} if case.settings.eval_initial else set())
        for version in due:
            assert told[version].policy_version == version - 1 and not told[version].skipped


def check_times(world: World, result: Result) -> None:
    """Every second of a step has a name, and the names agree with what the roles measured themselves."""
    check_lines(result)
    total = sum(record.time_step + record.time_fill for record in result.records)
    if result.records:
        assert total == pytest.approx(result.seconds, abs=CLOSE)
        assert result.records[-1].overlap_efficiency is None
    for ours, call in (("time_train", "train"), ("time_sync", "send"), ("time_load", "load")):
        measured = sum(getattr(record, ours) for record in result.records)
        assert measured == pytest.approx(world.busy_s[call], abs=CLOSE)


def check_lines(result: Result) -> None:
    for r in result.records:
        trainer_line = r.time_train + r.time_sync + r.time_checkpoint + r.time_wait_rollout
        rollout_line = r.time_rollout + r.time_eval + r.time_sync + r.time_load + r.time_wait_trainer
        assert trainer_line == pytest.approx(r.time_step, abs=CLOSE)
        assert rollout_line == pytest.approx(r.time_step, abs=CLOSE)
        assert r.overlap_efficiency is None or 0 <= r.overlap_efficiency <= 1 + CLOSE


backends = st.sampled_from(["asyncio", "asyncio", "trio"])
EXAMPLES = settings(max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
FEWER = settings(EXAMPLES, max_examples=150)


@EXAMPLES
@given(cases().filter(lambda case: not case.failing))
def test_the_invariants_hold_for_every_combination_of_settings_durations_and_filters(case: Case) -> None:
    world, result = case.run()
    check_everything(case, world, result)


@FEWER
@given(cases(swaps=("in_flight",)).filter(lambda case: not case.failing))
def test_the_invariants_hold_when_weights_are_swapped_while_groups_are_generated(case: Case) -> None:
    world, result = case.run()
    check_everything(case, world, result)


@FEWER
@given(cases())
def test_groups_that_the_rollout_gives_up_on_are_dropped_and_a_step_that_gets_nothing_else_ends_the_run(
    case: Case,
) -> None:
    try:
        world, result = case.run()
    except RoleError as error:
        assert error.role == "rollout" and "could be generated" in str(error)
        assert case.failing
    else:
        check_everything(case, world, result)


@FEWER
@given(cases(dropping=False))
def test_without_drops_step_m_trains_the_mth_slice_of_the_data_whatever_the_timing(case: Case) -> None:
    world, _ = case.run()
    assert world.trained == slices(case, range(case.rows))


@EXAMPLES
@given(
    cases(dropping=False, swaps=("boundary", "in_flight")), st.lists(st.floats(0, 60), min_size=1, max_size=6), backends
)
def test_rollouts_that_are_all_lost_cost_time_and_nothing_else(case: Case, losses: list[float], backend: str) -> None:
    case = replace(case, losses=tuple(losses))
    world, result = case.run(backend)
    assert world.trained == slices(case, range(case.rows))
    assert [record.step for record in result.records] == sorted(world.trained)
    assert all(staleness <= case.settings.max_staleness for staleness in world.staleness)
    assert sorted(set(world.sent) | {0}) == list(range(result.scheduler.version + 1)) and world.sent == sorted(
        world.sent
    )
    assert world.loaded == result.scheduler.version
    for record in result.records:
        assert record.groups_dispatched == record.groups_trained
    check_lines(result)


@FEWER
@given(cases().filter(lambda case: not case.failing and case.settings.on_filtered == "shrink"))
def test_shrinking_leaves_the_other_groups_where_they_are_whatever_the_timing(case: Case) -> None:
    world, _ = case.run()
    kept = {
        step: tuple(uid for uid in uids if uid not in case.filtered)
        for step, uids in slices(case, range(case.rows)).items()
    }
    assert world.trained == {step: uids for step, uids in kept.items() if uids}


@FEWER
@given(cases().filter(lambda case: not case.failing and case.settings.max_groups_per_step is None))
def test_on_policy_refilling_trains_the_groups_that_pass_in_the_order_of_the_data(case: Case) -> None:
    no_limit = case.settings.prompts_per_step + case.rows  # what a step may try is not looked at here
    changes = dict(max_staleness=0, ahead=None, on_filtered="refill", max_groups_per_step=no_limit)
    case = replace(case, settings=replace(case.settings, **changes))
    world, _ = case.run()
    assert world.trained == slices(case, [uid for uid in range(case.rows) if uid not in case.filtered])


def slices(case: Case, uids: Sequence[int]) -> dict[int, tuple[int, ...]]:
    per_step = case.settings.prompts_per_step
    cut = {m: tuple(uids[m * per_step : (m + 1) * per_step]) for m in range(case.settings.steps)}
    return {step: batch for step, batch in cut.items() if batch}


@FEWER
@given(cases(dropping=False), st.floats(0, 60), st.booleans())
def test_a_run_broken_off_at_any_time_goes_on_to_train_what_an_unbroken_one_trains(
    case: Case, when: float, keep_groups: bool
) -> None:
    world = World()
    state = run_virtually(lambda: broken_off(case, world, when))
    assert len(world.trained) in (state.step, state.step + 1), "the last step may be done and nobody has heard of it"
    state = state if keep_groups else state.without_groups()
    again = go_on(case, world, state)
    finished = {group.prompt.uid for open_step in state.open_steps for group in open_step.finished}
    assert not finished & set(again), "finished groups were generated again"


@FEWER
@given(cases(dropping=False), st.floats(0, 60), st.integers(1, 9))
def test_a_roll_back_to_a_checkpoint_with_new_version_numbers_trains_the_same_again(
    case: Case, when: float, skipped_numbers: int
) -> None:
    case = replace(case, settings=replace(case.settings, checkpoint_every=2))
    world = World()
    run_virtually(lambda: broken_off(case, world, when))
    assume(world.saved)
    step, packed = world.saved[-1]
    saved = SchedulerState.unpack(packed)
    assert saved.step == step
    rolled_back = World(trained={m: uids for m, uids in world.trained.items() if m < step})
    highest = max(world.sent, default=0)
    go_on(case, rolled_back, saved.renumbered(highest + skipped_numbers))
    assert all(version > highest for version in rolled_back.sent), "a version number was used twice"


async def broken_off(case: Case, world: World, when: float) -> SchedulerState:
    """Cancel a run after `when` seconds; what its scheduler says then."""
    roles = case.roles(world)
    evaluation = prompts(3) if case.settings.eval_every else None
    scheduler = Scheduler(roles, roles, roles, prompts(case.rows), case.settings, eval_prompts=evaluation)
    with anyio.move_on_after(when):
        async with scheduler:
            async for _ in scheduler.run():
                pass
    assert not +world.generating, "a group is still being generated"
    return scheduler.state()


def go_on(case: Case, world: World, state: SchedulerState) -> list[int]:
    """Resume from the state, to the end: exactly what an unbroken run trains is trained; returns what is generated."""
    before = len(world.dispatched)
    world.swapping = world.training = False  # the processes are new
    world.sent.clear()
    world.staleness.clear()
    evaluation = prompts(3) if case.settings.eval_every else None
    result = run_virtually(
        lambda: drive(case.roles(world), case.settings, prompts(case.rows), state=state.pack(), eval_prompts=evaluation)
    )
    assert world.trained == slices(case, range(case.rows))
    assert [record.step for record in result.records] == list(range(state.step, len(world.trained)))
    assert all(staleness <= case.settings.max_staleness for staleness in world.staleness)
    again = [r.prompt.uid for r in world.dispatched[before:] if r.purpose == "train"]
    assert again == sorted(set(again)), "dispatch order is that of the data"
    return again


@settings(FEWER, max_examples=60)
@given(cases().filter(lambda case: not case.failing and not case.settings.checkpoint_every))
def test_the_invariants_hold_on_trio(case: Case) -> None:
    # Without checkpoints: packing them is done in a thread, and trio's virtual clock does not wait for threads.
    world, result = case.run("trio")
    check_everything(case, world, result)
