from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from aoffpolicy import algorithms
from aoffpolicy.algorithms import Tokens, Totals
from aoffpolicy.config import Config
from aoffpolicy.errors import NonfiniteError, TrainerError
from aoffpolicy.samples import SampleGroup
from aoffpolicy.trainer.fsdp2 import Fsdp2
from aoffpolicy.trainer.packing import group_trained_tokens
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
    algorithm = algorithms.build(settings)
    groups = batch()
    totals = Totals(tokens=sum(map(group_trained_tokens, groups)), sequences=sum(len(g.samples) for g in groups))
    total = torch.zeros(())
    for g, advantages in zip(groups, algorithm.advantages(groups), strict=True):
        ends = np.cumsum([sample.completion_tokens for sample in g.samples])
        for sample, advantage in zip(g.samples, np.split(advantages, ends[:-1]), strict=True):
            ids = torch.as_tensor(sample.token_ids_T, dtype=torch.int64)
            mask = torch.as_tensor(sample.loss_mask_T[1:])
            logprobs = model(ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
            logprobs = logprobs.gather(-1, ids[1:, None]).squeeze(-1)[mask]
            tokens = Tokens(
                logprobs_N=logprobs,
                behaviour_N=torch.as_tensor(sample.behaviour_logprobs_T[1:])[mask],
                proximal_N=logprobs.detach(),
                advantage_N=torch.as_tensor(advantage),
                sequence_N=torch.zeros(len(logprobs), dtype=torch.int64),
                sequences=1,
            )
            total = total + algorithm.loss(tokens, totals)[0].sum()
    total.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert ours["metrics"][0]["grad_norm"] == SAME(float(norm))
    assert ours["metrics"][0]["loss"] == SAME(total.item())


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


VARIANTS = [
    {"name": "gspo", "kl_coef": 0.1},
    {"name": "rloo"},
    {"name": "cispo", "mask": "sequence_mean", "mask_low": 0.9},
    {"name": "dapo", "passes": 3, "ratio": "proximal", "correction": "sequence", "correction_cap": 1.1},
]


@pytest.mark.timeout(400)
def test_no_algorithms_gradient_depends_on_ranks_or_micro_batches(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path)
    (whole,) = on_ranks(1, train_variants, model, 10_000)
    for other in (*on_ranks(1, train_variants, model, 16), *on_ranks(2, train_variants, model, 24)):
        for variant, ours, expected in zip(VARIANTS, other["metrics"], whole["metrics"], strict=True):
            assert ours.keys() == expected.keys()
            for key in ours.keys() - {
                "packed_tokens",
                "last_pass_packed_tokens",
            }:  # a group over the budget repeats its prompt
                assert ours[key] == SAME(expected[key], abs=1e-6), (variant, key)


def train_variants(model: Path, token_budget: int) -> Outcome:
    outcomes = (train_steps(config(model, token_budget=token_budget, **variant), 1) for variant in VARIANTS)
    return {"metrics": [outcome["metrics"][0] for outcome in outcomes]}


def test_several_passes_move_away_from_the_proximal_policy_and_make_one_scheduled_step(tmp_path: Path) -> None:
    settings = config(tiny_llama(tmp_path), passes=3, ratio="proximal", lr=1e-2, warmup_steps=9, clip_high=1e-3)
    (outcome,) = on_ranks(1, train_steps, settings, 2)
    first, second = outcome["metrics"]
    assert first["clip_fraction"] == 0  # in the first pass the policy is the proximal one
    assert first["last_pass_clip_fraction"] > 0
    assert [first["lr"], second["lr"]] == pytest.approx([1e-3, 2e-3])


def test_off_policyness_is_told_by_staleness(tmp_path: Path) -> None:
    fresh, stale = (with_version(g, v) for v, g in ((1, group(0)), (0, group(1, lengths=(2, 6)))))
    settings = config(tiny_llama(tmp_path))
    (metrics,) = on_ranks(1, partial(train_steps, groups=(fresh, stale)), settings, 1)[0]["metrics"]
    assert [metrics[f"train_tokens_staleness_{s}"] for s in (0, 1)] == [13, 8]
    for name in ("importance_ratio_mean", "kl_rollout_trainer", "clip_fraction"):
        parts = [metrics[f"{name}_staleness_{s}"] for s in (0, 1)]
        assert metrics[name] == pytest.approx((13 * parts[0] + 8 * parts[1]) / 21)
        assert parts[0] != parts[1]
    assert metrics["importance_ratio_max"] == max(metrics[f"importance_ratio_max_staleness_{s}"] for s in (0, 1))
    assert 0 < metrics["importance_ess"] < 1


def with_version(g: SampleGroup, version: int) -> SampleGroup:
    samples = (replace(s, versions_T=np.where(s.loss_mask_T, version, -1).astype(np.int32)) for s in g.samples)
    return replace(g, samples=tuple(samples))


def test_the_reference_scores_every_token_of_the_groups_in_their_order(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path)
    outcomes = on_ranks(2, score_reference, config(model, kl_coef=0.1, kl_in="reward", token_budget=20))
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for g, scored in zip(batch(), outcomes[0]["logprobs"] + outcomes[1]["logprobs"], strict=True):
        ends = np.cumsum([sample.completion_tokens for sample in g.samples])
        for sample, own in zip(g.samples, np.split(scored, ends[:-1]), strict=True):
            ids = torch.as_tensor(sample.token_ids_T, dtype=torch.int64)
            with torch.no_grad():
                logprobs = policy(ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
            logprobs = logprobs.gather(-1, ids[1:, None]).squeeze(-1)[torch.as_tensor(sample.loss_mask_T[1:])]
            np.testing.assert_allclose(own, logprobs, atol=5e-5)


def score_reference(settings: Config) -> Outcome:
    backend = Fsdp2(settings, torch.device("cpu"))
    mine = batch()[:2] if backend.shard == 0 else batch()[2:]
    return {"logprobs": list(backend.reference_logprobs(mine, temperature=1.0))}


def test_a_reference_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    (outcome,) = on_ranks(1, score_without_reference, config(tiny_llama(tmp_path)))
    assert "algorithm.kl_coef is 0" in outcome["error"]


def score_without_reference(settings: Config) -> Outcome:
    try:
        score_reference(settings)
    except TrainerError as error:
        return {"error": str(error)}
    return {"error": ""}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_gradient_that_is_not_finite_ends_the_step_and_not_the_weights(tmp_path: Path, ranks: int) -> None:
    for outcome in on_ranks(ranks, overflow, config(tiny_llama(tmp_path))):
        assert "gradient norm" in outcome["error"]
        assert outcome["unchanged"]


def test_an_update_that_is_not_finite_is_skipped_and_counted_where_so_configured(tmp_path: Path) -> None:
    for outcome in on_ranks(2, overflow, config(tiny_llama(tmp_path), nonfinite="skip", passes=2)):
        assert outcome["error"] == ""
        assert outcome["unchanged"]
        assert outcome["metrics"]["nonfinite"] == 2
        assert np.isnan(outcome["metrics"]["loss"])
        assert outcome["after"]["nonfinite"] == 0
        assert np.isfinite(outcome["after"]["grad_norm"])


def overflow(settings: Config) -> Outcome:
    """One token's advantage, on one rank, is infinite; then an ordinary batch."""
    backend = Fsdp2(settings, torch.device("cpu"))
    before = {name: tensor.clone() for name, tensor in backend.export_weights()}
    only = batch(2)[backend.shard]
    advantage_N = np.ones(group_trained_tokens(only), dtype=np.float32)
    broken_N = advantage_N.copy()
    broken_N[0] = np.inf if backend.shard == 0 else 1
    error, metrics = "", {}
    try:
        metrics = backend.train([only], [broken_N], temperature=1.0, version=0)
    except NonfiniteError as raised:
        error = str(raised)
    unchanged = all(torch.equal(tensor, before[name]) for name, tensor in backend.export_weights())
    after = backend.train([only], [advantage_N], temperature=1.0, version=1)
    return {"error": error, "unchanged": unchanged, "metrics": metrics, "after": after}


def test_the_learning_rate_warms_up_linearly(tmp_path: Path) -> None:
    (outcome,) = on_ranks(1, train_steps, config(tiny_llama(tmp_path), lr=1.0, warmup_steps=3), 5)
    assert [m["lr"] for m in outcome["metrics"]] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_activation_checkpointing_changes_nothing_but_memory(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path)
    (plain,) = on_ranks(1, train_steps, config(model), 1)
    (checkpointed,) = on_ranks(1, train_steps, config(model, activation_checkpointing=True), 1)
    assert checkpointed["metrics"][0]["grad_norm"] == SAME(plain["metrics"][0]["grad_norm"])
