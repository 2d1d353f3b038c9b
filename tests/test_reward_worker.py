from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from aoffpolicy.child import Bootstrap
from aoffpolicy.config import Config
from aoffpolicy.errors import DataError
from aoffpolicy.reward.worker import RewardWorker
from aoffpolicy.transport.messages import Done, Score, Scored, Start, Started, Stop

pytestmark = [pytest.mark.multiprocess, pytest.mark.anyio]


def worker_of(**reward: Any) -> RewardWorker:
    settings = {"model": {"path": Path("unused")}, "data": {"source": "unused.jsonl"}, "reward": reward}
    return RewardWorker(Bootstrap(role="reward", rank=0, world_size=1, config=Config.model_validate(settings)))


async def test_a_worker_starts_scores_and_stops() -> None:
    worker = worker_of(function="last_number", processes=2)
    with anyio.fail_after(60):
        started = await worker.handlers[Start](Start())
        assert started == Started(capacity=4)
        scored = await worker.handlers[Score](Score(row={"answer": "12"}, completions=("7 + 5 = 12", "13")))
        assert scored == Scored(rewards=(1.0, 0.0), errors=())
        assert await worker.handlers[Stop](Stop()) == Done()


async def test_a_worker_whose_function_cannot_be_used_fails_at_start() -> None:
    with anyio.fail_after(60), pytest.raises(DataError, match=r"reward.function: no_such:f cannot be imported"):
        await worker_of(function="no_such:f").handlers[Start](Start())
