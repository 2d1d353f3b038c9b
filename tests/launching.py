"""Whole runs of `python -m aoffpolicy.launch` on a tiny model, for tests."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from tests.tiny import tiny_llama

ROOT = Path(__file__).parent.parent
RUN_TIMEOUT_S = 240


@dataclass(frozen=True)
class TinyRun:
    """A config on disk and the folder that its run will have."""

    config: Path
    folder: Path

    def command(self, *overrides: str) -> list[str]:
        return [sys.executable, "-m", "aoffpolicy.launch", str(self.config), *overrides]

    def run(self, *overrides: str) -> subprocess.CompletedProcess[str]:
        """Run to the end; the caller looks at the exit code."""
        return subprocess.run(self.command(*overrides), cwd=ROOT, capture_output=True, text=True, timeout=RUN_TIMEOUT_S)

    def start(self, *overrides: str) -> subprocess.Popen[str]:
        """Start in a process group of its own, as a shell does, and return at once."""
        return subprocess.Popen(
            self.command(*overrides),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def metrics(self) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for_rows(self, count: int, process: subprocess.Popen[str]) -> None:
        """Wait until the run has written `count` rows of metrics."""
        deadline = time.monotonic() + RUN_TIMEOUT_S
        while len(self.metrics()) < count:
            assert process.poll() is None, f"the run ended early: {process.communicate()}"
            assert time.monotonic() < deadline, f"no row {count} after {RUN_TIMEOUT_S} s"
            time.sleep(0.05)


def tiny_run(tmp_path: Path, **sections: dict[str, Any]) -> TinyRun:
    """Write a model, data and config; keyword arguments override config sections."""
    model = tiny_llama(tmp_path / "model")
    rows = [{"prompt": f"{a} + {b} =", "answer": str(a + b)} for a in range(8) for b in range(8)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree: dict[str, dict[str, Any]] = {
        "run": {"name": "tiny", "dir": str(tmp_path / "runs"), "steps": 4},
        "model": {"path": str(model)},
        "data": {"source": str(tmp_path / "sums.jsonl"), "prompts_per_step": 4, "group_size": 4},
        "reward": {"function": "tests.tiny_rewards:digit_fraction"},
        "rollout": {"max_tokens": 8, "device": "cpu"},
        "trainer": {"lr": 1e-3, "token_budget": 128, "device": "cpu"},
    }
    for section, values in sections.items():
        tree.setdefault(section, {}).update(values)
    config = tmp_path / "tiny.toml"
    config.write_text(tomli_w.dumps(tree))
    return TinyRun(config, Path(tree["run"]["dir"]) / tree["run"]["name"])


def children_of(pid: int) -> dict[str, int]:
    """Pids of the launcher's children by "<role>" and "<role>-<n>", from their command lines."""
    found: dict[str, int] = {}
    listing = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    for child in map(int, listing):
        command = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        if match := re.search(r"aoffpolicy\.(\w+)\.worker", command):
            role = match[1]
            found[role if role not in found else f"{role}-{len(found)}"] = child
    return found


def descendants(pid: int) -> list[int]:
    """Pids of everything that `pid` started, directly or not, and that still hangs on it."""
    children = [
        int(child) for listing in Path(f"/proc/{pid}/task").glob("*/children") for child in listing.read_text().split()
    ]
    return [*children, *(below for child in children for below in descendants(child))]


def assert_gone(pids: Sequence[int], within_s: float) -> None:
    """Fail unless every process has ended in time; kills what is left, by pid."""
    deadline = time.monotonic() + within_s
    while alive := [pid for pid in pids if _alive(pid)]:
        if time.monotonic() > deadline:
            for pid in alive:
                os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"still alive after {within_s} s: {alive}")
        time.sleep(0.05)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
