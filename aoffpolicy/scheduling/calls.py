"""Calls to a role, with a deadline, and with an error that says which call it came from."""

from __future__ import annotations

import math
from collections.abc import Awaitable
from typing import TypeVar

import anyio

from aoffpolicy.errors import DeadlineError, RoleError

T = TypeVar("T")


class CallDeadlineError(DeadlineError):
    """A call of ours ran past its deadline; a role that raises `DeadlineError` speaks of a wait of its own."""


async def call_role(role: str, what: str, call: Awaitable[T], deadline_s: float | None, setting: str) -> T:
    """Await a call to a role.

    Args:
        role: "trainer" or "rollout".
        what: The call, in words.
        call: What to await.
        deadline_s: Seconds until the call is cancelled; None: no deadline.
        setting: Name of the setting that the deadline comes from.

    Raises:
        CallDeadlineError: The deadline has passed.
        RoleError: The role cancelled itself. Nobody asked for it, and a cancellation would end the run without a word.
    """
    try:
        if deadline_s is None:  # thousands of groups may be in flight, so no scope without need
            return await call
        with anyio.move_on_after(deadline_s):
            return await call
    except anyio.get_cancelled_exc_class():
        if anyio.current_effective_deadline() > -math.inf:
            raise RoleError(role, 0, f"{what} was cancelled from within") from None
        raise
    except Exception as error:
        error.add_note(f"raised by {what}")
        raise
    raise CallDeadlineError(
        role, 0, f"the scheduler waited {deadline_s:g} s for {what}; raise {setting} if it may take longer"
    )
