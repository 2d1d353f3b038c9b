"""The rollout worker process: one engine and its membership in the weight plane."""

from __future__ import annotations

import asyncio
import logging
import os

import anyio
import anyio.to_thread
import torch

from aoffpolicy import child
from aoffpolicy.child import Bootstrap, Handlers
from aoffpolicy.errors import EngineDiedError, EngineError
from aoffpolicy.rollout.engine import Engine, Receiver, engine_class
from aoffpolicy.transport.messages import (
    Abort,
    Done,
    Generate,
    Generated,
    Join,
    Message,
    Prepare,
    ReceiveWeights,
    Start,
    Started,
    Stop,
)

logger = logging.getLogger(__name__)
LAST_WORDS_S = 1.0
"""For the answers that say how the engine died."""


class RolloutWorker:
    """Answers the controller's requests to one rollout worker.

    Args:
        bootstrap: Who this worker is; its config names the engine.
    """

    def __init__(self, bootstrap: Bootstrap) -> None:
        self._bootstrap = bootstrap
        self._engine: Engine | None = None
        self._receiver: Receiver | None = None
        self._watch: asyncio.Task[None] | None = None

    @property
    def handlers(self) -> Handlers:
        return {
            Start: self.start,
            Generate: self.generate,
            Prepare: self._in_receiver,
            Join: self._in_receiver,
            Abort: self._in_receiver,
            ReceiveWeights: self.receive_weights,
            Stop: self.stop,
        }

    async def start(self, request: Start) -> Started:
        """Load the model, warm up, and get ready to receive weights."""
        engine = self._engine = await anyio.to_thread.run_sync(self._build)
        self._receiver = await engine.receiver(self._bootstrap.config.weights.backend, self._device)
        self._watch = asyncio.create_task(_end_with(engine))
        return Started(capacity=engine.capacity, context_length=engine.context_length)

    @property
    def _device(self) -> torch.device:
        kind = self._bootstrap.device_kind
        return torch.device(kind) if kind == "cpu" else torch.device(kind, self._bootstrap.device_index)

    def _build(self) -> Engine:
        torch.set_num_threads(self._bootstrap.threads)
        config = self._bootstrap.config
        return engine_class(config.rollout.engine).from_config(config, self._device)

    async def generate(self, request: Generate) -> Generated:
        """Sample one group."""
        return Generated(group=await self._started_engine().generate(request.prompt, request.sampling))

    async def receive_weights(self, request: ReceiveWeights) -> Message:
        """Receive and load all weights, then generate under the new version."""
        received = await self._in_receiver(request)
        self._started_engine().version = request.version
        return received

    async def stop(self, request: Stop) -> Done:
        """Release the engine and leave the weight group."""
        if self._watch is not None:
            self._watch.cancel()
        if self._receiver is not None:
            await self._receiver.close()
        if self._engine is not None:
            await anyio.to_thread.run_sync(self._engine.close)
        return Done()

    async def _in_receiver(self, request: Message) -> Message:
        if self._receiver is None:
            raise EngineError(f"{type(request).__name__} came before Start")
        return await self._receiver.handlers[type(request)](request)

    def _started_engine(self) -> Engine:
        if self._engine is None:
            raise EngineError("the engine has not been started")
        return self._engine


async def _end_with(engine: Engine) -> None:
    """A worker whose engine has died is of no use: it ends, and the launcher starts another one."""
    try:
        await engine.watch()
    except EngineDiedError as error:
        logger.error("%s", error)
        await anyio.sleep(LAST_WORDS_S)
        os._exit(child.EXIT_FAILED)


if __name__ == "__main__":
    child.run(RolloutWorker)
