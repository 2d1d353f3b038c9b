"""TensorBoard event files in `tensorboard/` of the run's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aoffpolicy.config import Config
from aoffpolicy.sinks import Row, numbers


class TensorBoard:
    def __init__(self, config: Config, folder: Path) -> None:
        self._folder = folder / "tensorboard"
        self._writer: Any = None

    @property
    def place(self) -> str:
        return f"tensorboard --logdir {self._folder}"

    def write(self, step: int, row: Row) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=step)  # a resumed run does its last steps again
        for key, value in numbers(row).items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
