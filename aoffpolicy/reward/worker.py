"""The reward worker: `python -m aoffpolicy.reward.worker`, started by the launcher. It imports no torch."""

from __future__ import annotations

import logging

from aoffpolicy import child
from aoffpolicy.child import Bootstrap, Handlers
from aoffpolicy.reward.pool import RewardPool
from aoffpolicy.transport.messages import Done, Score, Scored, Start, Started, Stop

logger = logging.getLogger(__name__)


class RewardWorker:
    """Answers the controller's requests with the scores of its processes."""

    def __init__(self, bootstrap: Bootstrap) -> None:
        config = bootstrap.config
        self._pool = RewardPool(
            config.reward.function,
            timeout_s=config.reward.timeout_s,
            processes=config.reward.processes,
            start_timeout_s=config.supervisor.start_timeout_s,
        )
        self.handlers: Handlers = {Start: self._start, Score: self._score, Stop: self._stop}

    async def _start(self, start: Start) -> Started:
        await self._pool.start()
        logger.info("reward ready, %d groups at once", self._pool.capacity)
        return Started(capacity=self._pool.capacity)

    async def _score(self, score: Score) -> Scored:
        return await self._pool.score(score.row, score.completions)

    async def _stop(self, stop: Stop) -> Done:
        await self._pool.aclose()
        return Done()


if __name__ == "__main__":
    child.run(RewardWorker)
