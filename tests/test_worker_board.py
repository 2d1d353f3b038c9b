from __future__ import annotations

import os

import anyio
import pytest

from aoffpolicy.timeline import Span
from aoffpolicy.transport.control import PeerId
from aoffpolicy.transport.events import WorkerEvent
from aoffpolicy.worker_board import WorkerBoard

pytestmark = pytest.mark.anyio
ROLLOUT, TRAINER = PeerId("rollout", 0), PeerId("trainer", 0)


class Told:
    """A board, and what it told."""

    def __init__(self) -> None:
        self.events: list[WorkerEvent] = []
        self.spans: list[Span] = []
        self.board = WorkerBoard(self.events.append, self.spans.append)
        for peer in (ROLLOUT, TRAINER):
            self.board.tell(peer, state="ready", host=os.uname().nodename, pid=os.getpid())

    def now(self, peer: PeerId) -> WorkerEvent:
        self.board.refresh()
        return next(e for e in reversed(self.events) if (e.role, e.rank) == (peer.role, peer.rank))


async def test_a_busy_time_goes_from_the_first_request_to_when_none_is_left() -> None:
    told = Told()
    began = anyio.current_time()
    for load in (1, 2, 1):
        told.board.load(ROLLOUT, load, "generate v3")
    assert (told.now(ROLLOUT).state, told.now(ROLLOUT).load, told.spans) == ("busy", 1, [])
    await anyio.sleep(0.05)
    told.board.load(ROLLOUT, 0, "generate v3")
    assert (told.now(ROLLOUT).state, told.now(ROLLOUT).load) == ("ready", 0)
    (span,) = told.spans
    assert (span.track, span.name) == ("rollout 0", "generate v3")
    assert span.start_s == pytest.approx(began, abs=0.04)
    assert 0.05 <= span.seconds < 2


async def test_speed_counts_busy_time_only_and_groups_scored_after_it() -> None:
    told = Told()
    told.board.load(ROLLOUT, 1, "g")
    await anyio.sleep(0.1)
    told.board.load(ROLLOUT, 0, "g")
    await anyio.sleep(0.3)
    told.board.tokens(ROLLOUT, 1000)
    busy_s = told.spans[0].seconds
    assert told.now(ROLLOUT).tokens_per_s == pytest.approx(1000 / busy_s)
    told.board.load(ROLLOUT, 1, "g")  # until its first group is there, what is known of the time before stands
    assert told.now(ROLLOUT).tokens_per_s == pytest.approx(1000 / busy_s)


async def test_once_a_second_every_worker_is_published_with_its_memory() -> None:
    told = Told()
    before = len(told.events)
    told.board.refresh()
    assert len(told.events) == before + 2
    assert told.events[-1].memory_bytes > 10 * 2**20


async def test_memory_of_processes_elsewhere_or_gone_is_unknown() -> None:
    told = Told()
    told.board.tell(ROLLOUT, host="elsewhere")
    told.board.tell(TRAINER, pid=2**22 + 1)
    assert told.now(ROLLOUT).memory_bytes == told.now(TRAINER).memory_bytes == 0


async def test_at_the_end_workers_have_stopped_but_for_those_lost() -> None:
    told = Told()
    told.board.tell(ROLLOUT, state="lost", detail="killed by SIGKILL")
    told.board.ended()
    assert told.now(ROLLOUT).state == "lost"
    assert told.now(TRAINER).state == "stopped"
