"""From vLLM's completions to samples, every token with the version of the weights that it came from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from aoffpolicy.samples import FinishReason, Sample


class Stamps:
    """Versions of a completion's tokens as they arrive here, for a vLLM that does not report them."""

    def __init__(self, version: int) -> None:
        self._starts = [(version, 0)]
        self._count = 0

    def mark(self, count: int, version: int) -> None:
        """So many tokens are there now; those that are new came under this version."""
        if version != self._starts[-1][0] and count > self._count:
            self._starts.append((version, self._count))
        self._count = count

    def versions(self, completion: Any) -> Iterator[tuple[int, int]]:
        """(version, tokens) one after another, as vLLM reports them or as they were stamped."""
        spans = getattr(completion, "weight_versions", None)
        if spans:
            yield from ((int(span.version), span.end - span.start) for span in spans)
            return
        ends = [start for _, start in self._starts[1:]] + [len(completion.token_ids)]
        for (version, start), end in zip(self._starts, ends, strict=True):
            yield version, end - start


def sample_of(prompt_ids: list[int], completion: Any, versions: Iterator[tuple[int, int]]) -> Sample:
    """One of vLLM's completions as a sample.

    Args:
        prompt_ids: Tokens of the prompt.
        completion: vLLM's `CompletionOutput`, finished, with the log-probability of each token sampled.
        versions: (version, tokens) one after another.
    """
    tokens = list(completion.token_ids)
    prompt, total = len(prompt_ids), len(prompt_ids) + len(tokens)
    mask_T = np.zeros(total, dtype=bool)
    mask_T[prompt:] = True
    logprobs_T = np.zeros(total, dtype=np.float32)
    logprobs_T[prompt:] = [chosen[token].logprob for token, chosen in zip(tokens, completion.logprobs, strict=True)]
    versions_T = np.full(total, -1, dtype=np.int32)
    versions_T[prompt:] = [version for version, count in versions for _ in range(count)]
    reason: FinishReason = "stop" if completion.finish_reason == "stop" else "length"
    return Sample(
        token_ids_T=np.array(prompt_ids + tokens, dtype=np.int32),
        loss_mask_T=mask_T,
        behaviour_logprobs_T=logprobs_T,
        versions_T=versions_T,
        text=completion.text,
        finish_reason=reason,
    )
