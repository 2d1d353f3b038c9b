"""Where rows come from: `data.source` and `eval.source` of the config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aoffpolicy.data.files import read_file
from aoffpolicy.data.generated import generate
from aoffpolicy.data.rows import Row, RowCheck, row_fault
from aoffpolicy.errors import DataError

GENERATED = "reasoning_gym:"


@dataclass(frozen=True, slots=True)
class Source:
    """Rows in the order of the data; every row is checked before it comes out."""

    name: str
    rows: Iterator[Row]
    endless: bool
    """Rows are generated for as long as somebody asks: there are no epochs."""


def load_rows(source: str, params: Mapping[str, Any], *, seed: int, check: RowCheck = lambda row: None) -> Source:
    """Open a source of rows.

    Args:
        source: "reasoning_gym:NAME", or the path of a .jsonl or .parquet file (relative to the working directory).
        params: Parameters of a reasoning-gym data set; `size` makes it finite.
        seed: Of a reasoning-gym data set whose parameters give none.
        check: What else a row must satisfy; returns the fault of a row or None.

    Raises:
        DataError: The source is unknown, or rows of the file are at fault. Generated rows are checked as they come.
    """
    if source.startswith(GENERATED):
        rows = generate(source.removeprefix(GENERATED), params, seed)
        return Source(source, _checked(source, rows, check), endless="size" not in params)
    if params:
        raise DataError(f"{source}: a file takes no parameters, got {', '.join(params)}")
    return Source(source, iter(read_file(Path(source), check)), endless=False)


def _checked(source: str, rows: Iterator[Row], check: RowCheck) -> Iterator[Row]:
    for index, row in enumerate(rows):
        if fault := row_fault(row) or check(row):
            raise DataError(f"{source}, row {index}: {fault}")
        yield row
