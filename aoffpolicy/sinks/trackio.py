"""Trackio: a local dashboard (`trackio show`), or a Hugging Face Space where its environment variables name one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aoffpolicy.config import Config
from aoffpolicy.sinks import Row, numbers, plain


class Trackio:
    def __init__(self, config: Config, folder: Path) -> None:
        self._config = config
        self._run: Any = None

    @property
    def place(self) -> str:
        return f"trackio show --project {self._config.metrics.project}"

    def write(self, step: int, row: Row) -> None:
        if self._run is None:
            self._run = self._open()
        self._run.log(numbers(row), step=step)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()

    def _open(self) -> Any:
        import trackio

        return trackio.init(
            project=self._config.metrics.project,
            name=self._config.run.name,
            config=plain(self._config),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
