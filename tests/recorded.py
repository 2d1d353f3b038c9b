"""Run folders as a run would leave them, for tests of what reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from aoffpolicy.samples.log import CompletionRecord, GroupRecord, SampleLog
from aoffpolicy.timeline import Span, Timeline, write_timeline
from aoffpolicy.transport.events import AnyEvent


def row(step: int, **changes: Any) -> dict[str, Any]:
    """A step of a trainer-bound run; the times add up as in `StepRecord`."""
    train, generate, send, load = 10.0 + step * 0.1, 6.0, 0.5, 0.25
    wall = train + send
    figures: dict[str, Any] = {
        "step": step,
        "policy_version": step,
        "skipped": False,
        "reward_mean": 0.3 + 0.01 * step,
        "reward_std": 0.4,
        "loss": 0.2 - 0.013 * step,
        "grad_norm": 2.5,
        "staleness_max": min(step, 1),
        "staleness_mean": min(step, 1) * 0.75,
        "time_step": wall,
        "time_generate": generate,
        "time_train": train,
        "time_sync": send,
        "time_load": load,
        "time_checkpoint": 0.0,
        "time_eval": 0.0,
        "time_rollout": generate,
        "time_wait_rollout": 0.0,
        "time_wait_trainer": wall - generate - send - load,
        "overlap_efficiency": train / wall,
        "logprob_abs_diff": 0.01 * (step + 1),
        "truncated_fraction": 0.0,
        "prompt_tokens": 100,
        "completion_tokens": 1000,
    }
    return figures | changes


def spans(steps: int) -> list[Span]:
    """Phases and workers that fit `row`, in the order of their ends."""
    made: list[Span] = []
    now = 100.0
    for step in range(steps):
        train = 10.0 + step * 0.1
        made += [
            Span("generate", f"generate {step + 1}", now, 6.0, step + 1, step),
            Span("rollout 0", f"generate v{step}", now, 6.0),
            Span("train", f"train {step}", now, train, step, step),
            Span("trainer 0", f"train {step}", now, train),
            Span("weights", f"send {step}", now + train, 0.5, step, step + 1),
            Span("weights", f"load {step}", now + train + 0.5, 0.25, step, step + 1),
        ]
        now += train + 0.75
    return sorted(made, key=lambda span: span.end_s)


def group(step: int, seconds: float, text: str = "5", prompt: str = "2 + 3 =") -> GroupRecord:
    completions = (
        CompletionRecord(text, 1.0, 0.5, 3, "stop", (step, step)),
        CompletionRecord("I think that", 0.0, -0.5, 8, "length", (step, step + 1)),
    )
    return GroupRecord(step, "train", step, 100 + step, prompt, "5", completions, 0, seconds, 0.1)


def run_folder(folder: Path, steps: int = 12, *groups: GroupRecord, state: str = "finished") -> Path:
    """Write a folder of so many steps."""
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row(step)) + "\n" for step in range(steps)))
    line = Timeline()
    for span in spans(steps):
        line.add(span)
    write_timeline(folder / "timeline.json", *line.snapshot())
    log = SampleLog(folder, max_bytes=10**7, files=2)
    for each in groups or [group(step, 1.0 + step % 5) for step in range(steps)]:
        log.append(each)
    if state:
        (folder / "summary.json").write_text(json.dumps({"state": state}))
    (folder / "config.toml").write_text('[run]\nname = "x"\n')
    return folder


def recorded_events() -> list[AnyEvent]:
    """What a subscriber got of a real run, `examples/quickstart.toml` with six steps; without workers' heartbeats."""
    lines = (Path(__file__).parent / "data" / "quickstart-events.jsonl").read_text().splitlines()
    return [msgspec.json.decode(line, type=AnyEvent) for line in lines]  # type: ignore[arg-type]
