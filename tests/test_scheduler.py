"""What the scheduler does, case by case. The general invariants are in tests/test_scheduler_properties.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import pytest

from aoffpolicy import GroupRequest, Prompt, SampleGroup, Scheduler, SchedulerError, SchedulerSettings
from tests.simulated import AT_ONCE, Duration, Result, SimulatedRoles, World, always, drive, prompts, run_virtually

SECOND_EACH = always(generate=1.0, train=1.0)


def run(
    duration: Duration = SECOND_EACH,
    *,
    world: World | None = None,
    data: Sequence[Prompt] | None = None,
    evaluation: Sequence[Prompt] | None = None,
    roles: SimulatedRoles | None = None,
    **settings: Any,
) -> tuple[World, Result]:
    """A run of 4 steps of 2 prompts, unless said otherwise, in virtual time."""
    world = world or (roles.world if roles else World())
    asked = SchedulerSettings(**{"steps": 4, "prompts_per_step": 2, **settings})
    roles = roles or SimulatedRoles(world, duration)
    data = prompts(100) if data is None else data
    return world, run_virtually(lambda: drive(roles, asked, data, eval_prompts=evaluation))


# --- Overlap and staleness -----------------------------------------------------------------------------------------


def test_on_policy_generates_and_trains_in_turns() -> None:
    world, result = run(max_staleness=0)
    assert result.seconds == pytest.approx(8.0)
    assert set(world.staleness) == {0}


def test_one_step_off_policy_generates_the_next_step_while_one_trains() -> None:
    world, result = run(max_staleness=1)
    assert result.seconds == pytest.approx(5.0)
    assert world.staleness == [0, 0, 1, 1, 1, 1, 1, 1]
    assert [record.overlap_efficiency for record in result.records] == [pytest.approx(1.0)] * 3 + [None]
    assert [request.version for request in world.dispatched] == [0, 0, 0, 0, 1, 1, 2, 2]


def test_more_staleness_evens_out_phases_that_vary() -> None:
    def duration(call: str, number: int) -> float:
        return {"train": 1.0, "generate": 2.6 if number % 6 in (2, 3) else 0.2}.get(call, 0.0)

    seconds = {k: run(duration, steps=12, max_staleness=k)[1].seconds for k in (0, 1, 3)}
    assert seconds[0] > seconds[1] > seconds[3]


def test_the_next_step_trains_while_weights_are_being_loaded_and_generation_waits() -> None:
    _, result = run(always(generate=1.0, train=1.0, load=0.5, send=0.25))
    spans = {(e.name, e.step): (e.time - e.seconds, e.time) for e in result.events if e.state == "end"}
    assert spans["send", 0][1] == spans["train", 1][0] == spans["load", 0][0]
    assert spans["load", 0][1] == spans["generate", 2][0]


def test_nothing_further_ahead_is_started_while_new_weights_wait_for_the_rollouts() -> None:
    started: list[tuple[float, int]] = []

    class Timed(SimulatedRoles):
        async def generate(self, request: GroupRequest) -> SampleGroup:
            started.append((anyio.current_time(), request.step))
            return await super().generate(request)

    roles = Timed(World(), always(generate=0.4, train=1.0))
    _, result = run(roles=roles, max_staleness=3, max_in_flight=1, steps=8)
    ends = {(e.name, e.step): e.time for e in result.events if e.state == "end"}
    for step in range(7):
        waiting = [s for time, s in started if ends["train", step] <= time < ends["send", step]]
        assert set(waiting) <= {step + 1}
    assert any(s > step + 1 for step in range(7) for time, s in started if time < ends["train", step]), "none was ahead"


def test_groups_in_flight_are_bounded() -> None:
    most = 0

    class Counting(SimulatedRoles):
        async def generate(self, request: GroupRequest) -> SampleGroup:
            nonlocal most
            most = max(most, self.world.generating.total() + 1)
            return await super().generate(request)

    run(roles=Counting(World(), SECOND_EACH), prompts_per_step=7, max_in_flight=3, max_staleness=2)
    assert most == 3


def test_a_slow_group_is_waited_for_and_trained() -> None:
    def duration(call: str, number: int) -> float:
        return 50.0 if (call, number) == ("generate", 3) else 1.0

    world, result = run(duration)
    assert world.trained == {0: (0, 1), 1: (2, 3), 2: (4, 5), 3: (6, 7)}
    assert sum(result.records[1].groups_dropped.values()) == 0


# --- Ends ----------------------------------------------------------------------------------------------------------


def test_one_step_is_an_ordinary_run() -> None:
    world, result = run(steps=1)
    assert world.trained == {0: (0, 1)} and len(world.dispatched) == 2
    assert result.records[0].overlap_efficiency is None


def test_the_data_may_end_in_the_middle_of_the_look_ahead() -> None:
    world, result = run(data=prompts(5), max_staleness=3)
    assert world.trained == {0: (0, 1), 1: (2, 3), 2: (4,)}
    assert [record.groups_trained for record in result.records] == [2, 2, 1]
    assert world.loaded == 3


def test_data_that_goes_on_for_ever_is_asked_for_no_more_than_the_steps_need() -> None:
    asked: list[int] = []

    class Epochs:
        def __getitem__(self, uid: int) -> Prompt:
            asked.append(uid)
            return Prompt(uid, prompts(3)[uid % 3].token_ids_P)

    world = World()
    roles = SimulatedRoles(world, SECOND_EACH)
    settings = SchedulerSettings(steps=4, prompts_per_step=2, max_staleness=4)
    run_virtually(lambda: drive(roles, settings, Epochs()))  # type: ignore[arg-type]
    assert asked == list(range(8))


def test_no_data_at_all_is_an_error() -> None:
    with pytest.raises(SchedulerError, match="no prompts"):
        run(data=[])


def test_the_final_weights_reach_the_rollouts() -> None:
    world, _ = run(always(train=1.0, load=5.0))
    assert world.loaded == 4


# --- Filters -------------------------------------------------------------------------------------------------------


def zero_variance(*uids: int) -> SimulatedRoles:
    return SimulatedRoles(World(), SECOND_EACH, rewards=lambda uid: (1.0, 1.0) if uid in uids else (0.0, 1.0))


def test_a_filtered_group_is_replaced_by_the_next_prompt() -> None:
    world, result = run(roles=zero_variance(0, 2), filter_zero_variance=True, max_staleness=0)
    assert world.trained == {0: (1, 3), 1: (4, 5), 2: (6, 7), 3: (8, 9)}
    assert result.records[0].groups_dropped == {"filtered": 2}
    assert result.records[0].groups_dispatched == 4


def test_a_batch_shrinks_if_asked_to() -> None:
    world, _ = run(roles=zero_variance(0, 4, 5), filter_zero_variance=True, on_filtered="shrink")
    assert world.trained == {0: (1,), 1: (2, 3), 3: (6, 7)}


def test_a_step_without_groups_is_skipped_makes_no_version_and_is_not_synced() -> None:
    world, result = run(roles=zero_variance(2, 3), filter_zero_variance=True, on_filtered="shrink")
    assert [record.skipped for record in result.records] == [False, True, False, False]
    assert [record.policy_version for record in result.records] == [0, 1, 1, 2]
    assert world.sent == [1, 2, 3]
    row = result.records[1].as_row()
    assert row["reward_mean"] is None and row["overlap_efficiency"] is None


def test_refilling_is_bounded() -> None:
    world, result = run(roles=zero_variance(*range(100)), filter_zero_variance=True, max_groups_per_step=5)
    assert [record.groups_dispatched for record in result.records] == [5, 5, 5, 5]
    assert all(record.skipped for record in result.records) and world.sent == []


def test_a_custom_filter_sees_whole_groups() -> None:
    world, _ = run(keep=lambda group: group.prompt.uid % 2 == 1, max_staleness=0)
    assert world.trained[0] == (1, 3)


# --- Stragglers ----------------------------------------------------------------------------------------------------


class Straggling(SimulatedRoles):
    """Prompt 1 takes for ever in its first so many attempts."""

    def __init__(self, attempts: int) -> None:
        super().__init__(World(), SECOND_EACH)
        self._attempts = attempts
        self.attempts: list[int] = []

    async def generate(self, request: GroupRequest) -> SampleGroup:
        if request.prompt.uid == 1:
            self.attempts.append(request.attempt)
            if request.attempt < self._attempts:
                await anyio.sleep_forever()
        return await super().generate(request)


def test_a_straggler_is_dispatched_again_after_its_deadline() -> None:
    roles = Straggling(1)
    world, result = run(roles=roles, group_deadline_s=5.0)
    assert roles.attempts == [0, 1]
    assert world.trained[0] == (0, 1)
    assert (result.records[0].groups_retried, result.records[0].groups_dispatched) == (1, 2)


def test_a_straggler_that_never_comes_is_dropped_and_replaced() -> None:
    roles = Straggling(9)
    world, result = run(roles=roles, group_deadline_s=5.0, max_attempts=3)
    assert roles.attempts == [0, 1, 2]
    assert world.trained[0] == (0, 2)
    assert result.records[0].groups_dropped == {"timed_out": 1}


def test_an_answer_after_the_deadline_counts_once() -> None:
    class Deaf(SimulatedRoles):
        async def generate(self, request: GroupRequest) -> SampleGroup:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(7.0)
                answer = await super().generate(request)
            return answer

    world, result = run(roles=Deaf(World(), AT_ONCE), group_deadline_s=5.0)
    assert world.trained == {0: (0, 1), 1: (2, 3), 2: (4, 5), 3: (6, 7)}
    assert [record.groups_dispatched for record in result.records] == [2, 2, 2, 2]


def test_rollouts_that_are_all_dead_end_the_run_instead_of_burning_through_the_data() -> None:
    class Dead(SimulatedRoles):
        async def generate(self, request: GroupRequest) -> SampleGroup:
            await anyio.sleep_forever()
            raise AssertionError

    with pytest.raises(Exception, match="rollout 0: no group of step 0 could be generated: 8 timed_out"):
        run(roles=Dead(World()), group_deadline_s=5.0)


def test_a_last_short_batch_that_fails_is_skipped_and_does_not_spoil_the_run() -> None:
    roles = SimulatedRoles(World(), SECOND_EACH, drop=lambda uid: uid == 4)
    world, result = run(roles=roles, data=prompts(5))
    assert world.trained == {0: (0, 1), 1: (2, 3)} and world.loaded == 2
    assert [record.skipped for record in result.records] == [False, False, True]


# --- Evaluation ----------------------------------------------------------------------------------------------------


def test_an_evaluation_is_told_with_the_step_that_made_its_version() -> None:
    _, result = run(evaluation=prompts(3), eval_every=2, steps=5)
    versions = [record.evaluation and record.evaluation.version for record in result.records]
    assert versions == [None, 2, None, 4, 5]
    row = result.records[1].as_row()
    assert (row["eval_version"], row["eval_groups"], row["eval_reward_mean"]) == (2, 3, 0.5)


def test_the_first_weights_are_evaluated_if_asked_for() -> None:
    _, result = run(evaluation=prompts(3), eval_every=2, eval_initial=True)
    assert result.records[0].as_row()["eval_initial_version"] == 0


def test_on_policy_evaluation_runs_beside_training() -> None:
    def duration(call: str, number: int) -> float:
        return {"train": 2.0, "generate": 1.0}.get(call, 0.0)

    _, without = run(duration, max_staleness=0)
    _, with_it = run(duration, max_staleness=0, evaluation=prompts(3), eval_every=1)
    assert with_it.seconds == pytest.approx(without.seconds + 1.0), "only the last one is left over"


# --- Interrupt -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("generate_s", "finished", "pending"), [(0.5, (4, 5), ()), (1.7, (), (4, 5))])
def test_an_interrupt_lets_the_step_in_progress_finish_cancels_generation_and_saves(
    generate_s: float, finished: tuple[int, ...], pending: tuple[int, ...]
) -> None:
    world = World()
    roles = SimulatedRoles(world, always(generate=generate_s, train=1.0))

    async def main() -> Scheduler:
        settings = SchedulerSettings(steps=4, prompts_per_step=2)
        async with Scheduler(roles, roles, roles, prompts(100), settings) as scheduler:
            async for record in scheduler.run():
                if record.step == 0:  # step 1 begins to train
                    await anyio.sleep(0.1)
                    scheduler.interrupt()
        return scheduler

    scheduler = run_virtually(main)
    assert scheduler.interrupted and scheduler.step == 2
    assert [step for step, _ in world.saved] == [2] and world.sent == [1]
    (open_step,) = scheduler.state().open_steps
    assert (tuple(group.prompt.uid for group in open_step.finished), open_step.pending) == (finished, pending)


# --- What is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "steps = 0 is below 1"),
        ({"prompts_per_step": 0}, "prompts_per_step = 0"),
        ({"max_staleness": -1}, "max_staleness = -1"),
        ({"max_in_flight": 0}, "nothing could ever be generated"),
        ({"ahead": 3, "max_staleness": 1}, "ahead = 3 cannot be had with max_staleness = 1"),
        ({"ahead": 2, "max_staleness": 0}, "ahead = 2 cannot be had with max_staleness = 0"),
        ({"max_groups_per_step": 1}, "no batch could ever be full"),
        ({"group_deadline_s": 0.0}, "no time at all"),
        ({"checkpoint_every": -1}, "checkpoint_every = -1 is negative"),
        ({"eval_initial": True}, "evaluation is off"),
        ({"eval_every": 1}, "needs eval_prompts"),
    ],
)
def test_what_cannot_be_had_is_refused_at_the_start_with_an_explanation(settings: Any, message: str) -> None:
    with pytest.raises(SchedulerError, match=message):
        run(**settings)


def test_every_fault_of_the_settings_is_named_at_once() -> None:
    with pytest.raises(SchedulerError, match=r"steps = 0 .*; max_staleness = -1"):
        SchedulerSettings(steps=0, prompts_per_step=1, max_staleness=-1)


def test_prompts_whose_uid_is_not_their_position_are_refused() -> None:
    with pytest.raises(SchedulerError, match=r"prompts\[0\] has uid 2"):
        run(data=prompts(9)[2:])


def test_a_scheduler_runs_once() -> None:
    async def main() -> None:
        roles = SimulatedRoles(World())
        settings = SchedulerSettings(steps=1, prompts_per_step=1)
        async with Scheduler(roles, roles, roles, prompts(9), settings) as scheduler:
            async for _ in scheduler.run():
                pass
            scheduler.run()

    with pytest.raises(SchedulerError, match="runs once"):
        run_virtually(main)


def test_a_long_group_does_not_hold_up_an_in_flight_swap_and_its_staleness_is_that_of_its_oldest_token() -> None:
    def duration(call: str, number: int) -> float:
        return {"generate": 30.0 if number == 3 else 1.0, "train": 5.0, "load": 1.0}.get(call, 0.0)

    world = World()
    _, result = run(duration, roles=SimulatedRoles(world, duration, in_flight=True), steps=3, swap="in_flight")
    first, second, _ = result.records
    swapped = next(event.time for event in result.events if event.name == "load" and event.state == "end")
    assert swapped == pytest.approx(7.0)  # one second to generate, five to train, one to load
    assert world.staleness[:4] == [0, 0, 1, 1]
    assert (first.staleness_max, second.staleness_max) == (0, 1)
    assert second.staleness_mean == 0.75  # of eight tokens two, the last of prompt 3, are of the version that trains


def test_a_long_group_does_hold_up_a_swap_at_the_boundary() -> None:
    def duration(call: str, number: int) -> float:
        return {"generate": 30.0 if number == 3 else 1.0, "train": 5.0, "load": 1.0}.get(call, 0.0)

    _, result = run(duration, steps=3)
    swapped = next(event.time for event in result.events if event.name == "load" and event.state == "end")
    assert swapped == pytest.approx(32.0)
