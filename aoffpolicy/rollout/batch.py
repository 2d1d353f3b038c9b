"""Continuous batching: groups wait, are prefilled together, are decoded together, and leave their slots as they end.

Invariant: `_active[i]` is the sequence in slot i of the model's cache; a group enters whole or waits, in the order it
came; its prompt is computed once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import numpy as np

from aoffpolicy.errors import EngineError
from aoffpolicy.rollout.causal_lm import CausalLM
from aoffpolicy.rollout.sampling import sample, uniforms
from aoffpolicy.samples import FinishReason, Prompt, Sample, SampleGroup
from aoffpolicy.transport.messages import Sampling

PREFILL_TOKENS = 4096
"""Padded prompt tokens of one prefill at most; a longer prompt has its own."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One completion in the making."""

    group: Group
    uniforms: np.ndarray
    """float64 [max_tokens], one for each token."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def append(self, token: int, logprob: float, stop_token_ids: Collection[int]) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if token in stop_token_ids:
            self.finish_reason = "stop"
        elif len(self.tokens) == len(self.uniforms):
            self.finish_reason = "length"


class Group:
    """The completions of one prompt.

    Args:
        prompt: Fits into the context with at least one token.
        sampling: Its `n` completions fit into the slots.
        max_tokens: Of a completion, where the context ends taken into account.
        version: Policy version that generates it.
    """

    def __init__(self, prompt: Prompt, sampling: Sampling, max_tokens: int, version: int) -> None:
        self.prompt = prompt
        self.temperature = sampling.temperature
        self.version = version
        self.sequences = tuple(
            Sequence(self, uniforms(sampling.seed, prompt.uid, index, max_tokens)) for index in range(sampling.n)
        )

    @property
    def finished(self) -> bool:
        return all(sequence.finish_reason for sequence in self.sequences)

    def result(self, decode_text: Callable[[list[int]], str]) -> SampleGroup:
        """The finished group; `decode_text` turns a completion's tokens into its text."""
        return SampleGroup(
            prompt=self.prompt, samples=tuple(self._sample(sequence, decode_text) for sequence in self.sequences)
        )

    def _sample(self, sequence: Sequence, decode_text: Callable[[list[int]], str]) -> Sample:
        assert sequence.finish_reason is not None
        prompt_P = self.prompt.token_ids_P.astype(np.int32)
        before, count = len(prompt_P), len(sequence.tokens)
        return Sample(
            token_ids_T=np.concatenate([prompt_P, np.array(sequence.tokens, dtype=np.int32)]),
            loss_mask_T=np.arange(before + count) >= before,
            behaviour_logprobs_T=np.array([0.0] * before + sequence.logprobs, dtype=np.float32),
            versions_T=np.array([-1] * before + [self.version] * count, dtype=np.int32),
            text=decode_text(sequence.tokens),
            finish_reason=sequence.finish_reason,
        )


class ContinuousBatch:
    """All groups of an engine, advanced one token at a time.

    Args:
        model: Runs the forwards; its slots bound the active sequences.
        stop_token_ids: End a completion; the token itself belongs to it.
        one_group: Run one group at a time, so that not even rounding depends on which groups came together.
    """

    def __init__(self, model: CausalLM, stop_token_ids: Collection[int], *, one_group: bool = False) -> None:
        self._model = model
        self._one_group = one_group
        self._stop_token_ids = frozenset(stop_token_ids)
        self._waiting: deque[Group] = deque()
        self._active: list[Sequence] = []

    @property
    def active(self) -> int:
        """Slots in use."""
        return len(self._active)

    def __bool__(self) -> bool:
        return bool(self._active or self._waiting)

    def add(self, group: Group) -> None:
        self._waiting.append(group)

    def drop(self, groups: Collection[Group]) -> None:
        """Forget these groups, waiting or active, and free their slots."""
        self._waiting = deque(group for group in self._waiting if group not in groups)
        self._keep([sequence.group not in groups for sequence in self._active])

    def step(self) -> list[Group]:
        """Let waiting groups in as far as there is room, then decode one token of every active sequence.

        Returns:
            The groups that have finished.

        Raises:
            EngineError: The model gave logits that are not finite.
        """
        finished: list[Group] = []
        while entering := self._entering():
            finished += self._prefill(entering)
        if self._active:
            finished += self._decode()
        return finished

    def _entering(self) -> list[Group]:
        """Take the next waiting groups that fit into the free slots and into one prefill."""
        cache = self._model.cache
        free_slots, longest = cache.free_slots, 0
        entering: list[Group] = []
        for group in self._waiting:
            free_slots -= len(group.sequences)
            longest = max(longest, len(group.prompt.token_ids_P))
            padded = longest * (len(entering) + 1)
            if free_slots < 0 or len(entering) == cache.free_prompts or (entering and padded > PREFILL_TOKENS):
                break
            if self._one_group and (self._active or entering):
                break
            entering.append(group)
        for _ in entering:
            self._waiting.popleft()
        return entering

    def _prefill(self, groups: list[Group]) -> list[Group]:
        copies = [len(group.sequences) for group in groups]
        logits_NV = self._model.prefill([group.prompt.token_ids_P for group in groups], copies)
        temperatures = np.array([group.temperature for group in groups])
        entered = [sequence for group in groups for sequence in group.sequences]
        rows = np.repeat(np.arange(len(groups)), copies)
        self._active += entered
        return self._append(entered, *sample(logits_NV, temperatures, rows, _next_uniforms(entered)))

    def _decode(self) -> list[Group]:
        active = self._active
        logits_SV = self._model.decode(np.array([sequence.tokens[-1] for sequence in active]))
        temperatures = np.array([sequence.group.temperature for sequence in active])
        return self._append(active, *sample(logits_SV, temperatures, np.arange(len(active)), _next_uniforms(active)))

    def _append(self, sequences: list[Sequence], tokens: np.ndarray, logprobs: np.ndarray) -> list[Group]:
        """Give each sequence its token; those that end leave their slots. Returns the groups that have finished."""
        if not np.isfinite(logprobs).all():
            group = sequences[int(np.isfinite(logprobs).argmin())].group
            raise EngineError(
                f"prompt {group.prompt.uid}: the model gave a log-probability that is not finite under policy "
                f"version {group.version}; its weights have probably diverged"
            )
        for sequence, token, logprob in zip(sequences, tokens.tolist(), logprobs.tolist(), strict=True):
            sequence.append(token, logprob, self._stop_token_ids)
        ended = {sequence.group: None for sequence in sequences if sequence.finish_reason}
        if ended:
            self._keep([sequence.finish_reason is None for sequence in self._active])
        return [group for group in ended if group.finished]

    def _keep(self, keep: list[bool]) -> None:
        order = self._model.keep(np.array(keep, dtype=bool))
        self._active = [self._active[slot] for slot in order]


def _next_uniforms(sequences: list[Sequence]) -> np.ndarray:
    return np.array([sequence.uniforms[len(sequence.tokens)] for sequence in sequences])
