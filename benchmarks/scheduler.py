"""What the scheduler itself costs: whole runs with roles that only wait, or do not even that.

Prints one line a figure, all from one invocation:
  overlap_efficiency          50 ms of generation and of training, 64 groups a step: median over the steps (limit 1.0)
  run_vs_limit                wall time of that run / (30 trainings and the first generation), by a clock of its own;
                              each group takes 50 ms from its own start, so the cost of starting 64 of them shows here
  speedup_1_over_0            the same run with max_staleness 0 / with 1 (limit 2.0)
  groups_per_s_N              instant roles, N groups of 8 samples a step, through the whole pipeline, on one core
  us_per_group_N              the inverse
  cost_4096_over_64           cost of a group with 4,096 a step / with 64 a step (linear: 1.0)
  loop_stall_ms_4096          longest time that the event loop was held up, 4,096 groups a step, all in flight at once;
                              Python's cyclic garbage collector kept from full passes (`keep_gc_short` below)
  loop_stall_ms_4096_save     the same with a checkpoint of 4,096 finished groups after every step
  loop_stall_ms_4096_gc       the same as the first with the collector as Python sets it: its full passes are the rest
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import anyio
import numpy as np
from anyio.lowlevel import checkpoint

from aoffpolicy import Batch, GroupRequest, Prompt, Sample, SampleGroup, Scheduler, SchedulerSettings, StepRecord

SAMPLES, TOKENS = 8, 128
SIZES = (64, 512, 4096)


class Roles:
    """Rollout, trainer and weight sync that wait, and nothing else."""

    def __init__(self, generate_s: float = 0.0, train_s: float = 0.0) -> None:
        self._generate_s = generate_s
        self._train_s = train_s
        mask = np.arange(TOKENS) >= TOKENS // 4
        self._sample = Sample(
            token_ids_T=np.zeros(TOKENS, np.int32),
            loss_mask_T=mask,
            behaviour_logprobs_T=np.zeros(TOKENS, np.float32),
            versions_T=np.zeros(TOKENS, np.int32),
            text="",
            finish_reason="stop",
        )

    async def generate(self, request: GroupRequest) -> SampleGroup:
        if self._generate_s:
            await anyio.sleep(self._generate_s)
        versions = np.full(TOKENS, request.version, np.int32)
        sample = replace(self._sample, versions_T=versions)
        return SampleGroup(request.prompt, tuple(replace(sample, reward=float(i)) for i in range(SAMPLES)))

    async def train(self, step: int, batch: Batch) -> Mapping[str, float]:
        await anyio.sleep(self._train_s)
        return {"loss": 0.0}

    async def save(self, step: int, state: bytes) -> None: ...

    async def send(self, version: int) -> None: ...

    async def load(self, version: int) -> None: ...


class Prompts:
    """Endless."""

    def __getitem__(self, uid: int) -> Prompt:
        return Prompt(uid, PROMPT)


PROMPT = np.arange(TOKENS // 4, dtype=np.int32)


async def run(roles: Roles, settings: SchedulerSettings) -> list[StepRecord]:
    async with Scheduler(roles, roles, roles, Prompts(), settings) as scheduler:
        return [record async for record in scheduler.run()]


def overlap() -> dict[str, float]:
    phase_s, steps = 0.05, 30
    wall_s, efficiency = {}, 0.0
    for staleness in (0, 1):
        settings = SchedulerSettings(steps=steps, prompts_per_step=64, max_staleness=staleness)
        began = time.perf_counter()
        # Not uvloop: its clock, which the records are measured with, ticks in whole milliseconds.
        records = anyio.run(run, Roles(phase_s, phase_s), settings, backend_options={"use_uvloop": False})
        wall_s[staleness] = time.perf_counter() - began
        efficiency = statistics.median(record.overlap_efficiency or 0.0 for record in records[1:-1])
    return {
        "overlap_efficiency": efficiency,
        "run_vs_limit": wall_s[1] / (phase_s * (steps + 1)),
        "speedup_1_over_0": wall_s[0] / wall_s[1],
    }


def throughput() -> dict[str, float]:
    figures = {}
    cost: dict[int, float] = {}
    for size in SIZES:
        steps = max(2, 2 * SIZES[-1] // size)
        settings = SchedulerSettings(steps=steps, prompts_per_step=size)
        times = []
        for _ in range(3):
            began = time.perf_counter()
            anyio.run(run, Roles(), settings, backend_options={"use_uvloop": True})
            times.append((time.perf_counter() - began) / (steps * size))
        cost[size] = min(times)
        figures[f"groups_per_s_{size}"] = 1 / cost[size]
        figures[f"us_per_group_{size}"] = cost[size] * 1e6
    return figures | {"cost_4096_over_64": cost[SIZES[-1]] / cost[SIZES[0]]}


def keep_gc_short() -> None:
    """What a program with thousands of groups in flight should do once it has started up."""
    gc.collect()
    gc.freeze()  # what is imported by now need not be looked at again
    gc.set_threshold(5_000, 5, 1_000_000)  # young objects as ever, but no pass over all of them


def stall(checkpoint_every: int) -> float:
    """The longest time between two turns of the event loop, in seconds; the least of three runs.

    What other programs on the machine take from this one shows in single runs, what the scheduler does in all of them.
    """

    async def main() -> float:
        longest = 0.0

        async def watch() -> None:
            nonlocal longest
            while True:
                began = time.perf_counter()
                await checkpoint()
                longest = max(longest, time.perf_counter() - began)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            settings = SchedulerSettings(steps=4, prompts_per_step=SIZES[-1], checkpoint_every=checkpoint_every)
            await run(Roles(0.5, 0.5), settings)
            tasks.cancel_scope.cancel()
        return longest

    return min(anyio.run(main, backend_options={"use_uvloop": True}) for _ in range(3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures as one flat object")
    arguments = parser.parse_args()
    figures = overlap() | throughput()
    figures["loop_stall_ms_4096_gc"] = 1e3 * stall(checkpoint_every=0)
    keep_gc_short()
    figures["loop_stall_ms_4096"] = 1e3 * stall(checkpoint_every=0)
    figures["loop_stall_ms_4096_save"] = 1e3 * stall(checkpoint_every=1)
    for name, value in figures.items():
        print(f"{name:<26} {value:.5g}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
