"""Made-up sample groups."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from aoffpolicy.samples import Prompt, Sample, SampleGroup


def sample(
    prompt_P: np.ndarray, completion: np.ndarray, *, mask: np.ndarray | None = None, reward: float = 0.0
) -> Sample:
    """A sample with behaviour log-probabilities of about -4.5 on its trained tokens."""
    P, T = len(prompt_P), len(prompt_P) + len(completion)
    loss_mask_T = np.zeros(T, dtype=bool)
    loss_mask_T[P:] = True if mask is None else mask
    noise_T = np.random.default_rng(T).normal(-4.5, 0.2, T)
    return Sample(
        token_ids_T=np.concatenate([prompt_P, completion]).astype(np.int32),
        loss_mask_T=loss_mask_T,
        behaviour_logprobs_T=np.where(loss_mask_T, noise_T, 0).astype(np.float32),
        versions_T=np.where(loss_mask_T, 0, -1).astype(np.int32),
        text="",
        finish_reason="stop",
        reward=reward,
    )


def group(
    uid: int, *, prompt_tokens: int = 7, lengths: Sequence[int] = (3, 5, 1, 4), vocabulary: int = 90
) -> SampleGroup:
    """Random tokens; every length is one completion's."""
    rng = np.random.default_rng(uid)
    prompt_P = rng.integers(3, vocabulary, prompt_tokens).astype(np.int32)
    samples = tuple(
        sample(prompt_P, rng.integers(3, vocabulary, length), reward=float(rng.random())) for length in lengths
    )
    return SampleGroup(Prompt(uid, prompt_P), samples)


def batch(groups: int = 5) -> tuple[SampleGroup, ...]:
    """Groups of different prompts and completions, one with an empty completion."""
    return tuple(
        group(uid, prompt_tokens=3 + uid, lengths=(2 + uid, 6, 0 if uid == 1 else 1, 3)) for uid in range(groups)
    )
