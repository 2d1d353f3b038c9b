"""The rollout worker behind its handlers, with a real engine and a real weight group, all in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from aoffpolicy.child import Bootstrap
from aoffpolicy.config import Config
from aoffpolicy.errors import EngineError
from aoffpolicy.rollout.torch_engine import TorchEngine
from aoffpolicy.rollout.worker import RolloutWorker
from aoffpolicy.samples import Prompt, SampleGroup
from aoffpolicy.transport.coordinator import Coordinator, GroupSettings
from aoffpolicy.transport.manifest import specs_of
from aoffpolicy.transport.messages import Done, Generate, Generated, Message, Prepare, Sampling, Start, Started, Stop
from aoffpolicy.transport.rendezvous import RendezvousStore
from aoffpolicy.transport.weights import WeightMember
from aoffpolicy.transport.wire import PeerId
from tests.tiny import tiny_llama

pytestmark = pytest.mark.anyio
TRAINER, ROLLOUT = PeerId("trainer", 0), PeerId("rollout", 0)
PROMPT = Prompt(uid=3, token_ids_P=np.array([5, 6, 7, 8], dtype=np.int32))
SAMPLING = Sampling(n=4, max_tokens=10, temperature=1.0, seed=0)


def config_of(path: Path) -> Config:
    return Config.model_validate(
        {
            "model": {"path": path},
            "data": {"source": "reasoning_gym:chain_sum", "group_size": 4, "max_prompt_tokens": 30},
            "rollout": {"max_tokens": 10, "max_sequences": 16},
            "weights": {"backend": "gloo"},
        }
    )


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[RolloutWorker]:
    config = config_of(tiny_llama(tmp_path / "old"))
    worker = RolloutWorker(Bootstrap(role="rollout", rank=0, world_size=1, config=config))
    yield worker
    await worker.stop(Stop())


def tokens_of(group: SampleGroup) -> list[list[int]]:
    return [sample.token_ids_T.tolist() for sample in group.samples]


async def test_the_worker_starts_with_the_sizes_of_its_config_and_generates(worker: RolloutWorker) -> None:
    assert await worker.handlers[Start](Start()) == Started(capacity=8, context_length=40)
    reply = await worker.handlers[Generate](Generate(prompt=PROMPT, sampling=SAMPLING))
    assert isinstance(reply, Generated)
    assert len(reply.group.samples) == 4
    assert all(sample.completion_tokens <= 10 for sample in reply.group.samples)


@pytest.mark.parametrize("request_", [Generate(prompt=PROMPT, sampling=SAMPLING), Prepare(term=1)])
async def test_a_request_before_start_is_refused(request_: Message, worker: RolloutWorker) -> None:
    with pytest.raises(EngineError, match=r"(came before Start|has not been started)"):
        await worker.handlers[type(request_)](request_)


async def test_weights_that_arrive_over_the_group_are_generated_from_under_their_version(
    tmp_path: Path, worker: RolloutWorker
) -> None:
    new = tiny_llama(tmp_path / "new", seed=1)
    weights = list(AutoModelForCausalLM.from_pretrained(new, dtype=torch.float32).named_parameters())
    sender = WeightMember("send", backend="gloo", specs=specs_of(weights), gather=lambda: weights)
    await worker.handlers[Start](Start())

    async def call(peer: PeerId, request: Message, timeout_s: float) -> Message:
        handlers = sender.handlers if peer == TRAINER else worker.handlers
        with anyio.fail_after(timeout_s):
            return await handlers[type(request)](request)

    settings = GroupSettings(
        backend="gloo", interface="127.0.0.1", bucket_bytes=4096, join_timeout_s=20, sync_timeout_s=20
    )
    store = RendezvousStore("127.0.0.1")
    try:
        async with Coordinator(call, store, [TRAINER], settings) as plane:
            await plane.form([ROLLOUT])
            await plane.send(5)
            await plane.load(5)
    finally:
        sender.close()
        store.close()
    reply = await worker.generate(Generate(prompt=PROMPT, sampling=SAMPLING))
    fresh = TorchEngine(new, slots=4)
    expected = await fresh.generate(PROMPT, SAMPLING)
    fresh.close()
    assert tokens_of(reply.group) == tokens_of(expected)
    assert reply.group.oldest_version == 5


async def test_stopping_is_answered_and_ends_the_engine(worker: RolloutWorker) -> None:
    await worker.handlers[Start](Start())
    assert await worker.handlers[Stop](Stop()) == Done()
    with pytest.raises(EngineError, match="closed"):
        await worker.handlers[Generate](Generate(prompt=PROMPT, sampling=SAMPLING))
