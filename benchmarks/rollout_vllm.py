"""A rollout worker with vLLM inside, asked over the control plane, against a bare `AsyncLLM`: tokens per second.

Both serve the same requests with the same weights and engine arguments, in turn, each with an engine of its own:

    python benchmarks/rollout_vllm.py models/smollm2-135m-instruct --json rollout_vllm.json

The worker is asked for groups as the scheduler does, many at once; the bare engine gets all of them at once.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import anyio
from prompts import make_prompts

from aoffpolicy.child import Bootstrap
from aoffpolicy.config import Config
from aoffpolicy.rollout.vllm import arguments
from aoffpolicy.samples import Prompt
from aoffpolicy.supervisor import Supervisor
from aoffpolicy.transport.control import ControlServer
from aoffpolicy.transport.messages import Generate, Sampling, Start, Stop
from aoffpolicy.transport.wire import PeerId

WORKER = PeerId("rollout", 0)
START_S, CALL_S = 600.0, 600.0
REST_S = 2.0
"""An engine's processes spin for a second after its last request."""


@asynccontextmanager
async def worker(config: Config) -> AsyncIterator[ControlServer]:
    """A real rollout worker process, started; the server reaches it."""
    run_id = secrets.token_hex(8)
    with tempfile.TemporaryDirectory() as logs:
        async with (
            ControlServer("127.0.0.1", run_id=run_id, keys=None) as server,
            Supervisor(Path(logs), stop_timeout_s=15.0) as supervisor,
        ):
            server.allow(WORKER, b"")
            await supervisor.spawn(
                Bootstrap(
                    role="rollout",
                    rank=0,
                    world_size=1,
                    config=config,
                    run_id=run_id,
                    parent_pid=os.getpid(),
                    control_url=server.address.url,
                    threads=config.rollout.threads,
                )
            )
            await server.wait_for(WORKER, START_S)
            await server.call(WORKER, Start(), START_S)
            yield server
            supervisor.expect_exits()
            await server.call(WORKER, Stop(), 30.0)


def start_bare(config: Config) -> Any:
    """The same engine, as somebody without this project would start it."""
    os.environ.update(arguments.environment(config, "cpu", config.rollout.threads, ""))
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments.engine_arguments(config, "cpu")))


async def ask_worker(server: ControlServer, prompts: Sequence[Prompt], sampling: Sampling) -> int:
    """Serve all groups. Returns the tokens generated."""
    counts: list[int] = []

    async def ask(prompt: Prompt) -> None:
        reply = await server.call(WORKER, Generate(prompt=prompt, sampling=sampling), CALL_S)
        counts.extend(sample.completion_tokens for sample in reply.group.samples)

    async with anyio.create_task_group() as tasks:
        for prompt in prompts:
            tasks.start_soon(ask, prompt)
    return sum(counts)


async def ask_bare(llm: Any, prompts: Sequence[Prompt], sampling: Sampling, repeat: int) -> int:
    """The same of the bare engine."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    counts: list[int] = []

    async def ask(prompt: Prompt) -> None:
        parameters = SamplingParams(
            n=sampling.n,
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            seed=sampling.seed + prompt.uid,
            logprobs=0,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        request = {"prompt_token_ids": prompt.token_ids_P.tolist()}
        finished: dict[int, int] = {}
        async for output in llm.generate(request, parameters, f"{repeat}-{prompt.uid}"):
            finished |= {completion.index: len(completion.token_ids) for completion in output.outputs}
        counts.extend(finished.values())

    async with anyio.create_task_group() as tasks:
        for prompt in prompts:
            tasks.start_soon(ask, prompt)
    return sum(counts)


async def measure(parsed: argparse.Namespace) -> dict[str, float]:
    config = Config.model_validate(
        {
            "model": {"path": parsed.model},
            "data": {"source": "reasoning_gym:chain_sum", "group_size": parsed.group_size, "max_prompt_tokens": 128},
            "rollout": {
                "engine": "vllm",
                "max_tokens": parsed.max_tokens,
                "min_tokens": parsed.max_tokens,
                "max_sequences": parsed.prompts * parsed.group_size,
                "threads": parsed.threads,
            },
            "weights": {"backend": "gloo"},
        }
    )
    prompts = make_prompts(parsed.model, parsed.prompts)
    figures: dict[str, list[float]] = {"worker": [], "bare": []}
    llm = start_bare(config)
    try:
        async with worker(config) as server:
            for repeat in range(parsed.repeats + 1):  # the first pair warms up
                sampling = Sampling(n=parsed.group_size, max_tokens=parsed.max_tokens, temperature=1.0, seed=repeat)
                calls = {
                    "worker": lambda sampling=sampling: ask_worker(server, prompts, sampling),
                    "bare": lambda sampling=sampling, repeat=repeat: ask_bare(llm, prompts, sampling, repeat),
                }
                for name in sorted(calls, reverse=repeat % 2 == 0):  # each goes first in turn
                    await anyio.sleep(REST_S)
                    began = time.perf_counter()
                    tokens = await calls[name]()
                    assert tokens == parsed.prompts * parsed.group_size * parsed.max_tokens
                    if repeat:
                        figures[name].append(tokens / (time.perf_counter() - began))
    finally:
        llm.shutdown()
    pairs = [ours / theirs for ours, theirs in zip(figures["worker"], figures["bare"], strict=True)]
    return {
        "worker_tokens_per_s": statistics.median(figures["worker"]),
        "bare_tokens_per_s": statistics.median(figures["bare"]),
        "worker_over_bare": statistics.median(pairs),
        "worker_over_bare_min": min(pairs),
        "worker_over_bare_max": max(pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", type=Path, help="Hugging Face model folder")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=7, help="pairs of runs; the medians are reported")
    parser.add_argument("--threads", type=int, default=1, help="of each engine; vLLM's own processes take a core too")
    parser.add_argument("--json", type=Path, help="write the figures as one flat object")
    parsed = parser.parse_args()
    figures = anyio.run(measure, parsed)
    for name, value in figures.items():
        print(f"{name} {value:.4g}")
    if parsed.json:
        parsed.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
