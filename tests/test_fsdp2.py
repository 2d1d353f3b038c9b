from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from aoffpolicy.algorithms.grpo import Grpo
from aoffpolicy.config import Config
from aoffpolicy.trainer.fsdp2 import Fsdp2
from tests.groups import batch, group
from tests.tiny import tiny_llama, tiny_qwen3
from tests.trainer_ranks import Outcome, config, on_ranks, train_steps

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(200)]
SAME = partial(pytest.approx, rel=1e-4)


def test_ranks_and_token_budgets_change_neither_gradient_norm_nor_loss(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path)
    (whole,) = on_ranks(1, train_steps, config(model, token_budget=10_000), 2)
    others = [
        on_ranks(1, train_steps, config(model, token_budget=16), 2)[0],
        *on_ranks(2, train_steps, config(model, token_budget=10_000), 2),
        *on_ranks(2, train_steps, config(model, token_budget=24, logprob_chunk=2), 2),
    ]
    for other in others:
        for step in range(2):
            for key in ("grad_norm", "loss", "logprob_abs_diff", "entropy", "importance_ratio_max", "train_tokens"):
                assert other["metrics"][step][key] == SAME(whole["metrics"][step][key], abs=1e-7), key


def test_the_gradient_norm_is_that_of_a_plain_loop_over_padded_samples(tmp_path: Path) -> None:
    model_path = tiny_llama(tmp_path)
    settings = config(model_path)
    (ours,) = on_ranks(1, train_steps, settings, 1)

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    algorithm = Grpo(settings.algorithm)
    groups = batch()
    tokens = sum(sample.completion_tokens for g in groups for sample in g.samples)
    total = torch.zeros(())
    for g, advantages in zip(groups, algorithm.advantages(groups), strict=True):
        for sample, advantage in zip(g.samples, advantages, strict=True):
            ids = torch.as_tensor(sample.token_ids_T, dtype=torch.int64)
            mask = torch.as_tensor(sample.loss_mask_T[1:])
            logprobs = model(ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
            logprobs = logprobs.gather(-1, ids[1:, None]).squeeze(-1)[mask]
            behaviour = torch.as_tensor(sample.behaviour_logprobs_T[1:])[mask]
            total = total + algorithm.loss(logprobs, behaviour, torch.tensor(float(advantage)), None)[0].sum()
    (total / tokens).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert ours["metrics"][0]["grad_norm"] == SAME(float(norm))
    assert ours["metrics"][0]["loss"] == SAME(total.item() / tokens)


def test_more_ranks_than_groups_is_an_ordinary_case(tmp_path: Path) -> None:
    model = tiny_qwen3(tmp_path)
    only = (group(0),)
    (alone,) = on_ranks(1, partial(train_steps, groups=only), config(model), 1)
    both = on_ranks(2, partial(train_steps, groups=only), config(model), 1)
    assert both[1]["metrics"] == both[0]["metrics"]
    assert both[0]["metrics"][0]["grad_norm"] == SAME(alone["metrics"][0]["grad_norm"])


def test_weights_are_exported_whole_under_their_hugging_face_names_and_learning_rate_zero_keeps_them(
    tmp_path: Path,
) -> None:
    model = tiny_llama(tmp_path, tie=True)
    outcomes = on_ranks(2, train_steps, config(model, lr=0.0, kl_coef=0.1), 2)
    stored = load_file(model / "model.safetensors")
    for outcome in outcomes:
        assert outcome["weights"].keys() == stored.keys()
        assert all(torch.equal(tensor, stored[name]) for name, tensor in outcome["weights"].items())
        assert outcome["metrics"][0]["kl_reference"] == pytest.approx(0, abs=1e-9)
        assert outcome["metrics"][1]["grad_norm"] == SAME(outcome["metrics"][0]["grad_norm"])


def test_another_family_of_models_trains_without_its_dropout(tmp_path: Path) -> None:
    sizes = dict(vocab_size=96, n_positions=64, n_embd=32, n_layer=2, n_head=4)
    GPT2LMHeadModel(GPT2Config(**sizes, attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5)).save_pretrained(tmp_path)
    (outcome,) = on_ranks(1, train_steps, config(tmp_path, lr=0.0), 2)
    assert outcome["metrics"][1]["grad_norm"] == SAME(outcome["metrics"][0]["grad_norm"])


def test_a_gradient_that_is_not_finite_ends_the_step_and_not_the_weights(tmp_path: Path) -> None:
    (outcome,) = on_ranks(1, overflow, config(tiny_llama(tmp_path)))
    assert "gradient norm is" in outcome["error"]
    assert outcome["unchanged"]


def overflow(settings: Config) -> Outcome:
    backend = Fsdp2(settings, torch.device("cpu"))
    before = {name: tensor.clone() for name, tensor in backend.export_weights()}
    (only,) = batch(1)
    try:
        backend.train([only], [np.full(4, np.inf, dtype=np.float32)], temperature=1.0)
    except FloatingPointError as error:
        unchanged = all(torch.equal(tensor, before[name]) for name, tensor in backend.export_weights())
        return {"error": str(error), "unchanged": unchanged}
    return {"error": "", "unchanged": False}


def test_the_learning_rate_warms_up_linearly(tmp_path: Path) -> None:
    (outcome,) = on_ranks(1, train_steps, config(tiny_llama(tmp_path), lr=1.0, warmup_steps=3), 5)
    assert [m["lr"] for m in outcome["metrics"]] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_activation_checkpointing_changes_nothing_but_memory(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path)
    (plain,) = on_ranks(1, train_steps, config(model), 1)
    (checkpointed,) = on_ranks(1, train_steps, config(model, activation_checkpointing=True), 1)
    assert checkpointed["metrics"][0]["grad_norm"] == SAME(plain["metrics"][0]["grad_norm"])
