"""With max_staleness 0 the whole pipeline is a plain loop: generate, score, train, load, one after the other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import anyio
import pytest
import torch

from aoffpolicy import config as configuration
from aoffpolicy.config import Config
from aoffpolicy.data.prompts import build_prompts, load_tokenizer
from aoffpolicy.rollout.torch_engine import TorchEngine
from aoffpolicy.samples import Prompt, SampleGroup
from aoffpolicy.trainer.fsdp2 import Fsdp2
from aoffpolicy.transport.messages import Sampling
from tests.launching import tiny_run
from tests.tiny_rewards import digit_fraction
from tests.trainer_ranks import Outcome, on_ranks


@pytest.mark.multiprocess
@pytest.mark.timeout(200)
def test_staleness_zero_gives_the_losses_of_a_plain_sequential_loop(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, run={"max_staleness": 0, "deterministic": True, "steps": 4})
    done = run.run()
    assert done.returncode == 0, done.stderr
    (plain,) = on_ranks(1, plain_loop, configuration.load(run.config))
    for row, expected in zip(run.metrics(), plain["steps"], strict=True):
        assert row["reward_mean"] == pytest.approx(expected.pop("reward_mean"), rel=1e-12)
        for key, value in expected.items():
            assert row[key] == value, f"step {row['step']}: {key}"  # bit for bit


def plain_loop(config: Config) -> Outcome:
    """Every step in order with the same functions, in one process and without a scheduler."""
    prompts = build_prompts(config, load_tokenizer(config))
    engine = TorchEngine.from_config(config, torch.device("cpu"))
    backend = Fsdp2(config, torch.device("cpu"))
    steps = []
    for step in range(config.run.steps):
        uids = range(step * config.data.prompts_per_step, (step + 1) * config.data.prompts_per_step)
        groups = [generate(engine, config, prompts[uid]) for uid in uids]
        advantages = backend.algorithm.advantages(groups)
        metrics = backend.train(groups, advantages, config.rollout.temperature, version=step)
        rewards = [sample.reward for group in groups for sample in group.samples]
        steps.append({key: metrics[key] for key in ("loss", "grad_norm", "entropy")})
        steps[-1]["reward_mean"] = sum(rewards) / len(rewards)
        engine.load_weights(backend.export_weights())
        engine.version = step + 1
    engine.close()
    return {"steps": steps}


def generate(engine: TorchEngine, config: Config, prompt: Prompt) -> SampleGroup:
    sampling = Sampling(
        n=config.data.group_size,
        max_tokens=config.rollout.max_tokens,
        temperature=config.rollout.temperature,
        seed=config.run.seed,
    )

    async def ask() -> SampleGroup:
        return await engine.generate(prompt, sampling)

    group = anyio.run(ask)
    return replace(group, samples=tuple(replace(s, reward=digit_fraction(s.text, {})) for s in group.samples))
