"""A scoring process: reads tasks from its standard input, writes results to its standard output, and may be killed.

Started as `python -m aoffpolicy.reward.process PARENT_PID`. What a reward function prints goes to standard error, and
it reads nothing: the two pipes belong to the protocol.
"""

from __future__ import annotations

import asyncio
import math
import numbers
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO

import msgspec

from aoffpolicy.child import die_with_parent
from aoffpolicy.data.rows import Row
from aoffpolicy.reward import functions, wire

Emit = Callable[[wire.Result], None]


def main() -> None:
    die_with_parent(int(sys.argv[1]))
    requests, replies = take_pipes()
    load = wire.read(requests, wire.Load)
    if load is None:
        return
    try:
        function = functions.resolve(load.function)
    except Exception as error:
        traceback.print_exc()
        wire.write(replies, wire.Loaded(error=str(error), concurrent=False))
        return
    concurrent = functions.is_async(function)
    wire.write(replies, wire.Loaded(error="", concurrent=concurrent))

    def emit(result: wire.Result) -> None:
        wire.write(replies, result)

    # One event loop for the whole life: a function may keep a client with open connections.
    with asyncio.Runner() as runner:
        while (task := wire.read(requests, wire.Task)) is not None:
            row: Row = msgspec.msgpack.decode(task.row)
            if concurrent:
                runner.run(score_async(function, row, task, load.timeout_s, emit))
            else:
                score_in_turn(function, row, task, emit)


def take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Move the protocol's pipes away from descriptors 0 and 1, which anything may read, print to or inherit."""
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, replies


def score_in_turn(function: Any, row: Row, task: wire.Task, emit: Emit) -> None:
    for number, completion in task.completions:
        try:
            result = as_result(number, function(completion, row))
        except (Exception, SystemExit) as error:
            result = wire.Result(number, None, describe(error))
        emit(result)


async def score_async(function: Any, row: Row, task: wire.Task, timeout_s: float, emit: Emit) -> None:
    async def score(number: int, completion: str) -> None:
        deadline = asyncio.timeout(timeout_s)
        try:
            async with deadline:
                result = as_result(number, await function(completion, row))
        except (Exception, SystemExit) as error:
            hung = deadline.expired()
            result = wire.Result(number, None, hang(timeout_s) if hung else describe(error))
        emit(result)

    if not task.concurrent:
        for number, completion in task.completions:
            await score(number, completion)
        return
    async with asyncio.TaskGroup() as group:
        for number, completion in task.completions:
            group.create_task(score(number, completion))


def as_result(number: int, value: Any) -> wire.Result:
    """A finite real number is a reward; anything else is not."""
    if not isinstance(value, numbers.Real):
        return wire.Result(number, None, f"returned {type(value).__name__}, not a number")
    reward = float(value)
    if not math.isfinite(reward):
        return wire.Result(number, None, f"returned {reward}")
    return wire.Result(number, reward, "")


def describe(error: BaseException) -> str:
    """The exception and the line it comes from."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"exception {type(error).__name__}: {error}"[: wire.ERROR_CHARACTERS] + place


def hang(timeout_s: float) -> str:
    return f"hang: no reward within {timeout_s:g} s"


if __name__ == "__main__":
    main()
