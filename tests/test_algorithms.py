"""Ours against the references of `algorithm_references.py`, on random batches with every odd shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aoffpolicy import algorithms
from aoffpolicy.algorithms import Algorithm, Tokens, Totals
from aoffpolicy.config import Config
from aoffpolicy.samples import Prompt, Sample, SampleGroup
from tests import algorithm_references as ref
from tests.algorithm_references import Row

MAX_TOKENS = 5
PROMPT = np.array([1, 2], dtype=np.int32)


@dataclass(frozen=True)
class Case:
    keys: dict[str, Any]
    advantages: Callable[[Sequence[Row]], list[np.ndarray]]
    loss: Callable[[Sequence[Row]], float]


GRPO = ref.grpo_advantages
CASES = {
    "grpo": Case({"name": "grpo"}, GRPO, ref.grpo_loss),
    "grpo, KL in loss": Case({"name": "grpo", "kl_coef": 0.3}, GRPO, partial(ref.grpo_loss, beta=0.3)),
    "grpo, KL in reward": Case(
        {"name": "grpo", "kl_coef": 0.3, "kl_in": "reward"}, partial(GRPO, beta=0.3), ref.grpo_loss
    ),
    "dr_grpo": Case({"name": "dr_grpo"}, partial(GRPO, divide=False), partial(ref.dr_grpo_loss, longest=MAX_TOKENS)),
    "rloo": Case({"name": "rloo"}, ref.rloo_advantages, ref.rloo_loss),
    "rloo, uncorrected, KL in reward": Case(
        {"name": "rloo", "correction": "none", "kl_coef": 0.2, "kl_in": "reward"},
        partial(ref.rloo_advantages, beta=0.2),
        partial(ref.rloo_loss, cap=None),
    ),
    "reinforce++": Case({"name": "reinforce_plus_plus"}, ref.reinforce_advantages, ref.reinforce_loss),
    "reinforce++, KL in reward": Case(
        {"name": "reinforce_plus_plus", "kl_coef": 0.1, "kl_in": "reward"},
        partial(ref.reinforce_advantages, beta=0.1),
        ref.reinforce_loss,
    ),
    "reinforce++ with baseline": Case(
        {"name": "reinforce_plus_plus_baseline"}, partial(ref.reinforce_advantages, baseline=True), ref.reinforce_loss
    ),
    "dapo": Case(
        {"name": "dapo", "overlong_tokens": 3},
        lambda rows: GRPO([replace(row, reward=ref.dapo_reward(row, MAX_TOKENS, 3)) for row in rows]),
        ref.dapo_loss,
    ),
    "gspo": Case({"name": "gspo"}, GRPO, ref.gspo_loss),
    "cispo": Case({"name": "cispo"}, GRPO, ref.cispo_loss),
    "decoupled, uncorrected": Case(
        {"name": "grpo", "ratio": "proximal"}, GRPO, partial(ref.decoupled_loss, level="none", cap=None)
    ),
    "decoupled, whole weights": Case(
        {"name": "grpo", "ratio": "proximal", "correction": "token", "correction_cap": 0.0},
        GRPO,
        partial(ref.decoupled_loss, level="token", cap=None),
    ),
    "decoupled, truncated by token": Case(
        {"name": "grpo", "ratio": "proximal", "correction": "token", "correction_cap": 1.2},
        GRPO,
        partial(ref.decoupled_loss, level="token", cap=1.2),
    ),
    "decoupled, truncated by sequence": Case(
        {"name": "grpo", "ratio": "proximal", "correction": "sequence", "correction_cap": 1.2},
        GRPO,
        partial(ref.decoupled_loss, level="sequence", cap=1.2),
    ),
    **{
        f"masked by {level}": Case(
            {"name": "grpo", "mask": level, "mask_low": 0.8, "mask_high": 1.3},
            GRPO,
            partial(ref.masked_loss, level=level, low=0.8, high=1.3),
        )
        for level in ("token", "sequence", "sequence_mean")
    },
}


def build(keys: dict[str, Any]) -> Algorithm:
    return algorithms.build(
        Config.model_validate(
            {
                "model": {"path": "."},
                "data": {"source": "x"},
                "rollout": {"max_tokens": MAX_TOKENS},
                "algorithm": keys,
            }
        )
    )


@st.composite
def batches(draw: st.DrawFn) -> list[Row]:
    """Groups of equal size; completions of 0, 1 and more tokens, nothing to train, rewards all equal."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    spread = draw(st.sampled_from([0.0, 0.001, 0.3, 1.5]))
    size = draw(st.integers(1, 4))
    rows = []
    for prompt in range(draw(st.integers(1, 3))):
        equal = draw(st.booleans())
        for _ in range(size):
            T = draw(st.integers(0, MAX_TOKENS))
            hidden = draw(st.sampled_from(["none", "some", "all"]))
            mask = {"none": np.ones(T), "some": rng.random(T) < 0.7, "all": np.zeros(T)}[hidden].astype(bool)
            # Behaviour and reference travel as float32, so that both sides start from the same numbers.
            behaviour = rng.normal(-2, 1, T).astype(np.float32).astype(np.float64)
            logp = behaviour + spread * rng.normal(0, 1, T)
            rows.append(
                Row(
                    prompt=prompt,
                    reward=0.7 if equal else float(rng.integers(0, 3)) / 2,
                    mask=mask,
                    logp=logp,
                    behaviour=behaviour,
                    proximal=behaviour + spread * rng.normal(0, 1, T),
                    reference=(behaviour + spread * rng.normal(0, 1, T)).astype(np.float32).astype(np.float64),
                    frozen=logp.copy(),
                    advantage=np.zeros(T),
                )
            )
    return rows


