"""One request to each of several members at once, as one act that succeeds or fails with its first cause."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

import anyio

from aoffpolicy.errors import AoffpolicyError, DeadlineError, PeerLostError, ProcessDiedError, RoleError
from aoffpolicy.transport.messages import Message
from aoffpolicy.transport.wire import PeerId

INNER, OUTER, GRACE = 0.75, 0.9, 0.15
"""Parts of a deadline: for a member's own waits, for its reply, and for the others once one has failed. A member
that waits for another therefore says so before the controller gives it up."""
CONSEQUENCE = "CollectiveError"
"""How the cause begins when a member's collective broke or was aborted, which is mostly another member's fault."""


class Call(Protocol):
    """`ControlServer.call`: raises a subclass of `RoleError` where the request failed or was not answered in time."""

    async def __call__(self, peer: PeerId, request: Message, timeout_s: float) -> Message: ...


class Unanswered(AoffpolicyError):
    """Some members failed or did not answer; `str()` has all of them, the likeliest first cause first."""

    def __init__(self, errors: Sequence[AoffpolicyError]) -> None:
        ordered = sorted(errors, key=_remoteness)
        self.first = ordered[0]
        super().__init__("; ".join(map(str, ordered)))


async def ask_all(
    call: Call,
    requests: Mapping[PeerId, Message],
    deadline: float,
    *,
    on_reply: Callable[[PeerId, Message], None],
    on_failure: Callable[[str], Coroutine[Any, Any, None]],
) -> dict[PeerId, Message]:
    """Ask all at once and wait for every reply; after a failure the others have a moment to say what they saw.

    Args:
        call: Sends one request.
        requests: One for each member.
        deadline: On the event loop's clock.
        on_reply: Called with every reply as it comes.
        on_failure: Awaited once, with the first failure as text, while the others are still waited for: it must make
            them end.

    Raises:
        Unanswered: Not every member replied.
    """
    replies: dict[PeerId, Message] = {}
    failures: dict[PeerId, AoffpolicyError] = {}
    span_s = deadline - anyio.current_time()

    async def ask(peer: PeerId, request: Message) -> None:
        try:
            replies[peer] = await call(peer, request, span_s * OUTER)
        except AoffpolicyError as error:
            failures[peer] = error
            if len(failures) == 1:
                scope.deadline = min(deadline, anyio.current_time() + span_s * GRACE)
                tasks.start_soon(on_failure, str(error))
        else:
            on_reply(peer, replies[peer])

    with anyio.CancelScope(deadline=deadline) as scope:
        async with anyio.create_task_group() as tasks:
            for peer, request in requests.items():
                tasks.start_soon(ask, peer, request)
    if len(replies) == len(requests):
        return replies
    silent = [
        DeadlineError(peer.role, peer.rank, f"did not answer {type(request).__name__}")
        for peer, request in requests.items()
        if peer not in replies and peer not in failures
    ]
    raise Unanswered([*failures.values(), *silent])


def _remoteness(error: AoffpolicyError) -> int:
    """How far from the first cause an error is likely to be."""
    if isinstance(error, PeerLostError | ProcessDiedError):
        return 0
    if isinstance(error, DeadlineError):
        return 2
    return 3 if isinstance(error, RoleError) and error.cause.startswith(CONSEQUENCE) else 1
