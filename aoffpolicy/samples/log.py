"""`samples.jsonl` in the run folder: what was asked, answered and rewarded; rotated by size, so it stays bounded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from aoffpolicy.errors import DataError
from aoffpolicy.samples import Sample, SampleGroup

NAME = "samples.jsonl"


class CompletionRecord(msgspec.Struct, frozen=True):
    """One completion of a group."""

    text: str
    reward: float
    advantage: float | None
    """Mean over its tokens; None where nothing was trained: evaluations, completions without tokens."""
    tokens: int
    """Produced by the policy."""
    finish_reason: str
    """"stop" or "length"."""
    versions: tuple[int, int]
    """Oldest and newest policy version that produced a token; (-1, -1) without tokens."""


class GroupRecord(msgspec.Struct, frozen=True):
    """One line of samples.jsonl."""

    step: int
    """Training step; for evaluations the step that made the version (-1: the initial weights)."""
    purpose: Literal["train", "eval"]
    version: int
    """Policy version that was trained or evaluated."""
    uid: int
    """Of the prompt."""
    prompt: str
    """As the data have it: text, or the contents of chat messages, each after its role."""
    answer: str
    """Of the data; empty where they have none."""
    completions: tuple[CompletionRecord, ...]
    rollout: int = -1
    """Rank of the rollout worker; -1 where unknown."""
    generate_s: float = 0.0
    """Seconds in the rollout worker; 0 where unknown."""
    score_s: float = 0.0
    """Seconds from generated to scored; 0 where unknown."""

    @property
    def reward_mean(self) -> float:
        return sum(c.reward for c in self.completions) / max(len(self.completions), 1)


def record_of(
    group: SampleGroup, step: int, purpose: Literal["train", "eval"], version: int, advantages_N: np.ndarray | None
) -> GroupRecord:
    """What is kept of a group.

    Args:
        group: Scored.
        step: It was generated for.
        purpose: "train" or "eval".
        version: Policy version that was trained or evaluated.
        advantages_N: float32, one for each trained token, those of the first sample first; None where there are none.
    """
    if advantages_N is None:
        of_sample = [np.empty(0)] * len(group.samples)
    else:
        of_sample = np.split(advantages_N, np.cumsum([s.completion_tokens for s in group.samples[:-1]]))
    return GroupRecord(
        step=step,
        purpose=purpose,
        version=version,
        uid=group.prompt.uid,
        prompt=_text(group.prompt.row.get("prompt", "")),
        answer=str(group.prompt.row.get("answer", "")),
        completions=tuple(_completion(s, a) for s, a in zip(group.samples, of_sample, strict=True)),
        rollout=int(group.metadata.get("rollout", -1)),
        generate_s=float(group.metadata.get("generate_s", 0.0)),
        score_s=float(group.metadata.get("score_s", 0.0)),
    )


def _completion(sample: Sample, advantages_N: np.ndarray) -> CompletionRecord:
    versions_N = sample.versions_T[sample.loss_mask_T]
    return CompletionRecord(
        text=sample.text,
        reward=sample.reward,
        advantage=float(advantages_N.mean()) if len(advantages_N) else None,
        tokens=len(versions_N),
        finish_reason=sample.finish_reason,
        versions=(int(versions_N.min()), int(versions_N.max())) if len(versions_N) else (-1, -1),
    )


def _text(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message.get('role', '')}: {message.get('content', '')}" for message in prompt)


class SampleLog:
    """Appends records to `samples.jsonl`; when that is full it becomes `samples.1.jsonl`, that one 2, and so on.

    Invariant: all files together hold at most `files` x `max_bytes`, plus what one record is longer than `max_bytes`.

    Args:
        folder: The run's folder.
        max_bytes: Size of one file.
        files: Files kept, the one that is written included.
    """

    def __init__(self, folder: Path, *, max_bytes: int, files: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._files = files

    def append(self, record: GroupRecord) -> None:
        """Write one line; blocks for as long as the disk takes."""
        line = msgspec.json.encode(record) + b"\n"
        path = file_path(self._folder, 0)
        size = path.stat().st_size if path.exists() else 0
        if size and size + len(line) > self._max_bytes:
            self._rotate()
        with path.open("ab") as file:
            file.write(line)

    def keep_before(self, step: int) -> None:
        """Drop the groups of steps that a resumed run will do again, and a last line that a kill cut short."""
        for path in files_of(self._folder):
            rewritten = path.with_suffix(".tmp")
            with rewritten.open("wb") as file:
                for record in read_file(path):
                    if record.step < step:
                        file.write(msgspec.json.encode(record) + b"\n")
            rewritten.replace(path)

    def _rotate(self) -> None:
        file_path(self._folder, self._files - 1).unlink(missing_ok=True)
        for index in reversed(range(self._files - 1)):
            path = file_path(self._folder, index)
            if path.exists():
                path.replace(file_path(self._folder, index + 1))


def file_path(folder: Path, index: int) -> Path:
    """The file that is written has index 0; a higher one is older."""
    return folder / (f"samples.{index}.jsonl" if index else NAME)


def files_of(folder: Path) -> list[Path]:
    """All sample files of a run, the oldest first."""
    older = {int(p.suffixes[0][1:]): p for p in folder.glob("samples.*.jsonl") if p.suffixes[0][1:].isdecimal()}
    newest = file_path(folder, 0)
    return [older[index] for index in sorted(older, reverse=True)] + ([newest] if newest.exists() else [])


def read_file(path: Path) -> Iterator[GroupRecord]:
    """The records of one file; a last line that is still being written is left out.

    Raises:
        DataError: A line is no record; names file and row.
    """
    with path.open("rb") as file:
        for row, line in enumerate(file, 1):
            if line.endswith(b"\n"):
                yield decode(line, f"{path}, row {row}")


def decode(line: bytes, where: str) -> GroupRecord:
    """A record from its line.

    Raises:
        DataError: It is none; the message begins with `where`.
    """
    try:
        return msgspec.json.decode(line, type=GroupRecord)
    except msgspec.MsgspecError as error:
        raise DataError(f"{where}: no record of samples: {error}") from error
