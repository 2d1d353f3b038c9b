"""One number for each paper's definition, worked out by hand; and what the config may ask of an algorithm."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from math import exp, inf, log, sqrt
from typing import Any

import numpy as np
import pytest
import torch

from aoffpolicy import algorithms
from aoffpolicy.algorithms import Tokens, Totals
from aoffpolicy.algorithms.advantages import overlong
from aoffpolicy.algorithms.recipe import Recipe
from aoffpolicy.config import Config
from aoffpolicy.errors import ConfigError
from aoffpolicy.registry import ALGORITHMS
from aoffpolicy.samples import Prompt, SampleGroup
from tests.groups import sample

PROMPT = np.array([1, 2], dtype=np.int32)


def config(max_tokens: int = 4, **keys: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"path": "."},
            "data": {"source": "x"},
            "rollout": {"max_tokens": max_tokens},
            "algorithm": keys,
        }
    )


def rewarded(*rewards: float, lengths: Sequence[int] | None = None) -> SampleGroup:
    samples = tuple(
        sample(PROMPT, np.full(length, 3), reward=reward)
        for reward, length in zip(rewards, lengths or [1] * len(rewards), strict=True)
    )
    return SampleGroup(Prompt(0, PROMPT), samples)


def advantages(name: str, *groups: SampleGroup, **keys: Any) -> list[list[float]]:
    return [own.tolist() for own in algorithms.build(config(name=name, **keys)).advantages(groups)]


def loss(
    ratios: Sequence[float], advantage: Sequence[float], *, sequence: Sequence[int] | None = None, **keys: Any
) -> tuple[torch.Tensor, torch.Tensor, Mapping[str, torch.Tensor]]:
    """Of tokens with behaviour log-probability -1, each a sequence of its own; and its gradient, and the metrics."""
    logprobs_N = (torch.tensor(ratios, dtype=torch.float64).log() - 1).requires_grad_()
    sequence_N = torch.tensor(sequence or range(len(ratios)))
    tokens = Tokens(
        logprobs_N=logprobs_N,
        behaviour_N=torch.full_like(logprobs_N, -1).detach(),
        proximal_N=torch.full_like(logprobs_N, keys.pop("proximal", -1.0)).detach(),
        advantage_N=torch.tensor(advantage, dtype=torch.float64),
        sequence_N=sequence_N,
        sequences=int(sequence_N.max()) + 1,
        reference_N=keys.pop("reference", None),
    )
    totals = Totals(len(ratios), tokens.sequences)
    loss_N, metrics = algorithms.build(config(**keys)).loss(tokens, totals)
    loss_N.sum().backward()
    assert logprobs_N.grad is not None
    return loss_N.detach(), logprobs_N.grad, metrics


# --- Advantages ----------------------------------------------------------------------------------------------------


def test_grpo_divides_by_the_deviation_of_the_group() -> None:
    first, second = advantages("grpo", rewarded(0, 0, 1, 1), rewarded(5, 5, 5))
    assert first == pytest.approx([-0.5 / 0.5001, -0.5 / 0.5001, 0.5 / 0.5001, 0.5 / 0.5001])
    assert second == [0, 0, 0]


def test_dr_grpo_only_centres() -> None:
    assert advantages("dr_grpo", rewarded(0, 0, 1, 1)) == [[-0.5, -0.5, 0.5, 0.5]]
    assert advantages("grpo", rewarded(0, 0, 1, 1), normalize_std=False) == [[-0.5, -0.5, 0.5, 0.5]]


def test_rloo_leaves_its_own_reward_out_of_the_baseline() -> None:
    assert advantages("rloo", rewarded(1, 0, 0, 1)) == [pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])]
    assert advantages("rloo", rewarded(3)) == [[3]]


def test_reinforce_plus_plus_normalises_over_tokens_of_the_batch() -> None:
    # Four tokens with returns 1, 0, 0, 0: mean 1/4, deviation sqrt(3)/4.
    first, second = advantages("reinforce_plus_plus", rewarded(1), rewarded(0, lengths=[3]))
    assert first == pytest.approx([sqrt(3)])
    assert second == pytest.approx([-1 / sqrt(3)] * 3)
    # With the baseline, group (1, 0) and group (5, 4) are the same.
    assert advantages("reinforce_plus_plus_baseline", rewarded(1, 0), rewarded(5, 4)) == [pytest.approx([1, -1])] * 2


def test_kl_in_the_reward_is_taken_off_what_is_still_ahead() -> None:
    # Two samples of two tokens, behaviour - reference = 1 and 2 in the first, 0 in the second; beta 0.1.
    group = rewarded(1, 0, lengths=[2, 2])
    behaviour = np.concatenate([s.behaviour_logprobs_T[2:] for s in group.samples])
    reference = [behaviour - np.array([1, 2, 0, 0], dtype=np.float32)]
    keys = {"kl_coef": 0.1, "kl_in": "reward"}
    (own,) = algorithms.build(config(name="reinforce_plus_plus", **keys)).advantages([group], reference)
    returns = np.array([0.7, 0.8, 0, 0])
    np.testing.assert_allclose(own, (returns - returns.mean()) / returns.std(), rtol=1e-5)
    (own,) = algorithms.build(config(name="rloo", **keys)).advantages([group], reference)
    np.testing.assert_allclose(own, [0.7, 0.7, -0.7, -0.7], rtol=1e-5)


def test_dapo_punishes_the_last_fifth_of_the_longest_completion() -> None:
    # The paper's setting: 16,384 tokens expected, 4,096 more before the punishment is whole.
    lengths = np.array([0, 16384, 17408, 18432, 20480, 20481])
    assert overlong(20480, 4096)(lengths).tolist() == [0, 0, -0.25, -0.5, -1, -1]
    # rollout.max_tokens = 10: the last two are punished.
    (own,) = algorithms.build(config(10, name="dapo", normalize_std=False)).advantages(
        [rewarded(1, 1, 1, lengths=[8, 9, 10])]
    )
    assert own.tolist() == [0.5] * 8 + [0.0] * 9 + [-0.5] * 10
    assert overlong(10, 0)(lengths).tolist() == [0] * 6


# --- Losses --------------------------------------------------------------------------------------------------------


def test_the_ratio_is_clipped_only_where_that_lowers_the_objective() -> None:
    keys = {"name": "grpo", "clip_low": 0.2, "clip_high": 0.3}
    ours, gradient, metrics = loss([1.5, 0.5, 1.5, 0.5], [1, 1, -1, -1], **keys)
    np.testing.assert_allclose(ours * 4, [-1.3, -0.5, 1.5, 0.8])
    assert metrics["clip_fraction"].tolist() == [True, False, False, True]
    assert (gradient != 0).tolist() == [False, True, True, False]


def test_dapo_clips_higher_and_counts_tokens_alike() -> None:
    ours, _, _ = loss([1.5, 1.0, 1.0, 1.0], [1, 1, 1, 1], name="dapo", sequence=[0, 1, 1, 1])
    np.testing.assert_allclose(ours, [-1.28 / 4, -1 / 4, -1 / 4, -1 / 4])


def test_grpo_counts_samples_alike_and_dr_grpo_divides_by_a_constant() -> None:
    advantage = [0.5, -0.5, -0.5, -0.5]
    ours, _, _ = loss([1] * 4, advantage, sequence=[0, 1, 1, 1], name="grpo")
    assert float(ours.sum()) == pytest.approx(0)
    ours, _, _ = loss([1] * 4, advantage, sequence=[0, 1, 1, 1], name="dr_grpo")  # -(1/2 - 3/2) / 2 samples / 4 tokens
    assert float(ours.sum()) == pytest.approx(0.125)


def test_gspo_clips_the_geometric_mean_of_the_sequence() -> None:
    ours, gradient, metrics = loss([1.21, 1.0], [1, 1], sequence=[0, 0], name="gspo")
    np.testing.assert_allclose(ours, [-1.0004 / 2] * 2)
    assert gradient.tolist() == [0, 0]
    ours, gradient, _ = loss([1.21, 1.0], [-1, -1], sequence=[0, 0], name="gspo")
    np.testing.assert_allclose(ours, [1.1 / 2] * 2)
    np.testing.assert_allclose(gradient, [1.1 / 2] * 2)
    assert metrics["clip_fraction"].all()


def test_cispo_keeps_the_gradient_of_a_clipped_token() -> None:
    ours, gradient, metrics = loss([8.0, 0.01], [1, 1], name="cispo")
    np.testing.assert_allclose(gradient, [-5 / 2, -0.01 / 2])
    np.testing.assert_allclose(ours, [-5 * (log(8) - 1) / 2, -0.01 * (log(0.01) - 1) / 2])
    assert metrics["clip_fraction"].tolist() == [True, False]


def test_rloo_is_reinforce_with_weights_truncated_at_two() -> None:
    _, gradient, _ = loss([1.0, 1.5, 8.0], [1, 1, 1], name="rloo", sequence=[0, 0, 0])
    np.testing.assert_allclose(gradient, [-1, -1.5, -2])
    _, gradient, _ = loss([1.0, 1.5, 8.0], [1, 1, 1], name="rloo", sequence=[0, 0, 0], correction="none")
    np.testing.assert_allclose(gradient, [-1, -1, -1])


def test_decoupled_ppo_clips_against_the_proximal_policy_and_weights_by_it() -> None:
    # behaviour e^-1, proximal 1.5 e^-1, policy 1.5 e^-1 and 3 e^-1: ratios 1 and 2, weights 1.5.
    keys = {"name": "grpo", "ratio": "proximal", "correction": "token", "proximal": log(1.5) - 1}
    ours, gradient, _ = loss([1.5, 3.0], [1, 1], **keys)
    np.testing.assert_allclose(ours * 2, [-1.5, -1.5 * 1.2])
    np.testing.assert_allclose(gradient * 2, [-1.5, 0])


def test_sequence_weights_are_products_and_truncated_as_such() -> None:
    keys = {"name": "grpo", "ratio": "proximal", "proximal": log(1.3) - 1, "correction": "sequence"}
    _, _, metrics = loss([1.3] * 5, [1] * 5, sequence=[0, 0, 1, 1, 1], **keys)
    np.testing.assert_allclose(metrics["correction_weight"], [1.69, 1.69, 2, 2, 2])


def test_kl_in_the_loss_is_k3_and_zero_for_equal_policies() -> None:
    reference = torch.tensor([-1.0, -0.5], dtype=torch.float64)
    ours, _, metrics = loss([1, 1], [0, 0], name="grpo", kl_coef=0.1, reference=reference)
    np.testing.assert_allclose(ours * 2, [0, 0.1 * (exp(0.5) - 1.5)])
    np.testing.assert_allclose(metrics["kl_reference"], [0, exp(0.5) - 1.5])


# --- What may be asked for -----------------------------------------------------------------------------------------


def test_dynamic_sampling_is_dapos_own_and_anybodys_by_key() -> None:
    filters = {name: algorithms.build(config(name=name)).filter_zero_variance for name in ALGORITHMS}
    assert [name for name, on in filters.items() if on] == ["dapo"]
    assert not algorithms.build(config(name="dapo", filter_zero_variance=False)).filter_zero_variance
    assert algorithms.build(config(name="rloo", filter_zero_variance=True)).filter_zero_variance


@pytest.mark.parametrize(
    ("keys", "fault"),
    [
        ({"name": "grpo", "correction": "token"}, r'algorithm\.correction: .*set algorithm\.ratio = "proximal"'),
        ({"name": "rloo", "ratio": "proximal"}, r"algorithm\.ratio: rloo has no ratio"),
        (
            {"name": "rloo", "clip_low": 0.1, "normalize_std": True},
            r"algorithm\.normalize_std: .*\n.*clip_low: rloo has",
        ),
        ({"name": "reinforce_plus_plus", "normalize_std": False}, r"algorithm\.normalize_std: reinforce_plus_plus"),
        ({"name": "gropo"}, r"algorithm\.name: 'gropo' is none of cispo, dapo, dr_grpo, grpo, gspo"),
        ({"name": "nowhere:Absent"}, r"algorithm\.name: 'nowhere:Absent' cannot be imported"),
    ],
)
def test_keys_that_contradict_the_algorithm_are_refused_by_name(keys: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        algorithms.build(config(**keys))


@pytest.mark.parametrize("keys", [{"mask_low": 2.0, "mask_high": 1.0}, {"kl_in": "nowhere"}, {"correction_cap": -inf}])
def test_impossible_values_are_refused_with_the_config(keys: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(keys))):
        config(**keys)


def test_a_users_own_algorithm_is_found_by_its_path() -> None:
    own = algorithms.build(config(name="tests.test_algorithm_definitions:sign_of_the_reward"))
    assert own.advantages([rewarded(-2, 0, 3)])[0].tolist() == [-1, 0, 1]


def sign_of_the_reward(settings: Config) -> Recipe:
    from aoffpolicy.algorithms.surrogate import log_likelihood

    return Recipe(
        config=settings,
        estimator=lambda batch: tuple(np.sign(scores.return_N).astype(np.float32) for scores in batch),
        surrogate=log_likelihood,
        aggregation="token_mean",
    )


def test_advantages_need_no_torch() -> None:
    script = (
        "import sys; from aoffpolicy import algorithms; from aoffpolicy.config import Config; "
        "config = {'model': {'path': '.'}, 'data': {'source': 'x'}, 'algorithm': {'name': NAME}}; "
        "algorithms.build(Config.model_validate(config)).advantages([]); assert 'torch' not in sys.modules"
    )
    names = "for NAME in sys.argv[1:]: exec(script)"
    subprocess.run(
        [sys.executable, "-c", f"import sys; script = {script!r}\n{names}", *ALGORITHMS], check=True, timeout=60
    )
