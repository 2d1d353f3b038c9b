"""The scheduler around somebody's own PyTorch training loop, which stays as it was and runs in a thread.

    python examples/embed_torch_loop.py [MODEL_FOLDER] [STEPS]

Generation runs on the embedded engine in another process; weights go there as safetensors bytes. Any Hugging Face
causal language model folder will do; `make model` builds the default one. The task: write digits. docs/embedding.md
explains the pieces.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from aoffpolicy import Batch, GroupRequest, Prompt, Sample, SampleGroup, Scheduler, SchedulerSettings, verdict

GROUP_SIZE = 4
MAX_TOKENS = 8


# --- The training loop that was here before ------------------------------------------------------------------------


class Loop:
    """Policy gradient on padded sequences; knows nothing of schedulers, versions or staleness."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)

    def step(self, ids_BT: torch.Tensor, mask_BT: torch.Tensor, advantage_B: torch.Tensor) -> float:
        logits_BTV = self.model(ids_BT, use_cache=False).logits[:, :-1]
        logprobs_BT = logits_BTV.log_softmax(-1).gather(-1, ids_BT[:, 1:, None]).squeeze(-1)
        mask_BT = mask_BT[:, 1:]
        loss = -(logprobs_BT * mask_BT * advantage_B[:, None]).sum() / mask_BT.sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())


# --- What the scheduler needs of it: a Trainer, which may block in a thread ------------------------------------------


class TrainerAround:
    def __init__(self, loop: Loop) -> None:
        self.loop = loop

    async def train(self, step: int, batch: Batch) -> Mapping[str, float]:
        loss = await anyio.to_thread.run_sync(self.loop.step, *padded(batch))
        return {"loss": loss}

    async def save(self, step: int, state: bytes) -> None:
        """Called only with `checkpoint_every` or on `interrupt`: store `state` with your checkpoint."""


def padded(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of all samples (right padding is never attended to), masks, and rewards relative to the group's mean."""
    samples = [sample for group in batch.groups for sample in group.samples]
    ids_BT = torch.zeros(len(samples), max(len(sample.token_ids_T) for sample in samples), dtype=torch.int64)
    mask_BT = torch.zeros(ids_BT.shape)
    for row, sample in enumerate(samples):
        ids_BT[row, : len(sample.token_ids_T)] = torch.tensor(sample.token_ids_T)
        mask_BT[row, : len(sample.loss_mask_T)] = torch.tensor(sample.loss_mask_T)
    rewards = [[sample.reward for sample in group.samples] for group in batch.groups]
    advantage_B = torch.tensor([reward - np.mean(row) for row in rewards for reward in row], dtype=torch.float32)
    return ids_BT, mask_BT, advantage_B


# --- The engine in a process of its own -------------------------------------------------------------------------------

engine: Any = None


def start_engine(folder: Path) -> None:
    from aoffpolicy.rollout.torch_engine import TorchEngine

    global engine
    torch.set_num_threads(1)
    engine = TorchEngine(
        folder, slots=GROUP_SIZE, group_size=GROUP_SIZE, prompt_length=64, completion_length=MAX_TOKENS
    )


def generate(prompt: Prompt) -> SampleGroup:
    from aoffpolicy.transport.messages import Sampling

    group: SampleGroup = anyio.run(
        engine.generate, prompt, Sampling(n=GROUP_SIZE, max_tokens=MAX_TOKENS, temperature=1.0, seed=0)
    )
    return replace(group, samples=tuple(map(with_reward, group.samples)))


def with_reward(sample: Sample) -> Sample:
    digits = sum(character.isdigit() for character in sample.text)
    return replace(sample, reward=digits / max(1, len(sample.text)))


def load(version: int, weights: bytes) -> None:
    engine.load_weights(safetensors.torch.load(weights).items())
    engine.version = version


class Remote:
    """`Rollout` and `WeightSync` in one: both talk to the engine's process."""

    def __init__(self, folder: Path, loop: Loop) -> None:
        context = multiprocessing.get_context("spawn")
        self.pool = ProcessPoolExecutor(1, context, initializer=start_engine, initargs=(folder,))
        self.loop = loop
        self.weights = b""

    async def generate(self, request: GroupRequest) -> SampleGroup:
        return await self._call(generate, request.prompt)

    async def send(self, version: int) -> None:
        """Copy the weights out; afterwards the loop may change them."""
        named = {name: parameter.detach() for name, parameter in self.loop.model.named_parameters()}
        self.weights = await anyio.to_thread.run_sync(safetensors.torch.save, named)

    async def load(self, version: int) -> None:
        await self._call(load, version, self.weights)

    async def _call(self, function: Any, *arguments: Any) -> Any:
        future = self.pool.submit(function, *arguments)
        return await anyio.to_thread.run_sync(future.result)


async def main(folder: Path, steps: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [f"{a} + {b} =" for a in range(10) for b in range(10)]
    prompts = [Prompt(uid, np.array(tokenizer(text).input_ids, np.int32)) for uid, text in enumerate(texts)]
    loop = Loop(folder)
    remote = Remote(folder, loop)
    settings = SchedulerSettings(steps=steps, prompts_per_step=4)
    records = []
    with remote.pool:
        async with Scheduler(remote, TrainerAround(loop), remote, prompts, settings) as scheduler:
            async for record in scheduler.run():
                records.append(record)
                print(f"step {record.step}: reward {record.reward_mean:.2f}, overlap {record.overlap_efficiency}")
    print(verdict(records))


if __name__ == "__main__":
    torch.set_num_threads(1)
    model_folder = Path(sys.argv[1] if len(sys.argv) > 1 else "models/smollm2-135m-instruct")
    anyio.run(partial(main, model_folder, int(sys.argv[2]) if len(sys.argv) > 2 else 5))
