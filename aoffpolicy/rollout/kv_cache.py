"""A static key/value cache in which the completions of a group share their prompt's keys and values.

A prompt is computed and held once; each of its completions has a slot for its own tokens only. Prompts and slots in use
always lie first, so that a step sees plain slices of the buffers: nothing is copied, and free slots cost nothing.

Shape letters: N prompts, M completions of the largest group in use, S slots in use, H key/value heads, L positions,
D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

GRAIN = 64
"""Positions are made ready in multiples of this."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What the cache has room for."""

    prompts: int
    """Prompts at once."""
    prompt_length: int
    """Tokens of a prompt at most."""
    slots: int
    """Completions at once, of all prompts together."""
    slot_length: int
    """Tokens of a completion at most."""

    def within(self, context_length: int) -> CacheShape:
        """Taken down to this many tokens of prompt and completion together; neither can have all of them."""
        longest = context_length - 1
        return CacheShape(self.prompts, min(self.prompt_length, longest), self.slots, min(self.slot_length, longest))


class Region:
    """The buffers [rows, H, length, D] of all layers' keys and values, of which a corner is in use.

    Attention multiplies masked values by 0, so every position it sees must hold a finite number: rows and positions are
    zeroed before their first use. On a CPU the memory of those never used is never touched either.
    """

    def __init__(self, rows: int, length: int) -> None:
        self.rows = rows
        self.length = length
        self._buffers: list[torch.Tensor] = []
        self._ready = (0, 0)
        """So many rows and positions hold finite numbers."""

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)

    def allocate(self, states: torch.Tensor) -> torch.Tensor:
        """A buffer for one layer's keys or values, which look like these: [_, H, _, D]."""
        _, heads, _, dim = states.shape
        buffer = states.new_empty((self.rows, heads, self.length, dim))
        rows, positions = self._ready
        buffer[:rows, :, :positions].zero_()
        self._buffers.append(buffer)
        return buffer

    def reserve(self, rows: int, positions: int) -> None:
        """Zero what comes into use for the first time."""
        old_rows, old_positions = self._ready
        if rows <= old_rows and positions <= old_positions:
            return
        rows = max(rows, old_rows)
        positions = max(min(-(-positions // GRAIN) * GRAIN, self.length), old_positions)
        for buffer in self._buffers:
            buffer[old_rows:rows, :, :positions].zero_()
            buffer[:old_rows, :, old_positions:positions].zero_()
        self._ready = (rows, positions)

    def take(self, order: np.ndarray, positions: int) -> None:
        """Row i becomes what row `order[i]` was, in its first positions; rows that move come from beyond the order."""
        targets = np.flatnonzero(order != np.arange(len(order)))
        if not len(targets) or not positions:
            return
        device = self._buffers[0].device
        target, source = torch.from_numpy(targets).to(device), torch.from_numpy(order[targets]).to(device)
        for buffer in self._buffers:
            buffer[target, :, :positions] = buffer[source, :, :positions]

    def forget(self) -> None:
        """Everything is zeroed again before it is seen again."""
        self._ready = (0, 0)


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """One forward over whole prompts."""

    rows: slice
    """Of the prompt region."""
    positions: int
    """Of the longest prompt."""


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """One forward over one token of each slot in use: where its keys go, and what its query sees."""

    slots_S: torch.Tensor
    """int64, 0 .. S-1."""
    positions_S: torch.Tensor
    """int64, of the token in its sequence, prompt included."""
    writes_S: torch.Tensor
    """int64, of the token in its slot."""
    visible: int
    """Positions of the slots that any query sees."""
    seen_S11L: torch.Tensor
    """bool [S, 1, 1, visible]."""
    prompts: int
    prompt_positions: int
    """Of the longest prompt in use."""
    prompt_seen_N11L: torch.Tensor
    """bool [N, 1, 1, prompt_positions]."""
    slot_of_NM: torch.Tensor
    """int64, the slots of each prompt, filled up with slot 0 where a group has fewer."""
    place_of_S: tuple[torch.Tensor, torch.Tensor]
    """The prompt and the place within its row of `slot_of_NM` of each slot, int64 [S] each."""


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values, allocated when the first come."""

    is_sliding = False

    def __init__(self, cache: SlotCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache = cache

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.prompt_keys = self._cache.prompts.allocate(key_states)
        self.prompt_values = self._cache.prompts.allocate(value_states)
        self.slot_keys = self._cache.completions.allocate(key_states)
        self.slot_values = self._cache.completions.allocate(value_states)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values. Returns those of the prompts alone, or those of the slots alone."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        plan = self._cache.plan
        if isinstance(plan, PrefillPlan):
            self.prompt_keys[plan.rows, :, : plan.positions] = key_states
            self.prompt_values[plan.rows, :, : plan.positions] = value_states
            return key_states, value_states
        assert plan is not None
        self.slot_keys[plan.slots_S, :, plan.writes_S] = key_states[:, :, 0]
        self.slot_values[plan.slots_S, :, plan.writes_S] = value_states[:, :, 0]
        count = len(plan.slots_S)
        return self.slot_keys[:count, :, : plan.visible], self.slot_values[:count, :, : plan.visible]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0  # positions are always passed explicitly

    def get_max_length(self) -> int:
        return self._cache.completions.length


class SlotCache(Cache):
    """Keys and values of all layers, and which prompt each slot belongs to.

    Args:
        layers: Of the model.
        shape: Sizes of both regions.
    """

    def __init__(self, layers: int, shape: CacheShape) -> None:
        self.prompts = Region(shape.prompts, shape.prompt_length)
        self.completions = Region(shape.slots, shape.slot_length)
        self.plan: PrefillPlan | DecodePlan | None = None
        """Of the forward that comes next."""
        self._prompt_lengths = np.zeros(0, dtype=np.int64)
        """[prompts in use]."""
        self._prompt_of_slot = np.zeros(0, dtype=np.int64)
        """[slots in use], row of the prompt region."""
        self._lengths = np.zeros(0, dtype=np.int64)
        """[slots in use], positions written in the slot."""
        self.slot_layers = [SlotLayer(self) for _ in range(layers)]
        super().__init__(layers=list(self.slot_layers))

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers; 0 before the first forward."""
        return self.prompts.nbytes + self.completions.nbytes

    @property
    def free_prompts(self) -> int:
        return self.prompts.rows - len(self._prompt_lengths)

    @property
    def free_slots(self) -> int:
        return self.completions.rows - len(self._lengths)

    def enter(self, lengths: np.ndarray, copies: np.ndarray) -> None:
        """Take prompts in; the next forward is over all of them, padded on the right.

        Args:
            lengths: int64 [N], tokens of each prompt.
            copies: int64 [N], slots that each prompt takes, after those in use and in order.
        """
        first = len(self._prompt_lengths)
        self._prompt_lengths = np.append(self._prompt_lengths, lengths)
        new = np.repeat(np.arange(first, first + len(lengths)), copies)
        self._prompt_of_slot = np.append(self._prompt_of_slot, new)
        self._lengths = np.append(self._lengths, np.zeros_like(new))
        longest = int(lengths.max())
        self.prompts.reserve(first + len(lengths), longest)
        self.plan = PrefillPlan(slice(first, first + len(lengths)), longest)

    def advance(self, device: torch.device) -> DecodePlan:
        """The next forward is over one token of each slot in use."""
        slots, prompts = len(self._lengths), len(self._prompt_lengths)
        visible, prompt_positions = int(self._lengths.max()) + 1, int(self._prompt_lengths.max())
        self.completions.reserve(slots, visible)
        sizes = np.bincount(self._prompt_of_slot, minlength=prompts)
        by_prompt = np.argsort(self._prompt_of_slot, kind="stable")
        member = np.empty(slots, dtype=np.int64)
        member[by_prompt] = np.arange(slots) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        slot_of = np.zeros((prompts, int(sizes.max())), dtype=np.int64)
        slot_of[self._prompt_of_slot, member] = np.arange(slots)

        def move(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(device)

        plan = DecodePlan(
            slots_S=torch.arange(slots, device=device),
            positions_S=move(self._prompt_lengths[self._prompt_of_slot] + self._lengths),
            writes_S=move(self._lengths.copy()),
            visible=visible,
            seen_S11L=move(np.arange(visible) <= self._lengths[:, None])[:, None, None],
            prompts=prompts,
            prompt_positions=prompt_positions,
            prompt_seen_N11L=move(np.arange(prompt_positions) < self._prompt_lengths[:, None])[:, None, None],
            slot_of_NM=move(slot_of),
            place_of_S=(move(self._prompt_of_slot), move(member)),
        )
        self._lengths += 1
        self.plan = plan
        return plan

    def keep(self, keep_S: np.ndarray) -> np.ndarray:
        """Free the other slots, and the prompts that have no slot left.

        Args:
            keep_S: bool, for each slot in use.

        Returns:
            int64 [slots kept]: slot i now holds what slot `order[i]` held.
        """
        order = _compaction(keep_S)
        self.completions.take(order, int(self._lengths.max(initial=0)))
        self._lengths = self._lengths[order]
        old_prompts = self._prompt_of_slot[order]
        used = np.bincount(old_prompts, minlength=len(self._prompt_lengths)) > 0
        prompt_order = _compaction(used)
        self.prompts.take(prompt_order, int(self._prompt_lengths.max(initial=0)))
        self._prompt_lengths = self._prompt_lengths[prompt_order]
        new_of_old = np.zeros(len(used), dtype=np.int64)
        new_of_old[prompt_order] = np.arange(len(prompt_order))
        self._prompt_of_slot = new_of_old[old_prompts]
        return order

    def clear(self) -> None:
        """Free everything, and forget it: what other weights computed, NaN above all, is never seen again."""
        self.keep(np.zeros(len(self._lengths), dtype=bool))
        self.prompts.forget()
        self.completions.forget()
        self.plan = None


def _compaction(keep: np.ndarray) -> np.ndarray:
    """The order that fills holes among the first rows with the rows kept beyond them; the others stay in place."""
    order = np.arange(int(keep.sum()))
    order[~keep[: len(order)]] = np.flatnonzero(keep[len(order) :]) + len(order)
    return order
