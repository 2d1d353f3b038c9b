"""Rows that reasoning-gym's procedural data sets generate: as many as asked for, the same for the same seed."""

from __future__ import annotations

import difflib
import itertools
import logging
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from aoffpolicy.data.rows import Row, pack_row
from aoffpolicy.errors import DataError

logger = logging.getLogger(__name__)

CHUNK = 1024
"""Rows of one data set object. Row i comes from seed + i in nearly all data sets, so chunk c gets seed + c * CHUNK and
continues the chunk before. A few draw all their rows at once: with chunks, those do not depend on how many are used."""

HASH_SEED_DEPENDENT = {
    "isomorphic_strings",
    "knight_swap",
    "polynomial_multiplication",
    "ransom_note",
    "word_ladder",
}
"""Data sets that iterate over Python sets of strings, so that their rows change with PYTHONHASHSEED."""


def create(name: str, params: Mapping[str, Any]) -> Any:
    """A reasoning-gym data set.

    Args:
        name: Its registered name.
        params: Its configuration; `datasets` of `composite` is a list of tables with name, weight and config.

    Raises:
        DataError: There is no such data set, or it does not take these parameters.
    """
    import reasoning_gym
    from reasoning_gym.composite import DatasetSpec
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        close = difflib.get_close_matches(name, DATASETS, n=3)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise DataError(f"reasoning_gym:{name}: no such data set among the {len(DATASETS)} there are{hint}")
    try:
        if name == "composite":
            params = {**params, "datasets": [DatasetSpec(**spec) for spec in params.get("datasets", [])]}
        return reasoning_gym.create_dataset(name, **params)
    except (TypeError, ValueError, AssertionError, AttributeError, KeyError) as error:
        known = ", ".join(DATASETS[name][1].__dataclass_fields__)
        raise DataError(f"reasoning_gym:{name}: bad parameters: {error}; it takes {known}") from error


def generate(name: str, params: Mapping[str, Any], seed: int) -> Iterator[Row]:
    """The rows of a reasoning-gym data set: `size` of them where the parameters say so, endless otherwise.

    Args:
        name: Its registered name.
        params: Its configuration.
        seed: Used where the parameters give none.

    Raises:
        DataError: See `create`; raised when the first row is asked for.
    """
    if name in HASH_SEED_DEPENDENT and sys.flags.hash_randomization:
        logger.warning("reasoning_gym:%s differs from process to process; set PYTHONHASHSEED=0 to resume runs", name)
    own = {key: value for key, value in params.items() if key not in ("size", "seed")}
    size = params.get("size")
    if size is not None and (not isinstance(size, int) or size < 1):
        raise DataError(f"reasoning_gym:{name}: size must be a positive integer, got {size!r}")
    first_seed = params.get("seed", seed)
    chunk = min(size or CHUNK, CHUNK)
    for start in itertools.count(0, chunk):
        dataset = create(name, {**own, "size": chunk, "seed": first_seed + start})
        for index in range(chunk):
            if start + index == size:
                return
            yield _row(dataset[index], name, own)


def _row(entry: Mapping[str, Any], name: str, params: Mapping[str, Any]) -> Row:
    row = {
        "prompt": entry["question"],
        "answer": entry["answer"],
        "metadata": entry["metadata"],
        "reasoning_gym": {"name": name, "params": params},
    }
    try:
        pack_row(row)
    except ValueError:
        row["metadata"] = _portable(entry["metadata"])
    return row


def _portable(value: Any) -> Any:
    """The same values with what msgpack cannot carry as text: huge integers and fractions, which no scorer reads."""
    if isinstance(value, dict):
        return {key: _portable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_portable(item) for item in value]
    try:
        pack_row({"value": value})
    except ValueError:
        return str(value)
    return value


def entry_of(row: Row) -> dict[str, Any]:
    """The reasoning-gym entry that a row was made of, also after the row travelled as msgpack."""
    metadata = row["metadata"]
    if metadata.get("source_dataset") in ("arc_agi", "rearc"):
        metadata = _tuples(metadata)  # these compare grids with ==, and a list never equals a tuple
    return {"question": row["prompt"], "answer": row["answer"], "metadata": metadata}


def _tuples(value: Any) -> Any:
    """The same values with every list as a tuple."""
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return tuple(map(_tuples, value))
    return value
