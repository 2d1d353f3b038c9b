"""Rows of local JSONL and parquet files, checked whole before anything is started.

Columns: `prompt` (text or chat messages) and `answer`; the layout of verl's data preparation (`data_source`, `prompt`,
`ability`, `reward_model`, `extra_info`) is read as it is: its `reward_model.ground_truth` is the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from aoffpolicy.data.rows import Row, RowCheck, row_fault
from aoffpolicy.errors import DataError

FAULTS_SHOWN = 20

Place = tuple[str, Row | None, str]
"""Where it stands in the file ("line 3"), the row, and what makes it unreadable (then there is no row)."""


def read_file(path: Path, check: RowCheck) -> list[Row]:
    """Read every row of a .jsonl or .parquet file.

    Args:
        path: The file.
        check: What else a row must satisfy, for example to have the kind of answer that the reward compares with.

    Raises:
        DataError: The file cannot be read, or rows are at fault: the first 20 faults with file, line or row, and key.
    """
    reader = READERS.get(path.suffix)
    if reader is None:
        raise DataError(f"{path}: expected a file ending in {' or '.join(READERS)}")
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    rows: list[Row] = []
    faults: list[str] = []
    for place, row, fault in reader(path):
        if row is not None:
            row = _with_answer(row)
            fault = row_fault(row) or check(row) or ""
        if fault:
            faults.append(f"{path}, {place}: {fault}")
        elif row is not None:
            rows.append(row)
    if faults:
        more = [f"... and {len(faults) - FAULTS_SHOWN} more"] if len(faults) > FAULTS_SHOWN else []
        raise DataError("\n".join(faults[:FAULTS_SHOWN] + more))
    if not rows:
        raise DataError(f"{path}: holds no rows")
    return rows


def _with_answer(row: Row) -> Row:
    """The row with `answer` filled in from verl's `reward_model.ground_truth` where that is how it came."""
    if row.get("answer") is not None:
        return row
    reward_model = row.get("reward_model")
    if isinstance(reward_model, Mapping) and reward_model.get("ground_truth") is not None:
        return {**row, "answer": reward_model["ground_truth"]}
    return {key: value for key, value in row.items() if key != "answer"}


def _read_jsonl(path: Path) -> Iterator[Place]:
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"line {number}", *_parse(line.removeprefix(b"\xef\xbb\xbf"))
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


def _parse(line: bytes) -> tuple[Row | None, str]:
    try:
        row: Any = msgspec.json.decode(line)
    except (msgspec.DecodeError, ValueError) as error:
        return None, f"not JSON: {error}"
    if not isinstance(row, dict):
        return None, f"expected an object, got {type(row).__name__}"
    return row, ""


def _read_parquet(path: Path) -> Iterator[Place]:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise DataError(f"{path}: reading parquet needs pyarrow; pip install 'aoffpolicy[parquet]'") from error
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    yield f"row {number}", row, ""
                    number += 1
    except (OSError, arrow.ArrowException) as error:
        raise DataError(f"{path}: cannot be read as parquet after row {number}: {error}") from error


READERS: dict[str, Callable[[Path], Iterator[Place]]] = {".jsonl": _read_jsonl, ".parquet": _read_parquet}
