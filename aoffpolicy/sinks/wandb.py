"""Weights & Biases; `WANDB_MODE=offline` keeps everything in the run's folder for `wandb sync`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from aoffpolicy.config import Config
from aoffpolicy.sinks import Row, numbers, plain

INIT_TIMEOUT_S = 30.0
"""For the first answer of the service."""


class WeightsAndBiases:
    def __init__(self, config: Config, folder: Path) -> None:
        self._config = config
        self._folder = folder
        self._run: Any = None

    @property
    def place(self) -> str:
        return f"project {self._config.metrics.project}, run {self._config.run.name}"

    def write(self, step: int, row: Row) -> None:
        unreachable = self._open() if self._run is None else None
        self._run.log({**numbers(row), "step": step})
        if unreachable is not None:
            raise ConnectionError(f"from now on kept in {self._folder}/wandb for `wandb sync`") from unreachable

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()

    def _open(self) -> Exception | None:
        """Begin, offline where the service cannot be reached; returns why not."""
        import wandb

        try:
            self._run = self._init(mode=None)
            return None
        except wandb.Error as error:
            self._run = self._init(mode="offline")
            unreachable: Exception = error
            return unreachable

    def _init(self, mode: Literal["offline"] | None) -> Any:
        import wandb

        run = wandb.init(
            project=self._config.metrics.project,
            name=self._config.run.name,
            dir=self._folder,
            config=plain(self._config),
            mode=mode,
            settings=wandb.Settings(console="off", silent=True, init_timeout=INIT_TIMEOUT_S),
        )
        run.define_metric("*", step_metric="step")  # a resumed run does its last steps again
        return run
