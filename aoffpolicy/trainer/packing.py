"""Packed rows in which a group's prompt is computed once: [prompt | completion 1 | ... | completion G].

Attention is a dense boolean mask, which suits short rows: memory grows with the square of a row's length, so a row
holds one group (or as much of it as the token budget allows) and a micro-batch stacks rows of similar length.

Shape letters: R rows of a micro-batch, T tokens of a row, N trained tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from aoffpolicy.errors import DataError
from aoffpolicy.samples import Sample, SampleGroup

PROMPT, PADDING = 0, -1


@dataclass(frozen=True, slots=True)
class Row:
    """One packed row; the trained tokens are listed by where they are predicted from."""

    token_ids_T: np.ndarray
    position_ids_T: np.ndarray
    """Restart at the prompt's length for every completion."""
    segment_T: np.ndarray
    """0 in the shared prompt, 1, 2, ... in the completions."""
    source_N: np.ndarray
    """Index in the row of the token whose hidden state predicts the trained token."""
    target_N: np.ndarray
    behaviour_N: np.ndarray
    advantage_N: np.ndarray

    def __len__(self) -> int:
        return len(self.token_ids_T)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows padded to the longest one, as tensors on the trainer's device."""

    token_ids_RT: torch.Tensor
    position_ids_RT: torch.Tensor
    mask_R1TT: torch.Tensor
    """True where a token may attend."""
    source_N: torch.Tensor
    """Flat indices into R * T."""
    target_N: torch.Tensor
    behaviour_N: torch.Tensor
    advantage_N: torch.Tensor
    tokens: int
    """Without padding."""


def pack_group(group: SampleGroup, advantages_G: np.ndarray, token_budget: int) -> Iterator[Row]:
    """Rows of one group; its samples are split over several rows, each with the prompt, where one is too long."""
    prompt_P = group.prompt.token_ids_P
    members: list[tuple[Sample, float]] = []
    tokens = len(prompt_P)
    for index, (sample, advantage) in enumerate(zip(group.samples, advantages_G, strict=True)):
        _check(group, index, sample)
        own = len(sample.token_ids_T) - len(prompt_P)
        if members and tokens + own > token_budget:
            yield _row(prompt_P, members)
            members, tokens = [], len(prompt_P)
        members.append((sample, float(advantage)))
        tokens += own
    if members:
        yield _row(prompt_P, members)


def _check(group: SampleGroup, index: int, sample: Sample) -> None:
    where = f"prompt {group.prompt.uid}, sample {index}"
    prompt_P = group.prompt.token_ids_P
    lengths = {len(sample.token_ids_T), len(sample.loss_mask_T), len(sample.behaviour_logprobs_T)}
    if len(lengths) != 1:
        raise DataError(f"{where}: token_ids_T, loss_mask_T and behaviour_logprobs_T differ in length: {lengths}")
    if not np.array_equal(sample.token_ids_T[: len(prompt_P)], prompt_P):
        raise DataError(f"{where}: the sample does not begin with its prompt's tokens")
    if sample.loss_mask_T[: max(1, len(prompt_P))].any():
        raise DataError(f"{where}: a token of the prompt is marked as trained")
    if not np.isfinite(sample.behaviour_logprobs_T[sample.loss_mask_T]).all():
        raise DataError(f"{where}: a behaviour log-probability is missing or not finite")


def _row(prompt_P: np.ndarray, members: Sequence[tuple[Sample, float]]) -> Row:
    P = len(prompt_P)
    tokens, positions, segments = [prompt_P], [np.arange(P)], [np.full(P, PROMPT)]
    sources, targets, behaviour, advantages = [], [], [], []
    start = P
    for number, (sample, advantage) in enumerate(members, start=1):
        own = sample.token_ids_T[P:]
        trained = np.flatnonzero(sample.loss_mask_T) - P
        tokens.append(own)
        positions.append(np.arange(P, P + len(own)))
        segments.append(np.full(len(own), number))
        sources.append(np.where(trained == 0, P - 1, start + trained - 1))
        targets.append(own[trained])
        behaviour.append(sample.behaviour_logprobs_T[P + trained])
        advantages.append(np.full(len(trained), advantage, dtype=np.float32))
        start += len(own)
    return Row(
        np.concatenate(tokens),
        np.concatenate(positions),
        np.concatenate(segments),
        np.concatenate(sources),
        np.concatenate(targets),
        np.concatenate(behaviour),
        np.concatenate(advantages),
    )


def stack(rows: Sequence[Row], token_budget: int, device: torch.device) -> list[MicroBatch]:
    """Micro-batches of rows of similar length; rows times the longest row stays within the budget."""
    batches: list[list[Row]] = []
    for row in sorted(rows, key=len):
        if batches and (len(batches[-1]) + 1) * len(row) <= token_budget:
            batches[-1].append(row)
        else:
            batches.append([row])
    return [_micro_batch(batch, device) for batch in batches]


def _micro_batch(rows: Sequence[Row], device: torch.device) -> MicroBatch:
    R, T = len(rows), max(map(len, rows))
    token_ids_RT = np.zeros((R, T), dtype=np.int64)
    position_ids_RT = np.zeros((R, T), dtype=np.int64)
    segment_RT = np.full((R, T), PADDING)
    for r, row in enumerate(rows):
        token_ids_RT[r, : len(row)] = row.token_ids_T
        position_ids_RT[r, : len(row)] = row.position_ids_T
        segment_RT[r, : len(row)] = row.segment_T
    queries, keys = segment_RT[:, :, None], segment_RT[:, None, :]
    # A padding token sees the prompt's padding-free past: harmless, and softmax over nothing would be NaN.
    mask_RTT = ((queries == keys) | (keys == PROMPT)) & np.tri(T, dtype=bool)

    def tensor(arrays: Sequence[np.ndarray], dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(np.concatenate(arrays), dtype=dtype, device=device)

    return MicroBatch(
        token_ids_RT=torch.as_tensor(token_ids_RT, device=device),
        position_ids_RT=torch.as_tensor(position_ids_RT, device=device),
        mask_R1TT=torch.as_tensor(mask_RTT[:, None], device=device),
        source_N=tensor([row.source_N + r * T for r, row in enumerate(rows)], torch.int64),
        target_N=tensor([row.target_N for row in rows], torch.int64),
        behaviour_N=tensor([row.behaviour_N for row in rows], torch.float32),
        advantage_N=tensor([row.advantage_N for row in rows], torch.float32),
        tokens=sum(map(len, rows)),
    )


def empty(device: torch.device) -> MicroBatch:
    """A micro-batch that trains nothing, for a rank that has less to do than the others."""
    nothing = np.zeros(0, dtype=np.int64)
    row = Row(np.zeros(1), np.zeros(1), np.zeros(1), nothing, nothing, nothing, nothing)
    return replace(_micro_batch([row], device), tokens=0)
