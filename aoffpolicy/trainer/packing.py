"""Packed rows in which a group's prompt is computed once: [prompt | completion 1 | ... | completion G].

Attention is a dense boolean mask, which suits short rows: memory grows with the square of a row's length, so a row
holds one group (or as much of it as the token budget allows) and a micro-batch stacks rows of similar length.

Shape letters: R rows of a micro-batch, T tokens of a row, N trained tokens of a micro-batch, a row or a group.
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
    sample_N: np.ndarray
    """Number of the sample within the row, from 0."""
    version_N: np.ndarray
    """Policy version that sampled the token."""
    samples: int

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
    sequence_N: torch.Tensor
    """int64, the sequence that the token belongs to; each lies whole in one micro-batch."""
    version_N: torch.Tensor
    """int64, policy version that sampled the token."""
    sequences: int
    tokens: int
    """Without padding."""


def pack_group(group: SampleGroup, advantage_N: np.ndarray, token_budget: int) -> Iterator[Row]:
    """Rows of one group; its samples are split over several rows, each with the prompt, where one is too long.

    Args:
        group: Scored samples.
        advantage_N: float32, of each trained token, those of the first sample first.
        token_budget: Tokens of a row, unless one sample alone has more.

    Raises:
        DataError: A sample cannot be trained; names prompt and sample.
    """
    prompt_P = group.prompt.token_ids_P
    members: list[tuple[Sample, np.ndarray]] = []
    tokens = len(prompt_P)
    trained = group_trained_tokens(group)
    if len(advantage_N) != trained:
        raise DataError(f"prompt {group.prompt.uid}: {len(advantage_N)} advantages for {trained} trained tokens")
    ends = np.cumsum([sample.completion_tokens for sample in group.samples])
    parts = np.split(advantage_N, ends[:-1])
    for index, (sample, advantage) in enumerate(zip(group.samples, parts, strict=True)):
        _check(group, index, sample)
        own = len(sample.token_ids_T) - len(prompt_P)
        if members and tokens + own > token_budget:
            yield _row(prompt_P, members)
            members, tokens = [], len(prompt_P)
        members.append((sample, advantage))
        tokens += own
    if members:
        yield _row(prompt_P, members)


def group_trained_tokens(group: SampleGroup) -> int:
    return sum(sample.completion_tokens for sample in group.samples)


def _check(group: SampleGroup, index: int, sample: Sample) -> None:
    where = f"prompt {group.prompt.uid}, sample {index}"
    prompt_P = group.prompt.token_ids_P
    lengths = {len(sample.token_ids_T), len(sample.loss_mask_T), len(sample.behaviour_logprobs_T)}
    lengths.add(len(sample.versions_T))
    if len(lengths) != 1:
        raise DataError(
            f"{where}: token_ids_T, loss_mask_T, behaviour_logprobs_T and versions_T differ in length: {lengths}"
        )
    if not np.array_equal(sample.token_ids_T[: len(prompt_P)], prompt_P):
        raise DataError(f"{where}: the sample does not begin with its prompt's tokens")
    if sample.loss_mask_T[: max(1, len(prompt_P))].any():
        raise DataError(f"{where}: a token of the prompt is marked as trained")
    if not np.isfinite(sample.behaviour_logprobs_T[sample.loss_mask_T]).all():
        raise DataError(f"{where}: a behaviour log-probability is missing or not finite")


def _row(prompt_P: np.ndarray, members: Sequence[tuple[Sample, np.ndarray]]) -> Row:
    P = len(prompt_P)
    tokens, positions, segments = [prompt_P], [np.arange(P)], [np.full(P, PROMPT)]
    sources, targets, behaviour, advantages, numbers, versions = [], [], [], [], [], []
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
        advantages.append(advantage)
        numbers.append(np.full(len(trained), number - 1))
        versions.append(sample.versions_T[P + trained])
        start += len(own)
    return Row(
        np.concatenate(tokens),
        np.concatenate(positions),
        np.concatenate(segments),
        np.concatenate(sources),
        np.concatenate(targets),
        np.concatenate(behaviour),
        np.concatenate(advantages),
        np.concatenate(numbers),
        np.concatenate(versions),
        len(members),
    )


def stack(rows: Sequence[Row], token_budget: int, device: torch.device) -> list[MicroBatch]:
    """Micro-batches of rows of similar length; rows times the longest row stays within the budget."""
    batches: list[list[Row]] = []
    for row in (rows[index] for index in _by_length(rows)):
        if batches and (len(batches[-1]) + 1) * len(row) <= token_budget:
            batches[-1].append(row)
        else:
            batches.append([row])
    return [_micro_batch(batch, device) for batch in batches]


def unstack(values_N: np.ndarray, rows: Sequence[Row]) -> np.ndarray:
    """Values of the trained tokens of all micro-batches, one after another, put back into the order of the rows."""
    order = _by_length(rows)
    pieces = np.split(values_N, np.cumsum([len(rows[index].target_N) for index in order])[:-1])
    by_row = dict(zip(order, pieces, strict=True)) if order else {}
    return np.concatenate([values_N[:0], *(by_row[index] for index in range(len(rows)))])


def _by_length(rows: Sequence[Row]) -> list[int]:
    return sorted(range(len(rows)), key=lambda index: len(rows[index]))


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

    first_of_row = np.cumsum([0, *(row.samples for row in rows)])

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
        sequence_N=tensor([row.sample_N + first for row, first in zip(rows, first_of_row, strict=False)], torch.int64),
        version_N=tensor([row.version_N for row in rows], torch.int64),
        sequences=int(first_of_row[-1]),
        tokens=sum(map(len, rows)),
    )


def empty(device: torch.device) -> MicroBatch:
    """A micro-batch that trains nothing, for a rank that has less to do than the others."""
    nothing = np.zeros(0, dtype=np.int64)
    row = Row(np.zeros(1), np.zeros(1), np.zeros(1), nothing, nothing, nothing, nothing, nothing, nothing, samples=0)
    return replace(_micro_batch([row], device), tokens=0)
