"""The scheduler around your own code, without a GPU, a process or a config file: a policy in numpy learns in seconds.

    python examples/embed_async_functions.py [asyncio|trio]

The task: answer digit d with (d + 3) % 10. The policy is a 10 x 10 table of logits. An "engine" samples from its own
copy of the table and takes its time; a "trainer" takes its time too; the scheduler overlaps them. docs/embedding.md
explains the pieces.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

import anyio
import numpy as np

from aoffpolicy import Batch, GroupRequest, Prompt, Sample, SampleGroup, Scheduler, SchedulerSettings, verdict

GROUP_SIZE = 8
LEARNING_RATE = 5.0


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return np.asarray(logits - np.logaddexp.reduce(logits))


# --- The rollout: one group for each call, many calls at once ------------------------------------------------------


class Engine:
    """Samples under the weights it was last given."""

    def __init__(self) -> None:
        self.logits = np.zeros((10, 10))
        self.version = 0

    async def generate(self, request: GroupRequest) -> SampleGroup:
        digit = int(request.prompt.token_ids_P[0])
        rng = np.random.default_rng([request.prompt.uid, request.attempt])
        await anyio.sleep(rng.uniform(0.01, 0.03))  # where a real engine would work
        logprobs = log_softmax(self.logits[digit])
        answers = rng.choice(10, size=GROUP_SIZE, p=np.exp(logprobs))
        return SampleGroup(request.prompt, tuple(self._sample(digit, answer, logprobs[answer]) for answer in answers))

    def _sample(self, digit: int, answer: int, logprob: float) -> Sample:
        return Sample(
            token_ids_T=np.array([digit, answer], np.int32),
            loss_mask_T=np.array([False, True]),  # the prompt is not trained
            behaviour_logprobs_T=np.array([0.0, logprob], np.float32),  # of the policy that sampled it
            versions_T=np.array([-1, self.version], np.int32),  # the scheduler checks them
            text=str(answer),
            finish_reason="stop",
            reward=float(answer == (digit + 3) % 10),
        )


# --- The trainer ---------------------------------------------------------------------------------------------------


class Trainer:
    """REINFORCE with a group baseline; the importance ratio makes up for samples that are a version old."""

    def __init__(self) -> None:
        self.logits = np.zeros((10, 10))

    async def train(self, step: int, batch: Batch) -> Mapping[str, float]:
        gradient = np.zeros_like(self.logits)
        ratios = []
        for group in batch.groups:
            rewards = np.array([sample.reward for sample in group.samples])
            for sample, advantage in zip(group.samples, rewards - rewards.mean(), strict=True):
                digit, answer = sample.token_ids_T
                logprobs = log_softmax(self.logits[digit])
                ratio = np.exp(logprobs[answer] - sample.behaviour_logprobs_T[1])
                gradient[digit] += ratio * advantage * (np.eye(10)[answer] - np.exp(logprobs))
                ratios.append(ratio)
        await anyio.sleep(0.04)  # where a real trainer would work
        self.logits += LEARNING_RATE * gradient / len(ratios)
        return {"importance_ratio_mean": float(np.mean(ratios))}

    async def save(self, step: int, state: bytes) -> None:
        """Would store `self.logits` and `state` as one checkpoint; `Scheduler(state=state)` goes on from it."""


# --- The weights' way from one to the other ------------------------------------------------------------------------


class CopyWeights:
    """No generation runs from before `send` until `load` has returned; training goes on after `send`."""

    def __init__(self, trainer: Trainer, engine: Engine) -> None:
        self._trainer = trainer
        self._engine = engine
        self._sent = trainer.logits

    async def send(self, version: int) -> None:
        self._sent = self._trainer.logits.copy()

    async def load(self, version: int) -> None:
        self._engine.logits, self._engine.version = self._sent, version


# --- The run -------------------------------------------------------------------------------------------------------


async def main() -> None:
    engine, trainer = Engine(), Trainer()
    prompts = [Prompt(uid, np.array([uid % 10], np.int32)) for uid in range(100_000)]
    settings = SchedulerSettings(steps=40, prompts_per_step=20, max_staleness=1, eval_every=20)
    records = []
    async with Scheduler(
        engine, trainer, CopyWeights(trainer, engine), prompts, settings, eval_prompts=prompts[:10]
    ) as scheduler:
        async for record in scheduler.run():
            records.append(record)
            if record.step % 5 == 4:
                held_out = f", held out {record.evaluation.reward_mean:.2f}" if record.evaluation else ""
                print(
                    f"step {record.step:2}  reward {record.reward_mean:.2f}  staleness {record.staleness_max}  "
                    f"trainer waited {record.time_wait_rollout * 1e3:.0f} ms of {record.time_step * 1e3:.0f}{held_out}"
                )
    print(verdict(records))
    print(f"reward {records[0].reward_mean:.2f} -> {records[-1].reward_mean:.2f}")


if __name__ == "__main__":
    anyio.run(main, backend=sys.argv[1] if len(sys.argv) > 1 else "asyncio")
