from __future__ import annotations

from pathlib import Path

import pytest

from aoffpolicy import config as configuration
from aoffpolicy.config import Config
from aoffpolicy.errors import ConfigError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def toml(tmp_path: Path, model: Path) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(f'[model]\npath = "{model}"\n[data]\nsource = "reasoning_gym:chain_sum"\n')
    return path


def test_overrides_are_toml_values_or_plain_text(toml: Path) -> None:
    config = configuration.load(
        toml, ["--run.steps", "7", "--run.name=abc", "--data.params.min_terms", "2", "--rollout.stop_token_ids", "[5]"]
    )
    assert (config.run.steps, config.run.name) == (7, "abc")
    assert config.data.params == {"min_terms": 2}
    assert config.rollout.stop_token_ids == [5]


def test_every_wrong_key_is_named_at_once(toml: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        configuration.load(
            toml, ["--run.step", "7", "--trainer.lr", "fast", "--trainer.ranks", "0", "--nosuch.key", "1"]
        )
    faults = "\n".join(caught.value.faults)
    assert "run.step: no such key; did you mean run.steps?" in faults
    for key in ("trainer.lr", "trainer.ranks", "nosuch"):
        assert key in faults
    assert len(caught.value.faults) == 4


def test_an_override_without_a_value_is_a_fault_that_names_it(toml: Path) -> None:
    with pytest.raises(ConfigError, match=r"--run\.steps: a value is missing"):
        configuration.load(toml, ["--run.steps"])


def test_a_value_where_a_section_belongs_is_a_fault(toml: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path\.deeper: path is a value, not a section"):
        configuration.load(toml, ["--model.path.deeper", "1"])


def test_broken_toml_and_a_missing_file_name_the_file(tmp_path: Path) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("[run\n")
    with pytest.raises(ConfigError, match=r"broken\.toml: not valid TOML"):
        configuration.load(broken)
    with pytest.raises(ConfigError, match=r"absent\.toml: cannot be read"):
        configuration.load(tmp_path / "absent.toml")


def test_conflicts_between_sections_are_named(toml: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        configuration.load(
            toml,
            [
                "--model.path",
                str(tmp_path / "none"),
                "--data.group_size",
                "200",
                "--trainer.backend",
                "fsd",
                "--rollout.tensor_parallel",
                "2",
            ],
        )
    assert [fault.split(":")[0] for fault in caught.value.faults] == [
        "trainer.backend",
        "model.path",
        "data.group_size",
        "rollout.tensor_parallel",
    ]


def test_data_that_is_not_there_is_a_fault_of_its_key(toml: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.source: .*/none\.jsonl is neither a file nor"):
        configuration.load(toml, ["--data.source", str(tmp_path / "none.jsonl")])
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1 + 1 =", "answer": "2"}\n')
    with pytest.raises(ConfigError, match=r"data\.source: the reward reasoning_gym scores data of"):
        configuration.load(toml, ["--data.source", str(rows)])


def test_the_resolved_config_reads_back_to_the_same(toml: Path, tmp_path: Path) -> None:
    config = configuration.load(toml, ["--data.params.min_terms", "2", "--trainer.betas", "[0.9, 0.99]"])
    resolved = tmp_path / "resolved.toml"
    resolved.write_text(configuration.to_toml(config))
    assert configuration.load(resolved) == config


def test_every_key_has_a_meaning() -> None:
    listed = list(configuration.describe())
    assert all(meaning for _, _, meaning in listed)
    assert {key.split(".")[0] for key, _, _ in listed} == set(Config.model_fields)
