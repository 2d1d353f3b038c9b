"""Stopping and going on: nothing is lost, nothing is repeated, and the counts still add up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import anyio
import numpy as np
import pytest

from aoffpolicy import Prompt, RoleError, Scheduler, SchedulerError, SchedulerSettings, SchedulerState
from aoffpolicy.errors import ProtocolError
from tests.simulated import Result, SimulatedRoles, World, always, drive, prompts, run_virtually

DURATION = always(generate=1.0, train=1.2, send=0.1, load=0.1)
SETTINGS = SchedulerSettings(steps=6, prompts_per_step=2)


def stopped_after(seconds: float, world: World, settings: SchedulerSettings = SETTINGS, **roles: Any) -> SchedulerState:
    """The state of a run that was cancelled."""

    async def main() -> SchedulerState:
        simulated = SimulatedRoles(world, roles.pop("duration", DURATION), **roles)
        scheduler = Scheduler(simulated, simulated, simulated, prompts(100), settings)
        with anyio.move_on_after(seconds):
            async with scheduler:
                async for _ in scheduler.run():
                    pass
        return scheduler.state()

    return run_virtually(main)


def go_on(
    world: World,
    state: SchedulerState | bytes,
    settings: SchedulerSettings = SETTINGS,
    data: Sequence[Prompt] = prompts(100),
    **roles: Any,
) -> Result:
    world.swapping = world.training = False
    world.dispatched.clear()
    world.sent.clear()
    return run_virtually(lambda: drive(SimulatedRoles(world, DURATION, **roles), settings, data, state=state))


def uids(world: World) -> list[int]:
    return [request.prompt.uid for request in world.dispatched]


def test_the_state_holds_the_frontier_pending_prompts_and_finished_groups() -> None:
    state = stopped_after(2.6, World(), duration=lambda call, n: 9.0 if n == 3 and call == "generate" else 1.0)
    assert (state.step, state.version, state.next_uid) == (1, 1, 4)
    (open_step,) = state.open_steps
    assert open_step.step == 1 and open_step.pending == (3,)
    assert [group.prompt.uid for group in open_step.finished] == [2]


def test_the_state_survives_being_packed_bit_for_bit() -> None:
    state = stopped_after(2.0, World())
    again = SchedulerState.unpack(state.pack())
    assert again.pack() == state.pack()
    before, after = state.open_steps[0].finished[0], again.open_steps[0].finished[0]
    for name in ("token_ids_T", "loss_mask_T", "behaviour_logprobs_T", "versions_T"):
        old, new = getattr(before.samples[0], name), getattr(after.samples[0], name)
        assert old.dtype == new.dtype and np.array_equal(old, new)


def test_bytes_that_are_no_state_or_only_part_of_one_are_refused() -> None:
    packed = stopped_after(2.0, World()).pack()
    for broken in (b"", b"something else", *(packed[:length] for length in range(0, len(packed), 97))):
        with pytest.raises(ProtocolError):
            SchedulerState.unpack(broken)


def test_finished_groups_are_trained_and_not_generated_again() -> None:
    world = World()
    state = stopped_after(2.1, world)
    assert [len(s.finished) for s in state.open_steps] == [2, 2]
    go_on(world, state)
    assert uids(world) == list(range(4, 12))


def test_groups_may_be_left_out_of_the_state_and_are_generated_again() -> None:
    world = World()
    state = stopped_after(2.1, world)
    smaller = state.without_groups()
    assert len(smaller.pack()) < len(state.pack()) / 5
    go_on(world, smaller)
    assert uids(world) == list(range(12))
    assert world.trained == {m: (2 * m, 2 * m + 1) for m in range(6)}


def test_groups_too_old_for_a_smaller_staleness_are_generated_again() -> None:
    world = World()
    state = stopped_after(4.0, world, replace(SETTINGS, max_staleness=3))
    old = [group.prompt.uid for s in state.open_steps for group in s.finished]
    assert old
    world.staleness.clear()
    go_on(world, state, replace(SETTINGS, max_staleness=0))
    assert set(world.staleness) == {0}
    assert world.trained == {m: (2 * m, 2 * m + 1) for m in range(6)}


def test_after_a_roll_back_versions_go_on_upward_and_old_groups_are_generated_again() -> None:
    world = World()
    state = stopped_after(2.1, world)
    go_on(world, state.renumbered(7))
    assert world.sent == [8, 9, 10, 11, 12, 13][: len(world.sent)] and len(world.sent) == 6 - state.step
    assert uids(world) == list(range(12))


def test_counts_of_a_step_that_was_interrupted_still_add_up() -> None:
    rewards: Callable[[int], tuple[float, ...]] = lambda uid: (1.0, 1.0) if uid in (2, 3) else (0.0, 1.0)  # noqa: E731
    settings = replace(SETTINGS, filter_zero_variance=True)
    world = World()
    state = stopped_after(2.05, world, settings, rewards=rewards)
    assert state.open_steps[1].dropped == {"filtered": 2} and state.open_steps[1].dispatched == 4
    result = go_on(world, state, settings, rewards=rewards)
    step_1 = result.records[1]
    assert (step_1.groups_dispatched, step_1.groups_trained, step_1.groups_dropped) == (4, 2, {"filtered": 2})
    assert world.trained[1] == (4, 5)


def test_a_finished_run_has_nothing_left_to_do() -> None:
    world = World()
    state = stopped_after(1000.0, world)
    assert state.step == 6 and state.open_steps == ()
    assert go_on(world, state).records == []
    assert world.dispatched == [] and world.sent == []


def test_a_finished_run_goes_on_if_it_is_given_more_steps() -> None:
    world = World()
    state = stopped_after(1000.0, world)
    go_on(world, state, replace(SETTINGS, steps=8))
    assert uids(world) == [12, 13, 14, 15]
    assert sorted(world.trained) == list(range(8))


def test_a_run_that_stopped_at_the_end_of_the_data_goes_on_when_there_is_more() -> None:
    world = World()
    roles = SimulatedRoles(world, DURATION)
    state = run_virtually(lambda: drive(roles, SETTINGS, prompts(4))).state
    assert state.step == 2
    go_on(world, state)
    assert world.trained == {m: (2 * m, 2 * m + 1) for m in range(6)}


def test_pending_prompts_that_the_data_has_no_more_are_an_error_and_not_a_short_batch() -> None:
    world = World()
    state = stopped_after(2.0, world).without_groups()
    with pytest.raises(SchedulerError, match="needs prompt 2, but the data ends"):
        go_on(world, state, data=prompts(2))


def test_an_interrupt_before_the_first_step_saves_a_state_to_start_from() -> None:
    world = World()

    async def main() -> None:
        roles = SimulatedRoles(world, DURATION)
        async with Scheduler(roles, roles, roles, prompts(100), SETTINGS) as scheduler:
            scheduler.interrupt()
            assert [record async for record in scheduler.run()] == []

    run_virtually(main)
    step, packed = world.saved[-1]
    assert step == 0
    go_on(world, packed)
    assert world.trained == {m: (2 * m, 2 * m + 1) for m in range(6)}


def test_a_run_that_ended_because_no_group_could_be_generated_goes_on_when_they_can() -> None:
    world = World()

    async def main() -> SchedulerState:
        roles = SimulatedRoles(world, DURATION, drop=lambda uid: uid >= 4)
        scheduler = Scheduler(roles, roles, roles, prompts(100), SETTINGS)
        with pytest.raises(RoleError, match="no group of step 2 could be generated: 8 error"):
            async with scheduler:
                async for _ in scheduler.run():
                    pass
        return scheduler.state()

    result = go_on(world, run_virtually(main))
    assert sorted(world.trained) == list(range(6)) and world.trained[2] == (12, 13)
    assert (result.records[0].groups_dispatched, result.records[0].groups_dropped) == (10, {"error": 8})


def test_checkpoints_are_taken_every_so_many_steps_and_at_the_end_once() -> None:
    world = World()
    settings = replace(SETTINGS, checkpoint_every=2, steps=5)
    run_virtually(lambda: drive(SimulatedRoles(world, DURATION), settings, prompts(100)))
    assert [step for step, _ in world.saved] == [2, 4, 5]
    assert [SchedulerState.unpack(packed).version for _, packed in world.saved] == [2, 4, 5]


def test_the_next_step_is_generated_while_a_checkpoint_is_saved() -> None:
    seconds = {}
    for every in (0, 1):
        roles = SimulatedRoles(World(), always(generate=2.0, train=1.0, save=0.9))
        settings = replace(SETTINGS, checkpoint_every=every)
        seconds[every] = run_virtually(partial(drive, roles, settings, prompts(100))).seconds
    assert seconds[1] == pytest.approx(seconds[0] + 2 * 0.9), "only the last two have nothing to run beside"
