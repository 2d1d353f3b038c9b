from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from aoffpolicy import timeline
from aoffpolicy.errors import DataError
from aoffpolicy.timeline import Span, Timeline, read_timeline, write_timeline

GENERATE = Span("generate", "generate 1", 10.0, 4.0, step=1, version=0)
TRAIN = Span("train", "train 0", 10.0, 5.0, step=0, version=0)
WORKER = Span("rollout 3", "generate v0", 10.5, 3.0)


def written(path: Path, *spans: Span) -> Path:
    line = Timeline()
    for span in spans:
        line.add(span)
    write_timeline(path, *line.snapshot())
    return path


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    path = written(tmp_path / "timeline.json", WORKER, GENERATE, TRAIN)
    assert read_timeline(path) == [WORKER, GENERATE, TRAIN]
    assert [p.name for p in tmp_path.iterdir()] == ["timeline.json"]


def test_phases_and_workers_are_two_groups_and_every_track_has_its_name(tmp_path: Path) -> None:
    events = json.loads(written(tmp_path / "t.json", WORKER, GENERATE, TRAIN).read_text())["traceEvents"]
    names = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    assert names == {(0, track) for track in timeline.PHASE_TRACKS} | {(1, "rollout 3")}
    box = next(e for e in events if e["name"] == "train 0")
    assert (box["ph"], box["ts"], box["dur"]) == ("X", 10_000_000, 5_000_000)


def test_spans_of_a_track_that_overlap_are_drawn_in_lanes(tmp_path: Path) -> None:
    ahead = [Span("generate", f"generate {step}", step, 2.5, step=step) for step in range(4)]
    events = json.loads(written(tmp_path / "t.json", *ahead).read_text())["traceEvents"]
    boxes = [e for e in events if e["ph"] == "X"]
    by_row: dict[int, list[tuple[int, int]]] = {}
    for box in boxes:
        by_row.setdefault(box["tid"], []).append((box["ts"], box["ts"] + box["dur"]))
    assert len(by_row) == 3
    for row in by_row.values():
        assert all(end <= start for (_, end), (start, _) in pairwise(row))
    assert [span.track for span in read_timeline(tmp_path / "t.json")] == ["generate"] * 4


def test_the_oldest_spans_go_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(timeline, "MAX_SPANS", 3)
    path = written(tmp_path / "t.json", *(Span("train", f"train {step}", step, 1.0, step=step) for step in range(9)))
    assert [span.step for span in read_timeline(path)] == [6, 7, 8]


@pytest.mark.parametrize("text", ["", "[]", '{"traceEvents": [{"ph": "X"}]}', '{"traceEvents": [3]}'])
def test_a_file_that_is_no_timeline_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(DataError, match=r"t\.json: not the timeline of a run"):
        read_timeline(tmp_path / "t.json")
