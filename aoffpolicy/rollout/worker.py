"""The rollout worker process: one engine and its membership in the weight plane."""

from __future__ import annotations

import anyio.to_thread
import torch

from aoffpolicy import child
from aoffpolicy.child import Bootstrap, Handlers
from aoffpolicy.devices import COLLECTIVE_BACKEND, torch_device
from aoffpolicy.errors import EngineError
from aoffpolicy.rollout.engine import Engine, engine_class
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
from aoffpolicy.transport.weights import WeightMember


class RolloutWorker:
    """Answers the controller's requests to one rollout worker.

    Args:
        bootstrap: Who this worker is; its config names the engine.
    """

    def __init__(self, bootstrap: Bootstrap) -> None:
        self._bootstrap = bootstrap
        self._engine: Engine | None = None
        self._member: WeightMember | None = None

    @property
    def handlers(self) -> Handlers:
        return {
            Start: self.start,
            Generate: self.generate,
            Prepare: self._in_member,
            Join: self._in_member,
            Abort: self._in_member,
            ReceiveWeights: self.receive_weights,
            Stop: self.stop,
        }

    async def start(self, request: Start) -> Started:
        """Load the model, warm up, and get ready to receive weights."""
        engine = self._engine = await anyio.to_thread.run_sync(self._build)
        weights = self._bootstrap.config.weights
        kind = self._bootstrap.device_kind
        self._member = WeightMember(
            "receive",
            backend=COLLECTIVE_BACKEND[kind] if weights.backend == "auto" else weights.backend,
            specs=engine.specs(),
            load=engine.load_weights,
            device=torch.device(kind) if kind == "cpu" else torch.device(kind, self._bootstrap.device_index),
        )
        return Started(capacity=engine.capacity, context_length=engine.context_length)

    def _build(self) -> Engine:
        torch.set_num_threads(self._bootstrap.threads)
        device = torch_device(self._bootstrap.device_kind, self._bootstrap.device_index)
        config = self._bootstrap.config
        return engine_class(config.rollout.engine).from_config(config, device)

    async def generate(self, request: Generate) -> Generated:
        """Sample one group."""
        return Generated(group=await self._started_engine().generate(request.prompt, request.sampling))

    async def receive_weights(self, request: ReceiveWeights) -> Message:
        """Receive and load all weights, then generate under the new version."""
        received = await self._in_member(request)
        self._started_engine().version = request.version
        return received

    async def stop(self, request: Stop) -> Done:
        """Release the engine and leave the weight group."""
        if self._member is not None:
            self._member.close()
        if self._engine is not None:
            await anyio.to_thread.run_sync(self._engine.close)
        return Done()

    async def _in_member(self, request: Message) -> Message:
        if self._member is None:
            raise EngineError(f"{type(request).__name__} came before Start")
        return await self._member.handlers[type(request)](request)

    def _started_engine(self) -> Engine:
        if self._engine is None:
            raise EngineError("the engine has not been started")
        return self._engine


if __name__ == "__main__":
    child.run(RolloutWorker)
