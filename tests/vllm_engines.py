"""Engines for tests, that do at a known moment what the real one does at any."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import torch
from vllm.sampling_params import RequestOutputKind

from aoffpolicy.rollout.vllm.engine import VllmEngine
from aoffpolicy.rollout.vllm.receivers import EngineReceivers
from aoffpolicy.samples import Prompt, SampleGroup
from aoffpolicy.transport.messages import Sampling

SETTLE_S = 0.3
"""For requests to reach vLLM's core while it is held."""


class BatchedEngine(VllmEngine):
    """Holds vLLM from the first request until no other one has come for a moment.

    Two engines then compute the same matrices, and can be compared bit by bit.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._held: asyncio.Future[None] | None = None

    async def _sample(self, request_id: str, prompt: Prompt, sampling: Sampling) -> SampleGroup:
        if self._held is None:
            self._held = asyncio.ensure_future(self._llm.pause_generation(mode="keep", clear_cache=False))
            asyncio.get_running_loop().create_task(self._release())
        await asyncio.shield(self._held)
        return await super()._sample(request_id, prompt, sampling)

    async def _release(self) -> None:
        await asyncio.sleep(SETTLE_S)
        self._held = None
        await self._llm.resume_generation()


class InterruptedEngine(VllmEngine):
    """Takes its update as soon as a request has its first tokens."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._began = asyncio.Event()
        self._generate, self._llm.generate = self._llm.generate, self._watched

    async def _watched(self, prompt: Any, parameters: Any, request_id: str) -> AsyncIterator[Any]:
        parameters.output_kind = RequestOutputKind.CUMULATIVE
        async for output in self._generate(prompt, parameters, request_id):
            self._began.set()
            yield output
        self._began.clear()

    async def update(self, term: int, version: int, timeout_s: float) -> None:
        await self._began.wait()
        await super().update(term, version, timeout_s)


class DeafEngine(VllmEngine):
    """Its workers never hear of the orders of the weight plane, as if another transfer engine were in them."""

    async def receiver(self, backend: str, device: torch.device) -> EngineReceivers:
        async def install(orders: Mapping[str, Any]) -> None:
            pass

        receivers = EngineReceivers(
            host="127.0.0.1", count=1, backend=backend, specs=self.specs(), install=install, load=self.update
        )
        await receivers.open(1.0)
        return receivers
