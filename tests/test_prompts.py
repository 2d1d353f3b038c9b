from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aoffpolicy.config import Config
from aoffpolicy.data.prompts import PromptSource, build_eval_prompts, build_prompts, epoch_order, load_tokenizer
from aoffpolicy.errors import DataError
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
SUMS = {"source": "reasoning_gym:chain_sum", "params": {"min_terms": 2, "max_terms": 2}}


def config_of(folder: Path, data: dict[str, Any], **sections: Any) -> Config:
    """A config whose model folder has a context of 256 tokens and the character tokenizer."""
    model = folder / "model"
    if not model.exists():
        TOKENIZER.save_pretrained(model)
        (model / "config.json").write_text(json.dumps({"max_position_embeddings": 256}))
    generated = str(data["source"]).startswith("reasoning_gym:")
    reward = {"function": "reasoning_gym" if generated else "exact_match"}
    settings: dict[str, Any] = {"model": {"path": model}, "data": data, "reward": reward, **sections}
    settings["data"] = {"prompts_per_step": 4, **settings["data"]}
    return Config.model_validate(settings)


def rows_file(folder: Path, *prompts: Any) -> dict[str, Any]:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": p, "answer": str(i)}) + "\n" for i, p in enumerate(prompts)))
    return {"source": str(path)}


def text_of(source: PromptSource, uid: int) -> str:
    return TOKENIZER.decode(source[uid].token_ids_P)


# --- Tokens ----------------------------------------------------------------------------------------------------------


def test_a_chat_prompt_has_template_system_prompt_and_suffix(tmp_path: Path) -> None:
    data = rows_file(tmp_path, *["2+2?"] * 4) | {"system_prompt": "Be brief.", "suffix": " Now."}
    prompt = build_prompts(config_of(tmp_path, data), TOKENIZER)[0]
    assert TOKENIZER.decode(prompt.token_ids_P) == "<s>Be brief.<eos><u>2+2? Now.<eos><a>"
    assert prompt.token_ids_P.dtype == np.int32
    assert prompt.row["prompt"] == "2+2?"
    assert prompt.uid == 0


def test_chat_messages_keep_their_own_system_prompt_and_the_suffix_goes_to_the_last_user(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "Own."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Two?"},
    ]
    data = rows_file(tmp_path, *[messages] * 4) | {"system_prompt": "Other.", "suffix": "!"}
    source = build_prompts(config_of(tmp_path, data), TOKENIZER)
    assert text_of(source, 0) == "<s>Own.<eos><u>One?<eos><a>Yes.<eos><u>Two?!<eos><a>"
    assert source[0].row["prompt"] == messages


def test_a_plain_prompt_is_its_text_and_suffix(tmp_path: Path) -> None:
    data = rows_file(tmp_path, *["2+2="] * 4) | {"chat": False, "suffix": " "}
    assert text_of(build_prompts(config_of(tmp_path, data), TOKENIZER), 0) == "2+2= "


def test_chat_messages_without_chat_and_chat_without_template_are_errors(tmp_path: Path) -> None:
    data = rows_file(tmp_path, *[[{"role": "user", "content": "Hi"}]] * 4)
    with pytest.raises(DataError, match=r"data.chat: a prompt is a list of chat messages"):
        build_prompts(config_of(tmp_path, data | {"chat": False}), TOKENIZER)
    plain = tiny_tokenizer()
    plain.chat_template = None
    with pytest.raises(DataError, match=r"has no chat template; set data.chat = false"):
        build_prompts(config_of(tmp_path, data), plain)


def test_a_template_that_refuses_a_prompt_is_an_error_that_shows_it(tmp_path: Path) -> None:
    strict = tiny_tokenizer()
    strict.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(DataError, match=r"chat template refuses .*Hi.*no system role"):
        build_prompts(config_of(tmp_path, rows_file(tmp_path, *["Hi"] * 4)), strict)


def test_the_tokenizer_of_the_model_folder_is_loaded_and_a_missing_one_named(tmp_path: Path) -> None:
    config = config_of(tmp_path, rows_file(tmp_path, "Hi"))
    assert load_tokenizer(config)("1+1")["input_ids"] == TOKENIZER("1+1")["input_ids"]
    (tmp_path / "model" / "tokenizer.json").unlink()
    (tmp_path / "model" / "tokenizer_config.json").unlink()
    with pytest.raises(DataError, match=r"model.path: .*the tokenizer cannot be loaded"):
        load_tokenizer(config)


# --- Filters ---------------------------------------------------------------------------------------------------------


