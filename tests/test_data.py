from __future__ import annotations

import json
import logging
import os
import random
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
from reasoning_gym.factory import DATASETS

from aoffpolicy.data.generated import CHUNK, HASH_SEED_DEPENDENT, create, entry_of, generate
from aoffpolicy.data.rows import Row, pack_row, unpack_row
from aoffpolicy.data.source import load_rows
from aoffpolicy.errors import DataError
from aoffpolicy.reward.functions import row_check
from aoffpolicy.transport.messages import Score, decode, encode

VERL_ROW = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "2 + 2?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"split": "train", "index": 0},
}


def rows_of(path: Path, reward: str = "exact_match") -> list[Row]:
    return list(load_rows(str(path), {}, seed=0, check=row_check(reward)).rows)


def jsonl(path: Path, *lines: Any) -> Path:
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


# --- Files -----------------------------------------------------------------------------------------------------------


def test_jsonl_rows_keep_their_order_and_their_columns(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path / "a.jsonl",
        {"prompt": "1 + 1?", "answer": "2", "level": 3},
        "\n",
        {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "é?"}], "answer": 5},
    )
    assert rows_of(path) == [
        {"prompt": "1 + 1?", "answer": "2", "level": 3},
        {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "é?"}], "answer": 5},
    ]


def test_parquet_rows_are_those_written(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i} + 1?", "answer": str(i + 1)} for i in range(5)]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert rows_of(tmp_path / "a.parquet") == rows


def test_the_layout_of_verls_data_preparation_is_read_as_it_is(tmp_path: Path) -> None:
    parquet.write_table(arrow.Table.from_pylist([VERL_ROW, VERL_ROW]), tmp_path / "a.parquet")
    jsonl(tmp_path / "a.jsonl", VERL_ROW, VERL_ROW)
    for name in ("a.parquet", "a.jsonl"):
        assert rows_of(tmp_path / name) == [{**VERL_ROW, "answer": "4"}] * 2


def test_faults_are_named_by_file_line_and_key_all_at_once(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path / "bad.jsonl",
        {"prompt": "fine?", "answer": "yes"},
        '{"prompt": "cut off\n',
        {"answer": "1"},
        {"prompt": 7, "answer": "1"},
        {"prompt": "?"},
        {"prompt": "?", "answer": ["1"]},
        {"prompt": [{"role": "user"}], "answer": "1"},
        [1, 2],
    )
    with pytest.raises(DataError) as caught:
        rows_of(path)
    lines = str(caught.value).splitlines()
    expected = [
        "line 2: not JSON",
        "line 3: prompt: the key is missing",
        "line 4: prompt: expected text or a list of chat messages, got int",
        "line 5: answer: the key is missing",
        "line 6: answer: expected text or a number, got list",
        "line 7: prompt: message 0: content must be text, got NoneType",
        "line 8: expected an object, got list",
    ]
    assert len(lines) == len(expected)
    for line, fault in zip(lines, expected, strict=True):
        assert line.startswith(f"{path}, {fault}")


def test_bytes_that_are_no_utf8_are_a_fault_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "fine", "answer": "1"}\n{"prompt": "\xff\xfe", "answer": "1"}\n')
    with pytest.raises(DataError, match="line 2: not JSON"):
        rows_of(path)


def test_only_the_first_twenty_faults_are_listed_and_the_rest_counted(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", *[{"answer": "1"}] * 50)
    with pytest.raises(DataError) as caught:
        rows_of(path)
    lines = str(caught.value).splitlines()
    assert len(lines) == 21
    assert lines[-1] == "... and 30 more"


def test_parquet_faults_name_the_row(tmp_path: Path) -> None:
    rows = [{"prompt": "?", "answer": "1"}, {"prompt": None, "answer": "1"}, {"prompt": "?", "answer": None}]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    with pytest.raises(DataError) as caught:
        rows_of(tmp_path / "a.parquet")
    lines = str(caught.value).splitlines()
    assert "row 1: prompt: expected text" in lines[0]
    assert "row 2: answer: the key is missing" in lines[1]


def test_a_users_own_reward_needs_no_answer(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"prompt": "Write a poem."})
    assert rows_of(path, "my.rewards:poetry") == [{"prompt": "Write a poem."}]


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("missing.jsonl", None, "no such file"),
        ("data.csv", b"a,b", "expected a file ending in .jsonl or .parquet"),
        ("empty.jsonl", b"", "holds no rows"),
        ("broken.parquet", b"PAR1 not really", "cannot be read as parquet"),
    ],
)
def test_a_file_that_cannot_be_read_is_an_error_that_names_it(
    tmp_path: Path, name: str, content: bytes | None, fault: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=fault) as caught:
        rows_of(tmp_path / name)
    assert name in str(caught.value)


def test_a_file_takes_no_parameters(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="a file takes no parameters, got size"):
        load_rows(str(jsonl(tmp_path / "a.jsonl", {"prompt": "?", "answer": "1"})), {"size": 3}, seed=0)


# --- Generated data --------------------------------------------------------------------------------------------------


def test_generated_rows_are_those_of_the_data_set_and_go_on_beyond_a_chunk() -> None:
    dataset = create("chain_sum", {"size": CHUNK + 3, "seed": 5, "max_terms": 3})
    rows = list(islice(generate("chain_sum", {"max_terms": 3}, seed=5), CHUNK + 3))
    assert [row["prompt"] for row in rows] == [entry["question"] for entry in dataset]


