"""What flows through the pipeline: Prompt -> Sample -> SampleGroup -> Batch. numpy only, no torch.

Shape letters: P tokens of a prompt, T tokens of a sample (its prompt included), G samples of a group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """One row of the data, ready to generate from."""

    uid: int
    """Position in the run's dispatch order: 0, 1, 2, ... over all epochs. Seeds are derived from it."""
    token_ids_P: np.ndarray
    """int32 [P], the chat template applied."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """The data row that rewards see (plain values only: it travels over the wire)."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One sequence with everything that training needs. Multi-turn samples fit: the mask says what is trained."""

    token_ids_T: np.ndarray
    """int32 [T], the prompt's P tokens first."""
    loss_mask_T: np.ndarray
    """bool [T], True where the policy produced the token."""
    behaviour_logprobs_T: np.ndarray
    """float32 [T], natural log, of the policy and temperature that sampled the token; 0 outside the mask."""
    versions_T: np.ndarray
    """int32 [T], policy version that produced the token; -1 outside the mask."""
    text: str
    """The completion, decoded without special tokens; rewards see this."""
    finish_reason: FinishReason
    reward: float = 0.0
    """Filled in by the reward; always finite once a group is scored."""
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def completion_tokens(self) -> int:
        return int(self.loss_mask_T.sum())


@dataclass(frozen=True, slots=True, eq=False)
class SampleGroup:
    """All samples of one prompt; the unit that is dispatched, trained or dropped, never split."""

    prompt: Prompt
    samples: tuple[Sample, ...]
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def oldest_version(self) -> int:
        """The lowest policy version that produced a token of this group."""
        return min(int(s.versions_T[s.loss_mask_T].min()) for s in self.samples if s.loss_mask_T.any())


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The groups of one training step."""

    step: int
    version: int
    """Policy version that this step trains on."""
    groups: tuple[SampleGroup, ...]
