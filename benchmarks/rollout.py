"""The embedded engine against transformers' `generate`, and against the matrix products alone: tokens per second.

Both serve the same requests with the same weights, in turn, in one process on the cores it is given:

    taskset -c 1 python benchmarks/rollout.py models/smollm2-135m-instruct --json rollout.json

Stop tokens are ignored, so that both generate the same number of tokens. The limit is the time of the model's own
linear layers on the shapes that no engine can avoid: every prompt token once, then every completion token but the last,
with all sequences in one batch.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from prompts import make_prompts
from transformers import AutoModelForCausalLM, PreTrainedModel

from aoffpolicy.rollout.torch_engine import TorchEngine
from aoffpolicy.samples import Prompt
from aoffpolicy.transport.messages import Sampling


@dataclass(frozen=True)
class Job:
    prompts: tuple[Prompt, ...]
    group_size: int
    max_tokens: int

    @property
    def sequences(self) -> int:
        return len(self.prompts) * self.group_size

    @property
    def tokens(self) -> int:
        return self.sequences * self.max_tokens


def build_engine(path: Path, job: Job) -> TorchEngine:
    return TorchEngine(
        path,
        slots=job.sequences,
        group_size=job.group_size,
        prompt_length=max(len(prompt.token_ids_P) for prompt in job.prompts),
        completion_length=job.max_tokens,
        ignore_eos=True,
    )


def run_engine(engine: TorchEngine, job: Job, temperature: float) -> np.ndarray:
    """Serve the job. Returns the completions, [sequences, max_tokens]."""
    sampling = Sampling(n=job.group_size, max_tokens=job.max_tokens, temperature=temperature, seed=0)

    async def serve() -> list[np.ndarray]:
        groups = await asyncio.gather(*[engine.generate(prompt, sampling) for prompt in job.prompts])
        return [sample.token_ids_T[sample.loss_mask_T] for group in groups for sample in group.samples]

    return np.stack(asyncio.run(serve()))


def run_generate(model: PreTrainedModel, job: Job, temperature: float) -> np.ndarray:
    """Serve the job with one call of `generate`, padded on the left. Returns the completions."""
    longest = max(len(prompt.token_ids_P) for prompt in job.prompts)
    ids = torch.zeros(job.sequences, longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row in range(job.sequences):
        prompt = torch.from_numpy(job.prompts[row // job.group_size].token_ids_P)
        ids[row, longest - len(prompt) :] = prompt
        mask[row, longest - len(prompt) :] = 1
    choice = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    output = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=job.max_tokens,
        pad_token_id=0,
        **choice,
    )
    return output[:, longest:].numpy()


@torch.inference_mode()
def matmul_seconds(model: PreTrainedModel, job: Job) -> float:
    """Seconds of the linear layers alone: the prompts' tokens once, then one token of every sequence a step."""
    output_layer = model.get_output_embeddings()
    layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not output_layer]
    prompt_tokens = sum(len(prompt.token_ids_P) for prompt in job.prompts)
    inputs = {
        (rows, width): torch.randn(rows, width)
        for rows in (prompt_tokens, len(job.prompts), job.sequences)
        for width in {layer.in_features for layer in [*layers, output_layer]}
    }
    started = time.perf_counter()
    for layer in layers:
        layer(inputs[prompt_tokens, layer.in_features])
    output_layer(inputs[len(job.prompts), output_layer.in_features])
    prefill_s = time.perf_counter() - started
    steps = []
    for _ in range(5):
        started = time.perf_counter()
        for layer in [*layers, output_layer]:
            layer(inputs[job.sequences, layer.in_features])
        steps.append(time.perf_counter() - started)
    return prefill_s + (job.max_tokens - 1) * statistics.median(steps)


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", type=Path, help="Hugging Face model folder")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3, help="pairs of runs; the medians are reported")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures as one flat object")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    job = Job(make_prompts(arguments.model, arguments.prompts), arguments.group_size, arguments.max_tokens)
    engine = build_engine(arguments.model, job)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    agree = float((run_engine(engine, job, 0.0) == run_generate(model, job, 0.0)).mean())

    engine_s, generate_s, limit_s = [], [], []
    for _ in range(arguments.repeats):
        engine_s.append(seconds(lambda: run_engine(engine, job, 1.0)))
        limit_s.append(matmul_seconds(model, job))
        generate_s.append(seconds(lambda: run_generate(model, job, 1.0)))
    engine.close()

    figures = {
        "tokens": job.tokens,
        "greedy_tokens_equal": agree,
        "engine_tokens_per_s": job.tokens / statistics.median(engine_s),
        "generate_tokens_per_s": job.tokens / statistics.median(generate_s),
        "matmul_limit_tokens_per_s": job.tokens / statistics.median(limit_s),
        "engine_over_generate": statistics.median(g / e for g, e in zip(generate_s, engine_s, strict=True)),
        "engine_share_of_matmul_limit": statistics.median(m / e for m, e in zip(limit_s, engine_s, strict=True)),
    }
    for name, value in figures.items():
        print(f"{name} {value:.4g}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
