"""What a completion is worth: functions `f(completion, row) -> float`, sync or async, built in or the user's own."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Any

import msgspec

from aoffpolicy.data.generated import create, entry_of
from aoffpolicy.data.rows import Row, RowCheck
from aoffpolicy.errors import DataError

RewardFunction = Callable[[str, Row], float | Awaitable[float]]

NUMBER = re.compile(r"(?:(?<![\w.)])[-\u2212])?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")
"""1,234 and 3.0 and -7; a minus after a digit, letter or bracket subtracts."""


def reasoning_gym(completion: str, row: Row) -> float:
    """The data set's own score, 0 to 1, of what stands in <answer> tags, or of the whole completion without them."""
    from reasoning_gym.utils import extract_answer

    task = row["reasoning_gym"]
    answer = extract_answer(completion)
    scorer = _scorer(task["name"], msgspec.json.encode(task["params"]))
    return float(scorer.score_answer(completion.strip() if answer is None else answer, entry_of(row)))


@lru_cache(maxsize=64)
def _scorer(name: str, params: bytes) -> Any:
    """The data set that scores; it generates nothing, so its size and seed do not matter."""
    return create(name, {**msgspec.json.decode(params), "size": 10, "seed": 0})


def exact_match(completion: str, row: Row) -> float:
    """1 if the completion is the answer, apart from space around it."""
    return float(completion.strip() == str(row["answer"]).strip())


def last_number(completion: str, row: Row) -> float:
    """1 if the last number of the completion equals the answer's (the last one in it, if the answer is a text)."""
    found = parse_last_number(completion)
    return float(found is not None and found == parse_last_number(row["answer"]))


def parse_last_number(text: str | float) -> Decimal | None:
    """The last number in a text, or a number itself."""
    if not isinstance(text, str):
        return Decimal(str(text))
    numbers = NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "").replace("\u2212", "-")) if numbers else None


def _answer_fault(row: Row) -> str | None:
    answer = row.get("answer")
    if answer is None:
        return "answer: the key is missing (also no reward_model.ground_truth)"
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        return f"answer: expected text or a number, got {type(answer).__name__}"
    return None


def _number_fault(row: Row) -> str | None:
    if fault := _answer_fault(row):
        return fault
    if (number := parse_last_number(row["answer"])) is None or not number.is_finite():
        return f"answer: last_number needs a number, got {row['answer']!r:.60}"
    return None


def _task_fault(row: Row) -> str | None:
    return None if "reasoning_gym" in row else "the reward reasoning_gym scores rows of reasoning_gym:NAME only"


def _no_fault(row: Row) -> str | None:
    return None


@dataclass(frozen=True, slots=True)
class BuiltIn:
    function: RewardFunction
    row_fault: RowCheck
    """What is wrong with a row that this reward could not score."""
    needs: str = ""
    """A module that takes long to import: loaded with the function, so that no completion's time-out pays for it."""


REWARDS: dict[str, BuiltIn] = {
    "reasoning_gym": BuiltIn(reasoning_gym, _task_fault, needs="reasoning_gym"),
    "exact_match": BuiltIn(exact_match, _answer_fault),
    "last_number": BuiltIn(last_number, _number_fault),
}


def row_check(name: str) -> RowCheck:
    """What rows must satisfy for this reward; a user's own function takes any row.

    Raises:
        DataError: There is no such reward.
    """
    if ":" in name:
        return _no_fault
    return _built_in(name).row_fault


def resolve(name: str) -> RewardFunction:
    """The reward function of this name; imports the user's module.

    Raises:
        DataError: There is no such reward, its module fails to import, or it does not take (completion, row).
    """
    if ":" not in name:
        built_in = _built_in(name)
        if built_in.needs:
            importlib.import_module(built_in.needs)
        return built_in.function
    module_name, _, attribute = name.partition(":")
    try:
        function: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            function = getattr(function, part)
    except Exception as error:
        raise DataError(f"reward.function: {name} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise DataError(f"reward.function: {name} is a {type(function).__name__}, not a function")
    _check_signature(name, function)
    return function  # type: ignore[no-any-return]


def is_async(function: RewardFunction) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _built_in(name: str) -> BuiltIn:
    if name not in REWARDS:
        known = ", ".join(REWARDS)
        raise DataError(f"reward.function: no reward {name!r}; there are {known}, and package.module:function")
    return REWARDS[name]


def _check_signature(name: str, function: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-in callables have none
        return
    try:
        signature.bind("", {})
    except TypeError as error:
        raise DataError(f"reward.function: {name}{signature} does not take (completion, row): {error}") from error