def test_empty_and_too_long_prompts_are_left_out_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = rows_file(tmp_path, "a", "", "b", "x" * 50, "  ", "c", [{"role": "system", "content": "x"}], "d")
    with caplog.at_level(logging.INFO):
        source = build_prompts(config_of(tmp_path, data | {"max_prompt_tokens": 20, "shuffle": False}), TOKENIZER)
    assert [source[uid].row["prompt"] for uid in range(4)] == ["a", "b", "c", "d"]
    assert (source.counts.kept, source.counts.dropped_empty, source.counts.dropped_too_long) == (4, 3, 1)
    assert "8 rows read, 4 kept, dropped_too_long 1, dropped_empty 3" in caplog.text


@pytest.mark.parametrize(("bad", "why"), [("", "is empty"), ("x" * 50, r"has 57 tokens, more than 20")])
def test_bad_prompts_can_be_an_error_instead(tmp_path: Path, bad: str, why: str) -> None:
    data = rows_file(tmp_path, "a", bad) | {"max_prompt_tokens": 20, "bad_prompts": "fail"}
    with pytest.raises(DataError, match=f"row 1: prompt {why}"):
        build_prompts(config_of(tmp_path, data), TOKENIZER)


def test_a_prompt_of_exactly_the_limit_is_kept(tmp_path: Path) -> None:
    data = rows_file(tmp_path, *["x" * 20] * 4) | {"chat": False}
    assert build_prompts(config_of(tmp_path, data | {"max_prompt_tokens": 20}), TOKENIZER).counts.kept == 4
    with pytest.raises(DataError, match=r"no usable prompts .at most 19 tokens each.: 4 rows read, 0 kept"):
        build_prompts(config_of(tmp_path, data | {"max_prompt_tokens": 19}), TOKENIZER)


def test_prompts_leave_room_for_a_completion_in_the_models_context(tmp_path: Path) -> None:
    data = rows_file(tmp_path, "x" * 100, *["y"] * 4) | {"chat": False}
    roomy = build_prompts(config_of(tmp_path, data, rollout={"max_tokens": 156}), TOKENIZER)
    tight = build_prompts(config_of(tmp_path, data, rollout={"max_tokens": 157}), TOKENIZER)
    assert (roomy.counts.dropped_too_long, tight.counts.dropped_too_long) == (0, 1)
    with pytest.raises(DataError, match=r"rollout.max_tokens: 256 leaves no room"):
        build_prompts(config_of(tmp_path, data, rollout={"max_tokens": 256}), TOKENIZER)


