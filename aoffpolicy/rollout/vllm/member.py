"""A vLLM worker's membership in the weight group: a control client and a receiver, in threads of their own.

So nothing that happens before the first weight arrives, joining the group included, holds the engine up.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import anyio
import torch

from aoffpolicy.errors import AoffpolicyError
from aoffpolicy.rollout.vllm.handover import Handover, Use
from aoffpolicy.transport.address import Address
from aoffpolicy.transport.control import ControlClient, Hello, PeerId
from aoffpolicy.transport.manifest import Named
from aoffpolicy.transport.messages import Abort, Done, ReceiveWeights, TensorSpec, WeightsReceived
from aoffpolicy.transport.weights import Handlers, WeightMember

logger = logging.getLogger(__name__)
ROLE = "engine worker"
"""Role of vLLM's workers on the control plane between them and our rollout worker."""


@dataclass(frozen=True, kw_only=True)
class Orders:
    """What our rollout worker tells each of its engine's workers; plain values, since vLLM carries it."""

    control_url: str
    run_id: str
    """Unguessable: whoever does not know it is not let in."""
    heartbeat_timeout_s: float
    backend: str
    specs: Sequence[tuple[str, str, Sequence[int]]]
    """(name, dtype, shape) of every tensor to be received."""


class EngineWorkerMember:
    """Receives weights for one vLLM worker.

    Args:
        orders: From the rollout worker.
        rank: Tensor-parallel rank.
        device: Where the weights are received.
    """

    def __init__(self, orders: Orders, rank: int, device: torch.device) -> None:
        self._orders = orders
        self._peer = PeerId(ROLE, rank)
        self._handover = Handover()
        self._term = 0
        self._member = WeightMember(
            "receive",
            backend=orders.backend,
            specs=tuple(TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in orders.specs),
            load=self._load,
            device=device,
        )
        threading.Thread(target=self._serve, name="weights-control", daemon=True).start()

    def load(self, term: int, use: Use, timeout_s: float) -> None:
        """In the engine's thread: hand the tensors of the update that is coming to `use`; blocks.

        Raises:
            WeightSyncError: The update was given up, or did not come in time.
        """
        self._handover.take(term, use, timeout_s)

    def close(self) -> None:
        """Leave the group."""
        self._handover.withdraw(self._term, "the engine is shutting down")
        self._member.close()

    def _serve(self) -> None:
        hello = Hello(
            role=self._peer.role,
            rank=self._peer.rank,
            incarnation=0,
            host=os.uname().nodename,
            pid=os.getpid(),
            versions={},
            run_id=self._orders.run_id,
        )
        client = ControlClient(
            Address.parse(self._orders.control_url),
            hello,
            keys=None,
            server_key=None,
            heartbeat_timeout_s=self._orders.heartbeat_timeout_s,
        )
        handlers: Handlers = {**self._member.handlers, ReceiveWeights: self._receive, Abort: self._abort}
        try:
            anyio.run(client.serve, handlers)
        except AoffpolicyError as error:
            logger.error("%s no longer receives weights: %s", self._peer, error)
            self.close()

    async def _receive(self, request: ReceiveWeights) -> WeightsReceived:
        self._term = request.term
        return await self._member.receive(request)

    async def _abort(self, request: Abort) -> Done:
        self._handover.withdraw(request.term, request.reason)
        return await self._member.abort(request)

    def _load(self, tensors: Iterator[Named]) -> set[str]:
        return set(self._handover.offer(self._term, tensors))