def as_groups(rows: Sequence[Row]) -> list[SampleGroup]:
    def sample(row: Row) -> Sample:
        tokens = np.concatenate([PROMPT, np.full(len(row.mask), 3)]).astype(np.int32)
        before = np.zeros(len(PROMPT))
        mask = np.concatenate([before, row.mask]).astype(bool)
        behaviour = np.where(mask, np.concatenate([before, row.behaviour]), 0).astype(np.float32)
        return Sample(tokens, mask, behaviour, np.where(mask, 0, -1).astype(np.int32), "", "stop", reward=row.reward)

    return [SampleGroup(Prompt(uid, PROMPT), tuple(map(sample, group))) for uid, group in enumerate(ref.prompts(rows))]


def our_advantages(algorithm: Algorithm, rows: Sequence[Row]) -> list[np.ndarray]:
    """Of each row's trained tokens."""
    reference = [
        np.concatenate([row.reference[row.mask] for row in group]).astype(np.float32) for group in ref.prompts(rows)
    ]
    found = algorithm.advantages(as_groups(rows), reference if algorithm.wants_reference else None)
    assert all(own.dtype == np.float32 for own in found)
    ends = np.cumsum([len(row.trained) for row in rows])[:-1]
    return np.split(np.concatenate(found), ends)


def our_loss(
    algorithm: Algorithm, rows: Sequence[Row], totals: Totals, *, kl_in_loss: bool
) -> tuple[float, list[np.ndarray], dict[str, np.ndarray]]:
    """The loss of these rows, its gradient for each row's trained tokens, and the metrics."""

    def tensor(name: str) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([np.zeros(0), *(getattr(row, name)[row.mask] for row in rows)]))

    logprobs_N = tensor("logp").requires_grad_()
    lengths = [len(row.trained) for row in rows]
    tokens = Tokens(
        logprobs_N=logprobs_N,
        behaviour_N=tensor("behaviour"),
        proximal_N=tensor("proximal"),
        advantage_N=tensor("advantage"),
        sequence_N=torch.from_numpy(np.repeat(np.arange(len(rows)), lengths)),
        sequences=len(rows),
        reference_N=tensor("reference") if kl_in_loss else None,
    )
    loss_N, metrics = algorithm.loss(tokens, totals)
    loss_N.sum().backward()
    assert logprobs_N.grad is not None
    assert not any(value.requires_grad for value in metrics.values())
    gradients = np.split(logprobs_N.grad.numpy(), np.cumsum(lengths)[:-1])
    return float(loss_N.detach().sum()), gradients, {name: value.numpy() for name, value in metrics.items()}


def with_advantages(rows: Sequence[Row], trained: Sequence[np.ndarray]) -> list[Row]:
    filled = []
    for row, own in zip(rows, trained, strict=True):
        advantage = np.zeros(len(row.mask))
        advantage[row.mask] = own
        filled.append(replace(row, advantage=advantage))
    return filled


def totals_of(rows: Sequence[Row]) -> Totals:
    return Totals(tokens=sum(len(row.trained) for row in rows), sequences=len(rows))


def kl_in_loss(case: Case) -> bool:
    return bool(case.keys.get("kl_coef")) and case.keys.get("kl_in") != "reward"