def test_endless_data_without_usable_prompts_are_given_up(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no usable prompts .at most 5 tokens each.: 1\d\d\d rows read, 0 kept"):
        build_prompts(config_of(tmp_path, SUMS | {"max_prompt_tokens": 5}), TOKENIZER)


# --- Order and epochs ------------------------------------------------------------------------------------------------


def test_every_epoch_has_every_prompt_once_in_its_own_order(tmp_path: Path) -> None:
    data = rows_file(tmp_path, *[f"{i}?" for i in range(20)]) | {"epochs": 3}
    source = build_prompts(config_of(tmp_path, data), TOKENIZER)
    assert source.size == 60
    epochs = [[source[uid].row["prompt"] for uid in range(20 * e, 20 * e + 20)] for e in range(3)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert [source[uid].uid for uid in range(60)] == list(range(60))


def test_the_end_of_the_data_is_an_index_error(tmp_path: Path) -> None:
    data = rows_file(tmp_path, *["a", "b", "c"]) | {"epochs": 2}
    source = build_prompts(config_of(tmp_path, data, run={"steps": 1}), TOKENIZER)
    assert source[5].uid == 5
    for uid in (6, 7, 1000, -1):
        with pytest.raises(IndexError):
            source[uid]
    assert len(list(source)) == 6


def test_without_epochs_the_data_go_round_for_ever(tmp_path: Path) -> None:
    source = build_prompts(config_of(tmp_path, rows_file(tmp_path, "a", "b", "c")), TOKENIZER)
    assert source.size is None
    assert sorted(source[uid].row["prompt"] for uid in range(300_000, 300_003)) == ["a", "b", "c"]


def test_without_shuffle_the_order_is_that_of_the_file(tmp_path: Path) -> None:
    data = rows_file(tmp_path, *"abcdef") | {"shuffle": False}
    source = build_prompts(config_of(tmp_path, data), TOKENIZER)
    assert [source[uid].row["prompt"] for uid in range(8)] == [*"abcdef", "a", "b"]


def test_a_prompt_depends_on_nothing_asked_before(tmp_path: Path) -> None:
    config = config_of(tmp_path, rows_file(tmp_path, *[f"{i}?" for i in range(9)]))
    forward = build_prompts(config, TOKENIZER)
    backward = build_prompts(config, TOKENIZER)
    expected = [forward[uid].row for uid in range(40)]
    assert [backward[uid].row for uid in reversed(range(40))] == expected[::-1]


def test_the_order_depends_on_the_seed(tmp_path: Path) -> None:
    data = rows_file(tmp_path, *[f"{i}?" for i in range(20)])
    orders = [
        [
            build_prompts(config_of(tmp_path, data, run={"seed": seed}), TOKENIZER)[uid].row["prompt"]
            for uid in range(20)
        ]
        for seed in (0, 0, 1)
    ]
    assert orders[0] == orders[1] != orders[2]


def test_the_order_is_the_same_in_another_process_and_for_ever() -> None:
    code = "from aoffpolicy.data.prompts import epoch_order; print(epoch_order(3, 1, 10).tolist())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "123"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert json.loads(done.stdout) == epoch_order(3, 1, 10).tolist() == FIXED_ORDER


FIXED_ORDER = [0, 6, 2, 1, 3, 7, 4, 9, 8, 5]


def test_too_few_prompts_for_one_step_are_an_error(tmp_path: Path) -> None:
    data = rows_file(tmp_path, "a", "b", "") | {"epochs": 1}
    with pytest.raises(DataError, match=r"2 usable prompts x 1 epochs do not fill one step"):
        build_prompts(config_of(tmp_path, data), TOKENIZER)


def test_data_that_end_before_the_steps_are_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = rows_file(tmp_path, *"abcdef") | {"epochs": 2}
    build_prompts(config_of(tmp_path, data, run={"steps": 4}), TOKENIZER)
    assert "12 prompts in 2 epochs end before run.steps = 4" in caplog.text


# --- Generated data --------------------------------------------------------------------------------------------------


def test_endless_data_are_generated_as_far_as_needed_and_a_longer_run_begins_the_same(tmp_path: Path) -> None:
    short = build_prompts(config_of(tmp_path, SUMS, run={"steps": 2}), TOKENIZER)
    long = build_prompts(config_of(tmp_path, SUMS, run={"steps": 20}), TOKENIZER)
    assert (short.counts.kept, long.counts.kept) == (8, 80)
    assert [short[uid].row for uid in range(8)] == [long[uid].row for uid in range(8)]
    assert short[30].row == long[30].row  # replacements of dropped groups are beyond what the steps need
    assert len({short[uid].row["prompt"] for uid in range(8)}) == 8


def test_generated_data_with_a_size_have_epochs(tmp_path: Path) -> None:
    data = SUMS | {"params": {"size": 6}, "epochs": 2}
    source = build_prompts(config_of(tmp_path, data), TOKENIZER)
    assert source.size == 12
    assert {source[uid].row["prompt"] for uid in range(6)} == {source[uid].row["prompt"] for uid in range(6, 12)}


def test_epochs_of_endless_data_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data.epochs: .* give data.params.size"):
        build_prompts(config_of(tmp_path, SUMS | {"epochs": 1}), TOKENIZER)


# --- Evaluation ------------------------------------------------------------------------------------------------------


def test_without_evaluation_there_are_no_eval_prompts(tmp_path: Path) -> None:
    assert build_eval_prompts(config_of(tmp_path, SUMS), TOKENIZER) is None
    held_out = {"source": SUMS["source"]}
    assert build_eval_prompts(config_of(tmp_path, SUMS, eval=held_out), TOKENIZER) is None


def test_eval_prompts_are_the_first_usable_rows_in_order(tmp_path: Path) -> None:
    held_out = {"every": 1, "prompts": 3, **rows_file(tmp_path, "a", "", "b", "c", "d")}
    prompts = build_eval_prompts(config_of(tmp_path, rows_file(tmp_path, "a", "", *"bcd"), eval=held_out), TOKENIZER)
    assert prompts is not None
    assert [(prompt.uid, prompt.row["prompt"]) for prompt in prompts] == [(0, "a"), (1, "b"), (2, "c")]


def test_generated_eval_prompts_are_not_those_of_training(tmp_path: Path) -> None:
    hard = {"source": "reasoning_gym:chain_sum", "params": {"min_digits": 4, "max_digits": 4}}
    config = config_of(tmp_path, hard, run={"steps": 25}, eval={"every": 1, "prompts": 100, **hard})
    prompts = build_eval_prompts(config, TOKENIZER)
    training = build_prompts(config, TOKENIZER)
    assert prompts is not None
    assert len(prompts) == 100
    assert not {p.row["prompt"] for p in prompts} & {training[uid].row["prompt"] for uid in range(100)}


def test_eval_data_without_usable_prompts_are_an_error(tmp_path: Path) -> None:
    held_out = {"every": 1, **rows_file(tmp_path, "", "")}
    with pytest.raises(DataError, match="no usable prompts"):
        build_eval_prompts(config_of(tmp_path, SUMS, reward={"function": "exact_match"}, eval=held_out), TOKENIZER)


def test_a_system_prompt_without_chat_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data.system_prompt needs data.chat = true"):
        config_of(tmp_path, SUMS | {"chat": False, "system_prompt": "x"})
