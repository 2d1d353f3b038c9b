"""Sampling tokens by inverse CDF, from one counter-based uniform number for each token.

A token depends on the run's seed, the prompt, the completion and the position only, so the same request gives the same
completion whatever else is in the batch (up to the rounding of the logits themselves).

Shape letters: N rows of logits, B sequences, V vocabulary, K blocks of the vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

BLOCK = 64
"""Vocabulary entries of a block. Two sums over few entries each are exact enough in float32; one over V is not."""


def uniforms(seed: int, uid: int, completion: int, count: int) -> np.ndarray:
    """The uniform numbers of one completion; those of a longer completion begin with those of a shorter one.

    Args:
        seed: Of the run.
        uid: Of the prompt.
        completion: Index within the group.
        count: Tokens of the completion at most.

    Returns:
        float64 [count] in [0, 1).
    """
    stream = np.random.Philox(
        key=np.array([seed, uid], dtype=np.uint64), counter=np.array([0, 0, 0, completion], dtype=np.uint64)
    )
    return np.random.Generator(stream).random(count)


def sample(
    logits_NV: torch.Tensor, temperature_N: np.ndarray, row_B: np.ndarray, uniform_B: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Draw one token for each sequence; several sequences may draw from the same row of logits.

    Args:
        logits_NV: Any floating-point dtype and device.
        temperature_N: 0 takes the most likely token, and its log-probability at temperature 1.
        row_B: Row of logits of each sequence.
        uniform_B: In [0, 1).

    Returns:
        The tokens, int64 [B], and their natural log-probabilities, float32 [B], on the host.
    """
    device = logits_NV.device
    greedy_N = temperature_N == 0
    scale_N = np.where(greedy_N, 1.0, temperature_N).astype(np.float32)
    logits_NV = logits_NV.float()
    if (scale_N != 1.0).any():
        logits_NV = logits_NV / torch.from_numpy(scale_N).to(device)[:, None]
    probabilities_NV = torch.softmax(logits_NV, -1)
    rows_B = torch.from_numpy(row_B).to(device)
    if greedy_N.all():
        tokens_B = logits_NV.argmax(-1)[rows_B]
    else:
        uniforms_B = torch.from_numpy(uniform_B.astype(np.float32)).to(device)
        tokens_B = inverse_cdf(probabilities_NV, rows_B, uniforms_B)
        if greedy_N.any():
            tokens_B = torch.where(
                torch.from_numpy(greedy_N).to(device)[rows_B], logits_NV.argmax(-1)[rows_B], tokens_B
            )
    logprobs_B = probabilities_NV[rows_B, tokens_B].log()
    return tokens_B.cpu().numpy(), logprobs_B.cpu().numpy()


def inverse_cdf(probabilities_NV: torch.Tensor, rows_B: torch.Tensor, uniforms_B: torch.Tensor) -> torch.Tensor:
    """The first token whose cumulative probability exceeds the uniform number: first its block, then it.

    Returns:
        int64 [B].
    """
    if remainder := probabilities_NV.shape[1] % BLOCK:
        probabilities_NV = F.pad(probabilities_NV, (0, BLOCK - remainder))
    blocks_NKb = probabilities_NV.view(len(probabilities_NV), -1, BLOCK)
    mass_BK = blocks_NKb.sum(-1)[rows_B].cumsum(-1)
    target_B1 = uniforms_B[:, None] * mass_BK[:, -1:]
    block_B1 = _first_above(mass_BK, target_B1)
    target_B1 = target_B1 - F.pad(mass_BK, (1, 0)).gather(1, block_B1)
    mass_Bb = blocks_NKb[rows_B, block_B1[:, 0]].cumsum(-1)
    return (block_B1 * BLOCK + _first_above(mass_Bb, target_B1))[:, 0]


def _first_above(mass: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Index [B, 1] of the first cumulative mass above the target.

    Where rounding has put the target at or above the total, the index of the last entry that has any mass: an entry of
    probability 0 is never drawn.
    """
    return ((mass <= target) & (mass < mass[:, -1:])).sum(-1, keepdim=True)
