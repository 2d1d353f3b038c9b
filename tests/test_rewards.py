from __future__ import annotations

import sys
from decimal import Decimal
from typing import Any

import pytest

from aoffpolicy.data.generated import generate
from aoffpolicy.data.rows import Row, pack_row, unpack_row
from aoffpolicy.errors import DataError
from aoffpolicy.reward.functions import (
    REWARDS,
    exact_match,
    is_async,
    last_number,
    parse_last_number,
    reasoning_gym,
    resolve,
    row_check,
)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("12", "12"),
        ("The answer is 1,234.", "1234"),
        ("1,234,567.50 dollars", "1234567.5"),
        ("3.0", "3"),
        ("it is -7", "-7"),
        ("it is \u22127", "-7"),
        ("10-7", "7"),
        ("(2)-7", "7"),
        ("x = -0.5", "-0.5"),
        ("1,2,3", "3"),
        ("1,2345", "2345"),
        ("5 + 4 = 9, which is right", "9"),
        ("#### 72", "72"),
        (8, "8"),
        (2.5, "2.5"),
        (1e-7, "0.0000001"),
    ],
)
def test_the_last_number_of_a_text_is_found(text: str | float, number: str) -> None:
    assert parse_last_number(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", "none", "-", ",", "."])
def test_a_text_without_digits_has_no_last_number(text: str) -> None:
    assert parse_last_number(text) is None
    assert last_number(text, {"answer": "0"}) == 0.0


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [("so 1,234 it is", "1234", 1), ("3.0", 3, 1), ("-7", "7", 0), ("first 4 then 5", "4", 0), ("9", "x = 9", 1)],
)
def test_last_number_compares_values_not_spelling(completion: str, answer: Any, reward: float) -> None:
    assert last_number(completion, {"answer": answer}) == reward


def test_exact_match_ignores_only_the_space_around() -> None:
    assert exact_match(" yes\n", {"answer": "yes"}) == 1.0
    assert exact_match("Yes", {"answer": "yes"}) == 0.0
    assert exact_match("yes.", {"answer": "yes"}) == 0.0
    assert exact_match("3", {"answer": 3}) == 1.0


def sum_row() -> Row:
    return unpack_row(pack_row(next(generate("chain_sum", {"min_terms": 2, "max_terms": 2}, seed=0))))


def test_the_reasoning_gym_reward_is_the_data_sets_own_score() -> None:
    row = sum_row()
    assert reasoning_gym(row["answer"], row) == 1.0
    assert reasoning_gym(f" {row['answer']}\n", row) == 1.0
    assert 0 < reasoning_gym(f"The answer is {row['answer']}", row) < 1
    assert reasoning_gym("no idea", row) == 0.0


def test_the_reasoning_gym_reward_scores_what_stands_in_answer_tags() -> None:
    row = sum_row()
    assert reasoning_gym(f"<think>1 + 1</think> <answer>{row['answer']}</answer> done", row) == 1.0
    assert reasoning_gym(f"{row['answer']} <answer>no</answer>", row) == 0.0


def test_an_unknown_reward_is_an_error_that_names_those_there_are() -> None:
    for lookup in (resolve, row_check):
        with pytest.raises(DataError, match=r"no reward 'exact'.*reasoning_gym, exact_match, last_number"):
            lookup("exact")


def test_every_built_in_reward_resolves_to_itself() -> None:
    for name, built_in in REWARDS.items():
        assert resolve(name) is built_in.function
        assert not is_async(built_in.function)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("no_such_module:f", "cannot be imported: ModuleNotFoundError"),
        ("tests.odd_rewards:missing", "cannot be imported: AttributeError"),
        ("tests.odd_rewards:not_a_function", "is a int, not a function"),
        ("tests.odd_rewards:takes_one", r"takes_one\(completion.*does not take \(completion, row\)"),
    ],
)
def test_a_function_that_cannot_be_used_is_an_error_that_says_why(name: str, fault: str) -> None:
    with pytest.raises(DataError, match=fault):
        resolve(name)


def test_async_functions_are_recognised_also_as_callable_objects() -> None:
    class Judge:
        async def __call__(self, completion: str, row: Row) -> float:
            return 1.0

    assert is_async(Judge())
    assert is_async(resolve("tests.odd_rewards:obey_async"))
    assert not is_async(resolve("tests.odd_rewards:obey"))


@pytest.mark.parametrize(
    ("reward", "row", "fault"),
    [
        ("exact_match", {"prompt": "?"}, "answer: the key is missing"),
        ("exact_match", {"prompt": "?", "answer": ["a"]}, "answer: expected text or a number, got list"),
        ("exact_match", {"prompt": "?", "answer": True}, "answer: expected text or a number, got bool"),
        ("last_number", {"prompt": "?", "answer": "yes"}, "answer: last_number needs a number, got 'yes'"),
        ("last_number", {"prompt": "?", "answer": float("nan")}, "answer: last_number needs a number, got nan"),
        ("reasoning_gym", {"prompt": "?", "answer": "1"}, "scores rows of reasoning_gym:NAME only"),
    ],
)
def test_a_row_that_a_reward_cannot_score_has_a_fault(reward: str, row: Row, fault: str) -> None:
    assert fault in (row_check(reward)(row) or "")


def test_a_users_own_reward_takes_any_row() -> None:
    assert row_check("tests.odd_rewards:obey")({"prompt": "?"}) is None


def test_reward_functions_need_no_torch() -> None:
    import subprocess

    code = "import sys, aoffpolicy.reward.worker, aoffpolicy.reward.process; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
