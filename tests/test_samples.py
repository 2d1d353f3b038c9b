from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from aoffpolicy.errors import DataError
from aoffpolicy.samples import Prompt, Sample, SampleGroup
from aoffpolicy.samples.__main__ import main
from aoffpolicy.samples.index import SampleIndex
from aoffpolicy.samples.log import CompletionRecord, GroupRecord, SampleLog, files_of, record_of


def group(uid: int = 7, texts: tuple[str, ...] = ("4", "5"), **row: object) -> SampleGroup:
    mask_T = np.array([False, False, True, True])
    samples = tuple(
        Sample(
            token_ids_T=np.arange(4, dtype=np.int32),
            loss_mask_T=mask_T,
            behaviour_logprobs_T=np.zeros(4, np.float32),
            versions_T=np.array([-1, -1, 2, 3], np.int32),
            text=text,
            finish_reason="stop" if index else "length",
            reward=float(index),
        )
        for index, text in enumerate(texts)
    )
    prompt = Prompt(uid, np.arange(2, dtype=np.int32), {"prompt": "2 + 3 =", "answer": "5", **row})
    return SampleGroup(prompt, samples, {"rollout": 1, "generate_s": 1.5, "score_s": 0.25})


def record(step: int, *, rewards: tuple[float, ...] = (0.0, 1.0), seconds: float = 1.0, text: str = "5") -> GroupRecord:
    completions = tuple(CompletionRecord(text, reward, reward - 0.5, 3, "stop", (step, step)) for reward in rewards)
    return GroupRecord(step, "train", step, 100 + step, "2 + 3 =", "5", completions, 0, seconds, 0.1)


def fill(folder: Path, *records: GroupRecord, max_bytes: int = 10**6, files: int = 2) -> SampleLog:
    log = SampleLog(folder, max_bytes=max_bytes, files=files)
    for each in records:
        log.append(each)
    return log


def test_a_record_tells_who_generated_what_under_which_version_and_what_it_was_worth() -> None:
    of_tokens = np.array([-1.5, -0.5, 1.0, 1.0], np.float32)
    kept = record_of(group(), 4, "train", 3, of_tokens)
    assert (kept.step, kept.version, kept.uid, kept.prompt, kept.answer) == (4, 3, 7, "2 + 3 =", "5")
    assert (kept.rollout, kept.generate_s, kept.score_s, kept.reward_mean) == (1, 1.5, 0.25, 0.5)
    assert kept.completions == (
        CompletionRecord("4", 0.0, -1.0, 2, "length", (2, 3)),
        CompletionRecord("5", 1.0, 1.0, 2, "stop", (2, 3)),
    )


def test_an_evaluation_has_no_advantages_and_chat_messages_keep_their_roles() -> None:
    chat = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2 + 3"}]
    kept = record_of(group(prompt=chat), 4, "eval", 5, None)
    assert [c.advantage for c in kept.completions] == [None, None]
    assert kept.prompt == "system: Add.\nuser: 2 + 3"


def test_files_rotate_by_size_and_stay_within_the_bound(tmp_path: Path) -> None:
    fill(tmp_path, *(record(step) for step in range(50)), max_bytes=1000, files=3)
    files = files_of(tmp_path)
    assert [file.name for file in files] == ["samples.2.jsonl", "samples.1.jsonl", "samples.jsonl"]
    assert all(file.stat().st_size <= 1000 for file in files)
    steps = [json.loads(line)["step"] for file in files for line in file.read_text().splitlines()]
    assert steps == list(range(steps[0], 50))
    assert len(steps) == 6


def test_a_record_longer_than_a_file_has_one_of_its_own(tmp_path: Path) -> None:
    fill(tmp_path, record(0), record(1, text="9" * 5000), record(2), max_bytes=1000, files=3)
    assert [len(file.read_text().splitlines()) for file in files_of(tmp_path)] == [1, 1, 1]


def test_with_one_file_rotation_starts_it_anew(tmp_path: Path) -> None:
    fill(tmp_path, *(record(step) for step in range(50)), max_bytes=1000, files=1)
    assert [file.name for file in files_of(tmp_path)] == ["samples.jsonl"]
    with SampleIndex(tmp_path) as index:
        assert index[len(index) - 1] == record(49)


def test_a_resumed_run_drops_what_it_will_do_again_and_a_line_cut_short(tmp_path: Path) -> None:
    log = fill(tmp_path, *(record(step) for step in range(4)))
    with (tmp_path / "samples.jsonl").open("a") as file:
        file.write('{"step": 4, "pur')
    log.keep_before(2)
    log.append(record(2))
    with SampleIndex(tmp_path) as index:
        assert list(index) == [record(0), record(1), record(2)]


def test_groups_come_in_the_order_asked_for_and_only_those_of_a_step(tmp_path: Path) -> None:
    slow, good, poor = record(0, seconds=9.0), record(1, rewards=(1.0, 1.0)), record(2, rewards=(0.0, 0.0))
    fill(tmp_path, slow, good, poor)
    for order, first in (("time", slow), ("slowest", slow), ("best", good), ("worst", poor)):
        with SampleIndex(tmp_path, order=order) as index:
            assert (order, index[0]) == (order, first)
            assert len(index) == 3
    with SampleIndex(tmp_path, step=1) as index:
        assert list(index) == [good]


def test_what_the_run_rotates_away_meanwhile_stays_readable(tmp_path: Path) -> None:
    log = fill(tmp_path, record(0), record(1), max_bytes=500, files=1)
    with SampleIndex(tmp_path) as index:
        before = list(index)
        for step in range(2, 20):
            log.append(record(step))
        assert list(index) == before


def test_a_broken_line_is_named_by_file_and_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path, record(0))
    with (tmp_path / "samples.jsonl").open("a") as file:
        file.write('{"step": "x"}\n')
    with pytest.raises(DataError, match=r"samples\.jsonl, row 2: no record of samples"):
        SampleIndex(tmp_path)
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("where", ["nowhere", "."])
def test_a_folder_without_samples_is_one_line_and_exit_1(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([where]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_without_a_terminal_pages_are_printed_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    fill(tmp_path, *(record(step) for step in range(5)))
    assert main([str(tmp_path), "--limit", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert next(line for line in lines if line.startswith("group")).startswith("group 1 of 5   step 0   version 0")
    assert lines[-1].startswith("3 more;")
    assert max(map(len, lines)) <= 80


def test_json_has_every_group_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path, *(record(step) for step in range(30)))
    assert main([str(tmp_path), "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["step"] for line in lines] == list(range(30))
    assert lines[0]["completions"][1]["advantage"] == 0.5


def test_paging_goes_forward_back_and_to_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    from aoffpolicy.samples import __main__ as viewer

    fill(tmp_path, *(record(step) for step in range(5)))
    shown: list[int] = []
    words = iter(["", "n", "p", "5", "n", "99", "p", "nonsense", "q"])
    monkeypatch.setattr(Console, "input", lambda *_: next(words))
    monkeypatch.setattr(viewer, "page", lambda record, position, total: shown.append(position + 1) or "")
    with SampleIndex(tmp_path) as index:
        viewer._page(index, Console(quiet=True))
    assert shown == [1, 2, 3, 2, 5, 5, 5, 4, 4]


def test_a_completion_cannot_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path, record(0, text="\x1b[2J\x1b]0;owned\x07 [bold]5[/bold] \u202e"))
    assert main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\x07" not in out and "\u202e" not in out
    assert "[bold]5[/bold]" in out  # markup is shown, not obeyed