@pytest.mark.parametrize("name", CASES)
@settings(deadline=None, max_examples=60)
@given(rows=batches())
def test_advantages_loss_and_gradient_are_those_of_the_paper(name: str, rows: list[Row]) -> None:
    case = CASES[name]
    algorithm = build(case.keys)
    ours = our_advantages(algorithm, rows)
    for row, own, expected in zip(rows, ours, case.advantages(rows), strict=True):
        np.testing.assert_allclose(own, expected[row.mask], rtol=2e-6, atol=2e-6)

    rows = with_advantages(rows, ours)
    loss, gradients, _ = our_loss(algorithm, rows, totals_of(rows), kl_in_loss=kl_in_loss(case))
    assert loss == pytest.approx(case.loss(rows), rel=1e-9, abs=1e-12)
    for row, own, expected in zip(rows, gradients, ref.gradient(rows, case.loss), strict=True):
        np.testing.assert_allclose(own, expected[row.mask], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", CASES)
@settings(deadline=None, max_examples=30)
@given(rows=batches(), data=st.data())
def test_micro_batches_add_up_to_the_loss_and_gradient_of_the_whole(
    name: str, rows: list[Row], data: st.DataObject
) -> None:
    case = CASES[name]
    algorithm = build(case.keys)
    rows = with_advantages(rows, our_advantages(algorithm, rows))
    totals = totals_of(rows)
    loss, gradients, metrics = our_loss(algorithm, rows, totals, kl_in_loss=kl_in_loss(case))
    part_of_row = data.draw(st.lists(st.integers(0, 2), min_size=len(rows), max_size=len(rows)))
    total = 0.0
    for part in range(3):
        indices = [i for i, own in enumerate(part_of_row) if own == part]
        if not indices:
            continue
        own_loss, own_gradients, own_metrics = our_loss(
            algorithm, [rows[i] for i in indices], totals, kl_in_loss=kl_in_loss(case)
        )
        total += own_loss
        assert own_metrics.keys() == metrics.keys()
        for i, own in zip(indices, own_gradients, strict=True):
            np.testing.assert_allclose(own, gradients[i], rtol=1e-12, atol=1e-15)
    assert total == pytest.approx(loss, rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("name", CASES)
def test_a_batch_without_a_trained_token_has_loss_zero(name: str) -> None:
    case = CASES[name]
    nothing = np.zeros(0)
    rows = [Row(0, float(i), nothing.astype(bool), *[nothing] * 6) for i in range(2)]
    algorithm = build(case.keys)
    assert [len(own) for own in our_advantages(algorithm, rows)] == [0, 0]
    loss, _, _ = our_loss(algorithm, rows, totals_of(rows), kl_in_loss=kl_in_loss(case))
    assert loss == 0


def test_every_registered_algorithm_has_a_reference() -> None:
    from aoffpolicy.registry import ALGORITHMS

    assert {case.keys["name"] for case in CASES.values()} == set(ALGORITHMS)


def test_masks_and_truncation_are_counted() -> None:
    T = 4
    behaviour = np.full(T, -2.0)
    logp = behaviour + np.log([0.4, 1.0, 3.0, 6.0])
    row = Row(0, 1.0, np.ones(T, dtype=bool), logp, behaviour, logp, behaviour, logp, np.ones(T))
    keys = {"name": "grpo", "ratio": "proximal", "correction": "token", "mask": "token"}
    _, _, metrics = our_loss(build(keys), [row], totals_of([row]), kl_in_loss=False)
    assert metrics["masked_fraction"].tolist() == [True, False, False, True]
    assert metrics["weight_truncated_fraction"].tolist() == [False, False, True, True]
    np.testing.assert_allclose(metrics["correction_weight"], [0.4, 1.0, 2.0, 2.0])
    assert metrics["clip_fraction"].tolist() == [False] * T


def test_a_masked_tokens_infinite_weight_leaves_the_gradient_finite() -> None:
    behaviour = np.array([-800.0, -1.0])
    logp = np.array([-1.0, -1.0])
    row = Row(0, 1.0, np.ones(2, dtype=bool), logp, behaviour, logp, behaviour, logp, np.ones(2))
    keys = {"name": "grpo", "ratio": "proximal", "correction": "sequence", "correction_cap": 0.0, "mask": "sequence"}
    loss, (gradient,), _ = our_loss(build(keys), [row], totals_of([row]), kl_in_loss=False)
    assert loss == 0
    assert gradient.tolist() == [0, 0]
