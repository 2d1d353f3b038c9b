"""The run's prompts in dispatch order: `source[uid]` depends on config and uid alone, so resuming needs no more.

Files, and generated data with a `size`, are passed over in epochs, each in an order of its own. Generated data without
a size are endless: uid i is the i-th usable row, there are no epochs, and a longer run begins with the same rows.
"""

from __future__ import annotations

import json
import logging
from functools import lru_cache
from typing import Any

import numpy as np

from aoffpolicy.config import Config
from aoffpolicy.data.chat import PromptEncoder
from aoffpolicy.data.source import load_rows
from aoffpolicy.data.table import PromptCounts, PromptTable
from aoffpolicy.errors import DataError
from aoffpolicy.reward.functions import row_check
from aoffpolicy.samples import Prompt

logger = logging.getLogger(__name__)

EVAL_SEED_OFFSET = 1_000_000_000
"""Row i of generated data comes from seed + i, so held-out data start far from the seeds of the training data."""


class PromptSource:
    """All prompts of a run: `source[uid]`, with IndexError past the end.

    Args:
        table: The usable prompts. Of endless data it grows as far as uids are asked for.
        seed: Of the orders.
        shuffle: Another order in every epoch; otherwise the order of the data.
        epochs: Passes over the data; None goes on for ever.
    """

    def __init__(self, table: PromptTable, *, seed: int, shuffle: bool, epochs: int | None) -> None:
        self._table = table
        self._seed = seed
        self._shuffle = shuffle
        self._epochs = epochs

    @property
    def counts(self) -> PromptCounts:
        return self._table.counts

    @property
    def size(self) -> int | None:
        """Prompts over all epochs; None where they do not end."""
        if self._table.endless or self._epochs is None:
            return None
        return self._epochs * len(self._table)

    def __getitem__(self, uid: int) -> Prompt:
        """The prompt with this uid.

        Raises:
            IndexError: The data end before it.
        """
        if uid < 0 or (self.size is not None and uid >= self.size):
            raise IndexError(f"prompt {uid}: there are {self.size or 'no negative uids'}")
        if self._table.endless:
            self._table.fill(uid + 1)
            return self._table.prompt(uid, uid)
        epoch, position = divmod(uid, len(self._table))
        if self._shuffle:
            position = int(epoch_order(self._seed, epoch, len(self._table))[position])
        return self._table.prompt(position, uid)


@lru_cache(maxsize=4)
def epoch_order(seed: int, epoch: int, size: int) -> np.ndarray:
    """A permutation of 0..size-1 that is the same on every machine and under every numpy.

    numpy keeps the stream of raw bits stable between releases, but not that of `Generator.permutation`.
    """
    bits = np.random.PCG64(np.random.SeedSequence((seed, epoch)))
    return np.argsort(bits.random_raw(size), kind="stable")


def load_tokenizer(config: Config) -> Any:
    """The tokenizer in the model's folder.

    Raises:
        DataError: There is none that can be loaded.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(config.model.path)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"model.path: {config.model.path}: the tokenizer cannot be loaded: {error}") from error


def build_prompts(config: Config, tokenizer: Any) -> PromptSource:
    """Read, check, tokenise and count the training data; blocks for as long as that takes.

    Raises:
        DataError: Rows are at fault, no prompt can be used, or the data are too few for one step.
    """
    data = config.data
    table = _table(config, tokenizer, data.source, data.params, config.run.seed)
    needed = config.run.steps * data.prompts_per_step
    if table.endless and data.epochs is not None:
        raise DataError(f"data.epochs: {data.source} generates rows without end; give data.params.size")
    table.fill(needed if table.endless else None)
    _log_counts(table)
    prompts = PromptSource(table, seed=config.run.seed, shuffle=data.shuffle, epochs=data.epochs)
    if prompts.size is not None and prompts.size < data.prompts_per_step:
        raise DataError(
            f"{data.source}: {len(table)} usable prompts x {data.epochs} epochs "
            f"do not fill one step of data.prompts_per_step = {data.prompts_per_step}"
        )
    if prompts.size is not None and prompts.size < needed:
        logger.warning(
            "%s: %d prompts in %d epochs end before run.steps = %d",
            data.source,
            prompts.size,
            data.epochs,
            config.run.steps,
        )
    return prompts


def build_eval_prompts(config: Config, tokenizer: Any) -> list[Prompt] | None:
    """The first `eval.prompts` usable prompts of the held-out data, uids from 0; None where nothing is evaluated.

    Raises:
        DataError: Rows are at fault, or no prompt can be used.
    """
    held_out = config.eval
    if not held_out.every or not held_out.source:
        return None
    table = _table(config, tokenizer, held_out.source, held_out.params, config.run.seed + EVAL_SEED_OFFSET)
    table.fill(held_out.prompts)
    _log_counts(table)
    if len(table) < held_out.prompts:
        logger.warning("%s: %d prompts of eval.prompts = %d", held_out.source, len(table), held_out.prompts)
    return [table.prompt(index, index) for index in range(len(table))]


def _table(config: Config, tokenizer: Any, source: str, params: dict[str, Any], seed: int) -> PromptTable:
    data = config.data
    encoder = PromptEncoder(tokenizer, chat=data.chat, system_prompt=data.system_prompt, suffix=data.suffix)
    rows = load_rows(source, params, seed=seed, check=row_check(config.reward.function))
    return PromptTable(rows, encoder, max_tokens=_prompt_limit(config), skip_bad=data.bad_prompts == "skip")


def _prompt_limit(config: Config) -> int:
    """Tokens of a prompt at most: as configured, and such that a whole completion fits into the model's context."""
    model = json.loads((config.model.path / "config.json").read_text())
    context: int | None = model.get("text_config", model).get("max_position_embeddings")
    limit = config.data.max_prompt_tokens
    if context is None:
        return limit
    if context <= config.rollout.max_tokens:
        raise DataError(
            f"rollout.max_tokens: {config.rollout.max_tokens} leaves no room for a prompt "
            f"in the model's context of {context} tokens"
        )
    return min(limit, context - config.rollout.max_tokens)


def _log_counts(table: PromptTable) -> None:
    dropped = table.counts.dropped_empty or table.counts.dropped_too_long
    logger.log(logging.WARNING if dropped else logging.INFO, "%s: %s", table.name, table.counts)