def test_a_size_ends_generated_data_and_a_seed_parameter_wins() -> None:
    finite = load_rows("reasoning_gym:chain_sum", {"size": 7, "seed": 1}, seed=2)
    assert not finite.endless
    rows = list(finite.rows)
    assert len(rows) == 7
    endless = load_rows("reasoning_gym:chain_sum", {}, seed=1)
    assert endless.endless
    assert [row["prompt"] for row in islice(endless.rows, 7)] == [row["prompt"] for row in rows]


@pytest.mark.parametrize("name", ["acre", "list_functions", "gsm_symbolic"])
def test_data_sets_that_draw_all_rows_at_once_do_not_depend_on_how_many_are_used(name: str) -> None:
    few = list(islice(load_rows(f"reasoning_gym:{name}", {}, seed=3).rows, 5))
    more = list(islice(load_rows(f"reasoning_gym:{name}", {}, seed=3).rows, 40))
    assert more[:5] == few


def test_an_unknown_data_set_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(DataError, match=r"reasoning_gym:chainsum: no such data set .*did you mean chain_sum"):
        next(load_rows("reasoning_gym:chainsum", {}, seed=0).rows)


@pytest.mark.parametrize("params", [{"min_term": 2}, {"min_terms": 5, "max_terms": 2}, {"size": 0}, {"size": "10"}])
def test_wrong_parameters_are_an_error_that_names_the_data_set(params: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="reasoning_gym:chain_sum: "):
        next(load_rows("reasoning_gym:chain_sum", params, seed=0).rows)


def test_a_row_whose_answer_the_reward_cannot_use_is_an_error() -> None:
    with pytest.raises(DataError, match="reasoning_gym:boxnet, row 0: answer: the key is missing"):
        next(load_rows("reasoning_gym:boxnet", {}, seed=0, check=row_check("last_number")).rows)


def test_integers_beyond_64_bits_cannot_travel_and_say_so() -> None:
    with pytest.raises(ValueError, match="cannot be sent to the reward"):
        pack_row({"prompt": "?", "answer": 2**70})


def test_a_composite_data_set_generates_and_scores() -> None:
    params = {
        "datasets": [{"name": "chain_sum", "weight": 1, "config": {}}, {"name": "rearc", "weight": 1, "config": {}}]
    }
    scorer = create("composite", {**params, "size": 10, "seed": 0})
    for row in islice(generate("composite", params, seed=0), 6):
        assert scorer.score_answer(row["answer"], entry_of(unpack_row(pack_row(row)))) == 1.0


def score(dataset: Any, answer: str | None, entry: dict[str, Any]) -> float | str:
    try:
        return float(dataset.score_answer(answer, entry))
    except Exception as error:
        return type(error).__name__


SLOW = {"knight_swap", "composite"}
SAMPLED = sorted(random.Random(0).sample(sorted(set(DATASETS) - SLOW), 20))


def assert_score_survives(name: str) -> None:
    """Scores of right and wrong answers are the same before and after the wire, by a scorer of another size."""
    original = create(name, {"size": 20, "seed": 3})
    scorer = create(name, {"size": 10, "seed": 0})
    rows = list(islice(generate(name, {"size": 20}, seed=3), 3))
    for index, row in enumerate(rows):
        arrived = decode(encode(Score(row=unpack_row(pack_row(row)), completions=("?",))), Score).row
        entry = original[index] if name not in HASH_SEED_DEPENDENT else entry_of(row)
        for answer in (row["answer"], rows[index - 1]["answer"], "7", "yes", "a, b", ""):
            assert score(scorer, answer, entry_of(arrived)) == score(original, answer, entry), (name, answer)


# Data sets that leave files open are not ours to mend.
careless = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")


@careless
@pytest.mark.parametrize("name", sorted({"arc_agi", "graph_color", "knights_knaves", "rearc", *SAMPLED}))
def test_scores_survive_the_wire(name: str) -> None:
    assert_score_survives(name)


def test_rows_with_fractions_and_huge_integers_travel_and_score() -> None:
    for name, count in (("gsm_symbolic", 60), ("codeio", 400)):
        scorer = create(name, {"size": 10, "seed": 0})
        for row in islice(generate(name, {}, seed=0), count):
            assert scorer.score_answer(row["answer"], entry_of(unpack_row(pack_row(row)))) == 1.0


@careless
@pytest.mark.multiprocess
def test_scores_of_every_data_set_survive_the_wire() -> None:
    for name in sorted(set(DATASETS) - SLOW):
        assert_score_survives(name)


def test_data_sets_that_change_with_the_hash_seed_are_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        next(generate("word_ladder", {}, seed=0))
        next(generate("chain_sum", {}, seed=0))
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == (1 if sys.flags.hash_randomization else 0)
    assert all("word_ladder" in message and "PYTHONHASHSEED=0" in message for message in warned)


@pytest.mark.multiprocess
def test_generated_rows_are_the_same_in_every_process_unless_warned_about() -> None:
    code = (
        "import hashlib, sys; from itertools import islice; from aoffpolicy.data.generated import generate\n"
        "for name in sys.argv[1:]:\n"
        "    rows = repr([(r['prompt'], r['answer']) for r in islice(generate(name, {}, 7), 4)])\n"
        "    print(name, hashlib.md5(rows.encode()).hexdigest())\n"
    )
    names = sorted(set(DATASETS) - {"composite"})
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code, *names],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=100,
        ).stdout.splitlines()
        for seed in ("1", "2")
    ]
    changed = {one.split()[0] for one, two in zip(*outputs, strict=True) if one != two}
    assert changed <= HASH_SEED_DEPENDENT
