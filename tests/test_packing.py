from __future__ import annotations

import numpy as np
import pytest
import torch

from aoffpolicy.errors import DataError
from aoffpolicy.samples import Prompt, Sample, SampleGroup
from aoffpolicy.trainer.packing import group_trained_tokens, pack_group, stack, unstack
from tests.groups import batch, group, sample

CPU = torch.device("cpu")


def test_a_groups_prompt_is_packed_once() -> None:
    packed = list(pack_group(group(0, prompt_tokens=10, lengths=(2, 3)), np.ones(5), token_budget=100))
    assert [len(row) for row in packed] == [15]
    assert packed[0].position_ids_T.tolist() == [*range(10), 10, 11, 10, 11, 12]
    assert packed[0].segment_T.tolist() == [0] * 10 + [1] * 2 + [2] * 3


def test_the_first_token_of_each_completion_is_predicted_from_the_prompts_last() -> None:
    (row,) = pack_group(group(0, prompt_tokens=4, lengths=(2, 0, 1)), np.array([1.0, 2.0, 3.0]), token_budget=100)
    assert row.source_N.tolist() == [3, 4, 3]
    assert row.advantage_N.tolist() == [1.0, 2.0, 3.0]
    assert row.sample_N.tolist() == [0, 0, 2]
    assert row.samples == 3


def test_several_trained_spans_of_one_sample_are_each_predicted_from_the_token_before() -> None:
    prompt = np.array([5, 6], dtype=np.int32)
    turns = sample(prompt, np.arange(10, 16), mask=np.array([1, 1, 0, 0, 1, 1], dtype=bool))
    (row,) = pack_group(SampleGroup(Prompt(0, prompt), (turns,)), np.ones(4), token_budget=100)
    assert row.target_N.tolist() == [10, 11, 14, 15]
    assert row.source_N.tolist() == [1, 2, 5, 6]


def test_a_group_over_the_budget_is_split_and_repeats_its_prompt() -> None:
    rows = list(pack_group(group(0, prompt_tokens=10, lengths=(5, 5, 30, 5)), np.ones(45), token_budget=20))
    assert [len(row) for row in rows] == [20, 40, 15]
    assert sum(len(row.target_N) for row in rows) == 45


def test_no_token_is_lost_by_stacking_and_the_budget_holds() -> None:
    rows = [row for g in batch() for row in pack_group(g, np.ones(group_trained_tokens(g)), 64)]
    stacked = stack(rows, 64, CPU)
    assert sum(len(b.target_N) for b in stacked) == sum(s.completion_tokens for g in batch() for s in g.samples)
    assert all(b.token_ids_RT.numel() <= 64 or len(b.token_ids_RT) == 1 for b in stacked)


def test_values_of_stacked_tokens_come_back_in_the_order_of_the_rows() -> None:
    rows = [row for g in batch() for row in pack_group(g, np.arange(group_trained_tokens(g), dtype=np.float32), 16)]
    stacked = np.concatenate([b.advantage_N.numpy() for b in stack(rows, 64, CPU)])
    expected = np.concatenate([row.advantage_N for row in rows])
    assert not np.array_equal(stacked, expected)
    assert np.array_equal(unstack(stacked, rows), expected)
    assert unstack(np.zeros(0), []).shape == (0,)


def test_sequences_are_counted_through_the_rows_of_a_micro_batch_and_empty_ones_too() -> None:
    rows = [row for g in batch(2) for row in pack_group(g, np.ones(group_trained_tokens(g)), 100)]
    (stacked,) = stack(rows, 1000, CPU)
    assert stacked.sequences == 8
    first, second = batch(2)
    lengths = [s.completion_tokens for s in (*first.samples, *second.samples)]
    assert np.bincount(stacked.sequence_N, minlength=8).tolist() == lengths
    assert 0 in lengths


def test_advantages_that_do_not_fit_the_trained_tokens_are_refused_by_prompt() -> None:
    with pytest.raises(DataError, match="prompt 3: 4 advantages for 10 trained tokens"):
        list(pack_group(group(3, lengths=(5, 5)), np.ones(4), 100))


def test_completions_do_not_see_each_other() -> None:
    (row,) = pack_group(group(0, prompt_tokens=2, lengths=(2, 2)), np.ones(4), token_budget=100)
    (stacked,) = stack([row], 100, CPU)
    mask_TT = stacked.mask_R1TT[0, 0]
    assert mask_TT[4].tolist() == [True, True, False, False, True, False]
    assert not mask_TT.triu(1).any()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"behaviour_logprobs_T": np.full(12, np.nan, dtype=np.float32)}, "behaviour log-probability"),
        ({"behaviour_logprobs_T": np.zeros(3, dtype=np.float32)}, "differ in length"),
        ({"token_ids_T": np.zeros(12, dtype=np.int32)}, "does not begin with its prompt"),
        ({"loss_mask_T": np.ones(12, dtype=bool)}, "token of the prompt is marked"),
    ],
)
def test_a_sample_that_cannot_be_trained_is_refused_by_prompt_and_sample(
    change: dict[str, np.ndarray], words: str
) -> None:
    good = group(3, lengths=(5, 5))
    bad = good.samples[1]
    fields = {name: change.get(name, getattr(bad, name)) for name in Sample.__dataclass_fields__}
    broken = SampleGroup(good.prompt, (good.samples[0], Sample(**fields)))
    with pytest.raises(DataError, match=f"prompt 3, sample 1: .*{words}"):
        list(pack_group(broken, np.ones(group_trained_tokens(broken)), 100))
