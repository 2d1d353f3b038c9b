"""The scheduler inside somebody else's program: event loops, imports, and a plain loop that it must equal."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from aoffpolicy import Batch, GroupRequest, Prompt, SampleGroup, SchedulerSettings
from tests.simulated import SimulatedRoles, World, always, drive, group, prompts, run_virtually


@pytest.mark.parametrize(
    ("backend", "options"),
    [("asyncio", {"use_uvloop": False}), ("asyncio", {"use_uvloop": True}), ("trio", {})],
    ids=["asyncio", "uvloop", "trio"],
)
def test_it_runs_in_real_time_on_asyncio_uvloop_and_trio(backend: str, options: dict[str, Any]) -> None:
    world = World()
    roles = SimulatedRoles(world, always(generate=0.005, train=0.005, send=0.001, load=0.001))
    settings = SchedulerSettings(steps=4, prompts_per_step=2, checkpoint_every=2, eval_every=2)
    result = anyio.run(
        lambda: drive(roles, settings, prompts(100), eval_prompts=prompts(2)), backend=backend, backend_options=options
    )
    assert world.trained == {0: (0, 1), 1: (2, 3), 2: (4, 5), 3: (6, 7)}
    assert [record.step for record in result.records] == [0, 1, 2, 3]
    assert len(world.saved) == 2


def test_the_public_api_imports_neither_torch_nor_zmq() -> None:
    code = (
        "import sys; from aoffpolicy import Scheduler, SchedulerSettings, Rollout, Trainer, WeightSync, verdict; "
        "print(sorted({'torch', 'zmq', 'pydantic', 'transformers'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout.strip() == "[]"


class TorchPolicy:
    """A tiny policy gradient: sampling and training depend on every bit of the weights."""

    def __init__(self) -> None:
        import torch

        torch.manual_seed(7)
        self.weights = torch.nn.Linear(4, 6)
        self.optimizer = torch.optim.AdamW(self.weights.parameters(), lr=0.1)
        self.rollout_weights = {k: v.clone() for k, v in self.weights.state_dict().items()}
        self.version = 0

    def generate_group(self, prompt: Prompt) -> SampleGroup:
        """Sample under the rollout's copy of the weights, with a seed of the prompt's own."""
        import torch

        generator = torch.Generator().manual_seed(prompt.uid)
        features = torch.randn(4, generator=generator)
        logits = torch.func.functional_call(self.weights, self.rollout_weights, (features,))
        actions = torch.multinomial(logits.softmax(-1), 8, replacement=True, generator=generator)
        scored = group(prompt, self.version, rewards=[float(action == 3) for action in actions])
        return SampleGroup(prompt, scored.samples, {"features": features, "actions": actions})

    def train_batch(self, groups: Sequence[SampleGroup]) -> float:
        import torch

        loss = torch.zeros(())
        for one in groups:
            rewards = torch.tensor([sample.reward for sample in one.samples])
            logprobs = self.weights(one.metadata["features"]).log_softmax(-1)[one.metadata["actions"]]
            loss = loss - ((rewards - rewards.mean()) * logprobs).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def push(self, version: int) -> None:
        self.rollout_weights = {k: v.clone() for k, v in self.weights.state_dict().items()}
        self.version = version


def test_without_staleness_losses_and_weights_equal_a_plain_sequential_loop_bit_for_bit() -> None:
    torch = pytest.importorskip("torch")
    steps, per_step, data = 6, 4, prompts(100)

    plain = TorchPolicy()
    losses = []
    for step in range(steps):
        losses.append(
            plain.train_batch([plain.generate_group(p) for p in data[step * per_step : (step + 1) * per_step]])
        )
        plain.push(step + 1)

    class Roles(SimulatedRoles):
        async def generate(self, request: GroupRequest) -> SampleGroup:
            await super().generate(request)  # groups come back in an order of their own
            return policy.generate_group(request.prompt)

        async def train(self, step: int, batch: Batch) -> dict[str, float]:
            await super().train(step, batch)
            return {"loss": policy.train_batch(batch.groups)}

        async def load(self, version: int) -> None:
            await super().load(version)
            policy.push(version)

    policy = TorchPolicy()
    roles = Roles(World(), lambda call, number: float(-number % 5))
    settings = SchedulerSettings(steps=steps, prompts_per_step=per_step, max_staleness=0)
    result = run_virtually(lambda: drive(roles, settings, data))
    assert [record.metrics["loss"] for record in result.records] == losses
    for name, expected in plain.weights.state_dict().items():
        assert torch.equal(policy.weights.state_dict()[name], expected)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_the_example_of_async_functions_learns(backend: str) -> None:
    root = Path(__file__).parent.parent
    command = [sys.executable, "-m", "examples.embed_async_functions", backend]
    out = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=root)
    first, last = map(float, out.stdout.splitlines()[-1].removeprefix("reward ").split(" -> "))
    assert first < 0.2 and last > 0.6
    assert "staleness 1" in out.stdout


@pytest.mark.multiprocess
def test_the_example_of_a_torch_loop_trains_beside_an_engine_in_another_process(tmp_path: Path) -> None:
    from tests.tiny import tiny_llama

    command = [sys.executable, "examples/embed_torch_loop.py", str(tiny_llama(tmp_path)), "4"]
    done = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()[:4]] == [f"step {step}" for step in range(4)]
