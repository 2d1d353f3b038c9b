from __future__ import annotations

import numpy as np
import pytest
import torch

from aoffpolicy.rollout.kv_cache import CacheShape, DecodePlan, Region, SlotCache

CPU = torch.device("cpu")
SHAPE = CacheShape(prompts=3, prompt_length=5, slots=6, slot_length=4)


def keys(batch: int, positions: int, value: float = 1.0) -> torch.Tensor:
    return torch.full((batch, 2, positions, 4), float(value))


def prefill(cache: SlotCache, values: list[float], lengths: list[int], copies: list[int]) -> None:
    """Take prompts in whose keys are the values given."""
    cache.enter(np.array(lengths), np.array(copies))
    states = torch.stack([keys(1, max(lengths), value)[0] for value in values])
    cache.update(states, states, 0)


def decode(cache: SlotCache, values: list[float]) -> DecodePlan:
    plan = cache.advance(CPU)
    states = torch.stack([keys(1, 1, value)[0] for value in values])
    cache.update(states, states, 0)
    return plan


def prompt_value(cache: SlotCache, plan: DecodePlan, slot: int) -> float:
    """The key of the prompt that a slot belongs to."""
    return float(cache.slot_layers[0].prompt_keys[int(plan.place_of_S[0][slot]), 0, 0, 0])


def test_the_slots_of_a_group_share_one_copy_of_their_prompt() -> None:
    cache = SlotCache(1, SHAPE)
    prefill(cache, [10.0, 20.0], [3, 5], [2, 4])
    plan = decode(cache, [1, 2, 3, 4, 5, 6])
    assert plan.prompts == 2
    assert plan.slot_of_NM.tolist() == [[0, 1, 0, 0], [2, 3, 4, 5]]
    assert [prompt_value(cache, plan, slot) for slot in range(6)] == [10, 10, 20, 20, 20, 20]
    assert plan.positions_S.tolist() == [3, 3, 5, 5, 5, 5]
    assert plan.prompt_seen_N11L[:, 0, 0].tolist() == [[True] * 3 + [False] * 2, [True] * 5]


def test_free_places_are_counted_and_freed_with_the_last_slot_of_a_prompt() -> None:
    cache = SlotCache(1, SHAPE)
    prefill(cache, [10.0, 20.0], [3, 5], [2, 3])
    assert (cache.free_prompts, cache.free_slots) == (1, 1)
    cache.keep(np.array([True, False, True, True, True]))
    assert (cache.free_prompts, cache.free_slots) == (1, 2)
    cache.keep(np.array([False, True, True, True]))
    assert (cache.free_prompts, cache.free_slots) == (2, 3)


def test_sequences_move_into_the_slots_of_those_that_ended_and_keep_their_keys_and_prompt() -> None:
    cache = SlotCache(1, SHAPE)
    prefill(cache, [10.0, 20.0, 30.0], [3, 5, 2], [2, 2, 2])
    decode(cache, [1, 2, 3, 4, 5, 6])
    order = cache.keep(np.array([False, False, True, True, False, True]))
    assert sorted(order.tolist()) == [2, 3, 5]
    plan = decode(cache, [7, 8, 9])
    layer = cache.slot_layers[0]
    for slot, source in enumerate(order.tolist()):
        assert float(layer.slot_keys[slot, 0, 0, 0]) == source + 1
        assert float(layer.slot_keys[slot, 0, 1, 0]) == slot + 7
        assert prompt_value(cache, plan, slot) == [10, 10, 20, 20, 30, 30][source]
        assert int(plan.positions_S[slot]) == [3, 3, 5, 5, 2, 2][source] + 1


def test_a_new_group_enters_beside_those_in_use_with_an_empty_slot() -> None:
    cache = SlotCache(1, SHAPE)
    prefill(cache, [10.0], [3], [2])
    decode(cache, [1, 2])
    prefill(cache, [20.0], [5], [1])
    plan = decode(cache, [3, 4, 5])
    assert plan.writes_S.tolist() == [1, 1, 0]
    assert plan.seen_S11L[:, 0, 0].tolist() == [[True, True], [True, True], [True, False]]
    assert float(cache.slot_layers[0].slot_keys[2, 0, 0, 0]) == 5


def test_what_was_cached_before_a_clear_is_never_seen_again() -> None:
    cache = SlotCache(1, SHAPE)
    prefill(cache, [float("nan")], [5], [6])
    decode(cache, [float("nan")] * 6)
    cache.clear()
    assert (cache.free_prompts, cache.free_slots) == (3, 6)
    prefill(cache, [10.0, 20.0], [1, 2], [3, 3])
    plan = decode(cache, [1, 2, 3, 4, 5, 6])
    layer = cache.slot_layers[0]
    assert layer.prompt_keys[: plan.prompts, :, : plan.prompt_positions].isfinite().all()
    assert layer.slot_keys[:6, :, : plan.visible].isfinite().all()


@pytest.mark.parametrize("steps", [[(2, 3), (4, 70)], [(4, 70), (2, 3)], [(1, 1), (1, 130), (4, 2)]])
def test_positions_are_zeroed_before_their_first_use_and_left_alone_afterwards(steps: list[tuple[int, int]]) -> None:
    region = Region(4, 130)
    buffer = region.allocate(keys(1, 1))
    buffer.fill_(float("nan"))
    used_rows = used_positions = 0
    for rows, positions in steps:
        region.reserve(rows, positions)
        assert buffer[:rows, :, :positions].isfinite().all()
        assert (buffer[:used_rows, :, :used_positions] == 7).all()
        buffer[:rows, :, :positions] = 7
        used_rows, used_positions = rows, positions


def test_a_cache_is_taken_down_to_the_context_of_the_model_and_leaves_room_for_one_token() -> None:
    shape = CacheShape(prompts=1, prompt_length=100, slots=1, slot_length=50)
    assert shape.within(150) == shape
    assert (shape.within(60).prompt_length, shape.within(60).slot_length) == (59, 50)
    assert (shape.within(40).prompt_length, shape.within(40).slot_length) == (39, 39)
