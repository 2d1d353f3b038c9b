"""One rank's part of a batch on disk: what a run that met NaN leaves behind, to be looked at and trained again."""

from __future__ import annotations

from pathlib import Path

from aoffpolicy.errors import DataError, ProtocolError
from aoffpolicy.transport.messages import Train, pack, unpack


def save(path: Path, batch: Train) -> None:
    """Write a batch; the file is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(pack(batch))
    partial.rename(path)


def load(path: Path) -> Train:
    """The batch that `save` wrote: groups, advantages, temperature, step and version.

    Raises:
        DataError: The file cannot be read, or is no batch; names it.
    """
    try:
        return unpack(path.read_bytes(), Train)
    except (OSError, ProtocolError) as error:
        raise DataError(f"{path}: cannot be read as a batch: {error}") from error
