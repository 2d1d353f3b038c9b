"""Finding groups in the sample files of a run without holding their texts in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from aoffpolicy.errors import DataError
from aoffpolicy.samples.log import GroupRecord, decode, files_of

ORDERS: Mapping[str, Callable[[GroupRecord], float]] = {
    "time": lambda record: 0.0,
    "best": lambda record: -record.reward_mean,
    "worst": lambda record: record.reward_mean,
    "slowest": lambda record: -record.generate_s,
    "longest": lambda record: -max((c.tokens for c in record.completions), default=0),
}
"""What each order sorts by; equal ones stay in the order in which they were written."""


@dataclass(frozen=True, slots=True)
class _Place:
    file: BinaryIO
    offset: int
    key: float


class SampleIndex(Sequence[GroupRecord]):
    """The groups of a run in one order, read from disk when asked for; close it, or use it in `with`.

    Files stay open, so that a rotation by the running run takes nothing away.

    Args:
        folder: The run's folder.
        step: Only of this step; None for all.
        purpose: Only "train" or "eval"; empty for both.
        order: A key of `ORDERS`.

    Raises:
        DataError: There are no sample files, or a line is no record.
    """

    def __init__(self, folder: Path, *, step: int | None = None, purpose: str = "", order: str = "time") -> None:
        paths = files_of(folder)
        if not paths:
            raise DataError(
                f"{folder}: no samples.jsonl here; has a step been trained, and is samples.max_bytes not 0?"
            )
        key = ORDERS[order]
        places = []
        with ExitStack() as stack:
            self._names: dict[BinaryIO, str] = {stack.enter_context(path.open("rb")): str(path) for path in paths}
            for file, name in self._names.items():
                for offset, record in _records(file, name):
                    if step in (None, record.step) and purpose in ("", record.purpose):
                        places.append(_Place(file, offset, key(record)))
            self._files = stack.pop_all()
        self._places = sorted(places, key=lambda place: place.key)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> GroupRecord:  # type: ignore[override]  # no slices
        place = self._places[index]
        place.file.seek(place.offset)
        return decode(place.file.readline(), f"{self._names[place.file]}, byte {place.offset}")

    def close(self) -> None:
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _records(file: BinaryIO, name: str) -> Iterator[tuple[int, GroupRecord]]:
    """Each record and where its line begins; not the last line while it is still being written."""
    offset = 0
    for row, line in enumerate(file, 1):
        if line.endswith(b"\n"):
            yield offset, decode(line, f"{name}, row {row}")
        offset += len(line)
