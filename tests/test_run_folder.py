from __future__ import annotations

import json
from pathlib import Path

import pytest

from aoffpolicy import config as configuration
from aoffpolicy.config import Config
from aoffpolicy.errors import ConfigError
from aoffpolicy.run_folder import RunFolder


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config.model_validate(
        {"run": {"dir": tmp_path, "name": "r"}, "model": {"path": "m"}, "data": {"source": "reasoning_gym:x"}}
    )


def test_a_second_run_in_a_living_runs_folder_is_refused(config: Config) -> None:
    with RunFolder(config, resume=False), pytest.raises(ConfigError, match=r"run\.name: .* is in use"):
        RunFolder(config, resume=True).__enter__()


def test_a_fresh_run_moves_an_earlier_one_aside(config: Config, tmp_path: Path) -> None:
    with RunFolder(config, resume=False) as first:
        first.append_metrics({"step": 0})
    with RunFolder(config, resume=False) as second:
        assert second.moved_to is not None
        assert (second.moved_to / "metrics.jsonl").read_text() == '{"step": 0}\n'
        assert not second.metrics_path.exists()


def test_a_resumed_run_drops_the_rows_it_will_write_again(config: Config) -> None:
    with RunFolder(config, resume=False) as folder:
        for step in range(4):
            folder.append_metrics({"step": step})
        with folder.metrics_path.open("a") as file:
            file.write('{"step": 4, "rewar')
    with RunFolder(config, resume=True) as folder:
        folder.keep_metrics_before(2)
        folder.append_metrics({"step": 2})
        steps = [json.loads(line)["step"] for line in folder.metrics_path.read_text().splitlines()]
    assert steps == [0, 1, 2]


def test_the_folder_holds_the_resolved_config(config: Config) -> None:
    with RunFolder(config, resume=False) as folder:
        assert "prompts_per_step = 16" in (folder.path / "config.toml").read_text()
        assert configuration.to_toml(config) == (folder.path / "config.toml").read_text()
