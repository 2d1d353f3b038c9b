"""The folder of a run: who may write it, and what lies where in it."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from aoffpolicy.config import Config, to_toml
from aoffpolicy.errors import ConfigError
from aoffpolicy.samples.log import SampleLog


class RunFolder:
    """`<run.dir>/<run.name>`, held by one launcher at a time.

    A fresh run in a folder that holds an earlier one moves that one aside under the time of its last change:
    nothing is overwritten.

    Raises:
        ConfigError: Another launcher that lives holds the folder.
    """

    def __init__(self, config: Config, *, resume: bool) -> None:
        self.path = config.run_dir.absolute()
        self._config = config
        self._resume = resume

    def __enter__(self) -> Self:
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = self._take_lock()
        if self.metrics_path.exists() and not self._resume:
            self._lock.close()
            self.moved_to: Path | None = self._move_aside()
            self.path.mkdir()
            self._lock = self._take_lock()
        else:
            self.moved_to = None
        for folder in (self.logs, self.checkpoints):
            folder.mkdir(exist_ok=True)
        (self.path / "config.toml").write_text(to_toml(self._config))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.close()

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def samples(self) -> SampleLog:
        limits = self._config.samples
        return SampleLog(self.path, max_bytes=limits.max_bytes, files=limits.files)

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        with self.metrics_path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def keep_metrics_before(self, step: int) -> None:
        """Drop the rows of steps that a resumed run will do again, and a last row that a kill cut short."""
        if not self.metrics_path.exists():
            return
        whole = [line for line in self.metrics_path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        rewritten = self.metrics_path.with_suffix(".tmp")
        rewritten.write_text("".join(line for line in whole if json.loads(line)["step"] < step))
        rewritten.replace(self.metrics_path)

    def write_json(self, name: str, value: Any) -> None:
        (self.path / name).write_text(json.dumps(value, indent=1) + "\n")

    def _take_lock(self) -> Any:
        file = (self.path / "lock").open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            raise ConfigError([f"run.name: {self.path} is in use by a run that is still alive"]) from error
        return file

    def _move_aside(self) -> Path:
        when = datetime.fromtimestamp(self.metrics_path.stat().st_mtime).strftime("%Y%m%d-%H%M%S")
        target = self.path.with_name(f"{self.path.name}.{when}")
        self.path.rename(target)
        return target
