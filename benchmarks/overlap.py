"""What one-step-off-policy saves on this machine: whole runs of the quickstart with max_staleness 1 and 0.

Prints one line a figure, all from one invocation:
  overlap_efficiency      max(generate, train) / wall of a step, max_staleness 1, median over the steady steps
  step_vs_phase_limit     step with staleness 1 / the larger of generate and train measured with staleness 0 (limit 1.0)
  speedup_1_over_0        step with staleness 0 / step with staleness 1, each role on its own core
  speedup_1_over_0_both   the same against staleness 0 with all cores given to each phase in turn (the honest rival)
The learning rate is 0, so that every run generates completions of the same length distribution.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


def run(config: Path, name: str, folder: Path, overrides: Sequence[str]) -> list[Row]:
    """Run the launcher and return the rows of metrics.jsonl."""
    command = [sys.executable, "-m", "aoffpolicy.launch", str(config), "--run.dir", str(folder), "--run.name", name]
    subprocess.run([*command, "--trainer.lr", "0", *overrides], check=True, stdout=sys.stderr, timeout=3600)
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def steady(rows: Sequence[Row]) -> Sequence[Row]:
    """Without the first fill and the last drain."""
    return rows[1:-1]


def median(rows: Sequence[Row], key: str) -> float:
    return statistics.median(row[key] for row in steady(rows))


def measure(config: Path, steps: int, overrides: Sequence[str], folder: Path) -> dict[str, float]:
    common = ["--run.steps", str(steps), *overrides]
    ahead = run(config, "staleness-1", folder, [*common, "--run.max_staleness", "1"])
    sequential = run(config, "staleness-0", folder, [*common, "--run.max_staleness", "0"])
    everything = ["--trainer.threads", "1000", "--rollout.threads", "1000"]  # as many as there are
    both = run(config, "staleness-0-both", folder, [*common, "--run.max_staleness", "0", *everything])
    limit = max(median(sequential, "time_generate"), median(sequential, "time_train"))
    step = median(ahead, "time_step")
    return {
        "overlap_efficiency": median(ahead, "overlap_efficiency"),
        "step_vs_phase_limit": step / limit,
        "speedup_1_over_0": median(sequential, "time_step") / step,
        "speedup_1_over_0_both": median(both, "time_step") / step,
        "step_s": step,
        "generate_s_staleness_0": median(sequential, "time_generate"),
        "train_s_staleness_0": median(sequential, "time_train"),
        "step_s_staleness_0": median(sequential, "time_step"),
        "step_s_staleness_0_both": median(both, "time_step"),
        "logprob_abs_diff_max": max(row["logprob_abs_diff"] for row in (*ahead, *sequential, *both)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", type=Path, default=Path("examples/quickstart.toml"))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", type=Path, help="write the figures as one flat object")
    arguments, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(arguments.config, arguments.steps, overrides, Path(folder))
    for name, value in figures.items():
        print(f"{name:<24} {value:.4g}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
