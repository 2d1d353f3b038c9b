"""Real rollout workers with vLLM inside, in processes of their own, and a sender of weights in this one."""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import torch

from aoffpolicy.child import Bootstrap
from aoffpolicy.config import Config
from aoffpolicy.errors import AoffpolicyError, RemoteError, first_cause
from aoffpolicy.samples import Prompt, SampleGroup
from aoffpolicy.supervisor import Supervisor
from aoffpolicy.transport.control import ControlServer
from aoffpolicy.transport.coordinator import Coordinator, GroupSettings
from aoffpolicy.transport.manifest import Named, specs_of
from aoffpolicy.transport.messages import Generate, Message, Sampling, Start, Stop
from aoffpolicy.transport.rendezvous import RendezvousStore
from aoffpolicy.transport.weights import WeightMember
from aoffpolicy.transport.wire import PeerId

TRAINER = PeerId("trainer", 0)
START_S, CALL_S = 240.0, 120.0
PROMPTS = tuple(
    Prompt(uid=uid, token_ids_P=np.array(ids, dtype=np.int32))
    for uid, ids in enumerate([[5, 6, 7, 8], [9] * 20, [10, 11], list(range(20, 60))])
)


def config_of(path: Path, **changes: Mapping[str, Any]) -> Config:
    """A small engine; `changes` by section."""
    tree: dict[str, dict[str, Any]] = {
        "model": {"path": path},
        "data": {"source": "reasoning_gym:chain_sum", "group_size": 2, "max_prompt_tokens": 64},
        "rollout": {"engine": "tests.vllm_engines:BatchedEngine", "max_tokens": 24, "max_sequences": 8, "threads": 1},
        "weights": {"backend": "gloo", "join_timeout_s": 60, "sync_timeout_s": 60},
    }
    for section, values in changes.items():
        tree.setdefault(section, {}).update(values)
    return Config.model_validate(tree)


@dataclass
class Rollouts:
    """Workers that are up, and the way to them."""

    server: ControlServer
    supervisor: Supervisor
    peers: tuple[PeerId, ...]
    logs: Path
    source: list[Named] = field(default_factory=list)
    """What the sender sends."""
    fail_at: str = ""
    """Tensor at which the sender fails while it gathers."""
    _terms: int = 0
    """Terms used up: members refuse those of an earlier plane."""

    async def generate(
        self,
        peer: PeerId,
        prompt: Prompt,
        *,
        n: int = 1,
        max_tokens: int = 24,
        temperature: float = 0.0,
        timeout_s: float = CALL_S,
    ) -> SampleGroup:
        sampling = Sampling(n=n, max_tokens=max_tokens, temperature=temperature, seed=1)
        reply = await self.server.call(peer, Generate(prompt=prompt, sampling=sampling), timeout_s)
        group = reply.group
        assert isinstance(group, SampleGroup)
        return group

    async def batch(self, peer: PeerId) -> list[tuple[list[int], np.ndarray]]:
        """Tokens and log-probabilities of all prompts, greedy, submitted at once."""
        groups: dict[int, SampleGroup] = {}

        async def ask(prompt: Prompt) -> None:
            groups[prompt.uid] = await self.generate(peer, prompt)

        async with anyio.create_task_group() as tasks:
            for prompt in PROMPTS:
                tasks.start_soon(ask, prompt)
        samples = [groups[prompt.uid].samples[0] for prompt in PROMPTS]
        return [(sample.token_ids_T.tolist(), sample.behaviour_logprobs_T) for sample in samples]

    def gather(self) -> Iterator[Named]:
        for name, tensor in self.source:
            if name == self.fail_at:
                raise ValueError(f"cannot gather {name}")
            yield name, tensor

    @asynccontextmanager
    async def plane(self, source: Sequence[Named], *, dtype: torch.dtype | None = None) -> AsyncIterator[Coordinator]:
        """A weight plane, not formed yet; the sender sends what `source` is then."""
        self.source = list(source)
        specs = specs_of(self.source, dtype)
        sender = WeightMember("send", backend="gloo", specs=specs, gather=self.gather)

        async def call(peer: PeerId, request: Message, timeout_s: float) -> Message:
            if peer != TRAINER:
                reply: Message = await self.server.call(peer, request, timeout_s)
                return reply
            with anyio.fail_after(timeout_s):
                try:
                    return await sender.handlers[type(request)](request)
                except Exception as error:
                    raise RemoteError(peer.role, peer.rank, f"{type(error).__name__}: {error}") from error

        settings = GroupSettings(
            backend="gloo", interface=self.server.address.host, bucket_bytes=65536, join_timeout_s=60, sync_timeout_s=60
        )
        store = RendezvousStore(self.server.address.host)
        try:
            async with Coordinator(call, store, [TRAINER], settings) as plane:
                plane._term = self._terms
                try:
                    yield plane
                finally:
                    self._terms = plane.term
        finally:
            sender.close()
            store.close()

    def pid(self, peer: PeerId) -> int:
        return next(child.pid for child in self.supervisor.children if child.rank == peer.rank)


@asynccontextmanager
async def rollouts(logs: Path, *configs: Config, host: str = "127.0.0.1") -> AsyncIterator[Rollouts]:
    """One worker process for each config, all started at once."""
    run_id = secrets.token_hex(8)
    logs.mkdir()
    async with (
        ControlServer(host, run_id=run_id, keys=None) as server,
        Supervisor(logs, stop_timeout_s=15.0) as supervisor,
    ):
        peers = tuple(PeerId("rollout", rank) for rank in range(len(configs)))
        for peer, config in zip(peers, configs, strict=True):
            server.allow(peer, b"")
            await supervisor.spawn(
                Bootstrap(
                    role="rollout",
                    rank=peer.rank,
                    world_size=len(peers),
                    config=config,
                    run_id=run_id,
                    parent_pid=os.getpid(),
                    control_url=server.address.url,
                )
            )
        running = Rollouts(server, supervisor, peers, logs)

        async def start(peer: PeerId) -> None:
            await server.wait_for(peer, START_S)
            await server.call(peer, Start(), START_S)

        try:
            async with anyio.create_task_group() as tasks:
                for peer in peers:
                    tasks.start_soon(start, peer)
        except BaseExceptionGroup as group:
            supervisor.expect_exits()
            raise first_cause(group) from None
        yield running
        supervisor.expect_exits()
        for peer in peers:
            with suppress(AoffpolicyError):  # some tests kill it
                await server.call(peer, Stop(), 30.0)
