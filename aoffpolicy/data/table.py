"""The prompts that can be used, tokenised once, in the order of the data."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from aoffpolicy.data.chat import PromptEncoder
from aoffpolicy.data.rows import Row, pack_row, unpack_row
from aoffpolicy.data.source import Source
from aoffpolicy.errors import DataError
from aoffpolicy.samples import Prompt

logger = logging.getLogger(__name__)

ROWS_AT_ONCE = 64
HOPELESS = 1024
"""Endless data are given up when so many rows one after the other cannot be used."""
PROGRESS_S = 10.0


@dataclass(slots=True)
class PromptCounts:
    """What became of the rows read so far."""

    kept: int = 0
    dropped_empty: int = 0
    dropped_too_long: int = 0

    @property
    def read(self) -> int:
        return self.kept + self.dropped_empty + self.dropped_too_long

    def __str__(self) -> str:
        return (
            f"{self.read} rows read, {self.kept} kept, "
            f"dropped_too_long {self.dropped_too_long}, dropped_empty {self.dropped_empty}"
        )


class PromptTable:
    """Rows with their tokens: int32 ids and msgpack bytes, a few hundred bytes a row.

    Args:
        source: Rows; read no further than `fill` is asked for.
        encoder: Makes tokens of them.
        max_tokens: A prompt with more cannot be used.
        skip_bad: Leave empty and too long prompts out, with counts; otherwise they are an error.
    """

    def __init__(self, source: Source, encoder: PromptEncoder, *, max_tokens: int, skip_bad: bool) -> None:
        self.name = source.name
        self.endless = source.endless
        self.counts = PromptCounts()
        self._source = source.rows
        self._encoder = encoder
        self._max_tokens = max_tokens
        self._skip_bad = skip_bad
        self._token_ids: list[np.ndarray] = []
        self._rows: list[bytes] = []

    def __len__(self) -> int:
        return len(self._rows)

    def prompt(self, index: int, uid: int) -> Prompt:
        """The kept prompt number `index` under this uid."""
        return Prompt(uid=uid, token_ids_P=self._token_ids[index], row=unpack_row(self._rows[index]))

    def fill(self, wanted: int | None = None) -> None:
        """Read on until `wanted` prompts are kept or the data end; None reads to the end.

        Raises:
            DataError: A row is at fault, none can be used, or none in a long stretch of endless data.
        """
        fruitless = 0
        reported = time.monotonic()
        while wanted is None or len(self) < wanted:
            count = ROWS_AT_ONCE if wanted is None else min(ROWS_AT_ONCE, wanted - len(self))
            rows = list(islice(self._source, count))
            if not rows:
                break
            kept = self._add(rows)
            fruitless = 0 if kept else fruitless + len(rows)
            if self.endless and fruitless >= HOPELESS:
                break
            if time.monotonic() - reported > PROGRESS_S:
                reported = time.monotonic()
                logger.info("%s: %s so far, of %s wanted", self.name, self.counts, wanted or "all")
        if not self or (self.endless and fruitless >= HOPELESS):
            raise DataError(f"{self.name}: no usable prompts (at most {self._max_tokens} tokens each): {self.counts}")

    def _add(self, rows: Sequence[Row]) -> int:
        """Keep those that can be used; returns how many."""
        before = len(self)
        for row, token_ids_P in zip(rows, self._encoder.encode(rows), strict=True):
            if len(token_ids_P) == 0:
                self._drop("is empty")
                self.counts.dropped_empty += 1
            elif len(token_ids_P) > self._max_tokens:
                self._drop(f"has {len(token_ids_P)} tokens, more than {self._max_tokens}")
                self.counts.dropped_too_long += 1
            else:
                self._token_ids.append(token_ids_P)
                self._rows.append(pack_row(row))
                self.counts.kept += 1
        return len(self) - before

    def _drop(self, why: str) -> None:
        if not self._skip_bad:
            raise DataError(f"{self.name}, row {self.counts.read}: prompt {why}, and data.bad_prompts is 'fail'")
