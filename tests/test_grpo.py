from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from aoffpolicy import algorithms
from aoffpolicy.algorithms.grpo import Grpo
from aoffpolicy.config import Algorithm
from aoffpolicy.errors import ConfigError
from aoffpolicy.samples import Prompt, SampleGroup
from tests.groups import sample

PROMPT = np.array([1, 2], dtype=np.int32)


def rewarded(*rewards: float) -> SampleGroup:
    return SampleGroup(Prompt(0, PROMPT), tuple(sample(PROMPT, np.array([3]), reward=reward) for reward in rewards))


def test_advantages_are_relative_to_their_own_group() -> None:
    first, second = Grpo(Algorithm()).advantages([rewarded(0, 0, 1, 1), rewarded(5, 5, 5)])
    np.testing.assert_allclose(first, np.array([-1, -1, 1, 1]) * 0.5 / (0.5 + 1e-4), rtol=1e-6)
    assert second.tolist() == [0, 0, 0]
    assert first.dtype == np.float32


def test_without_normalisation_advantages_are_only_centred() -> None:
    (advantages,) = Grpo(Algorithm(normalize_std=False)).advantages([rewarded(0, 0, 1, 1)])
    assert advantages.tolist() == [-0.5, -0.5, 0.5, 0.5]


def test_a_group_of_one_has_no_advantage() -> None:
    (advantages,) = Grpo(Algorithm()).advantages([rewarded(3)])
    assert advantages.tolist() == [0]


def test_the_ratio_is_clipped_only_where_that_lowers_the_surrogate() -> None:
    logprobs = torch.log(torch.tensor([1.5, 0.5, 1.5, 0.5])).requires_grad_()
    advantage = torch.tensor([1.0, 1.0, -1.0, -1.0])
    loss, metrics = Grpo(Algorithm(clip_low=0.2, clip_high=0.3)).loss(logprobs, torch.zeros(4), advantage, None)
    torch.testing.assert_close(loss, torch.tensor([-1.3, -0.5, 1.5, 0.8]))
    assert metrics["clip_fraction"] == 2
    loss.sum().backward()
    assert (logprobs.grad != 0).tolist() == [False, True, True, False]


def test_kl_to_the_reference_is_k3_and_zero_for_equal_policies() -> None:
    logprobs, reference = torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -1.5])
    algorithm = Grpo(Algorithm(kl_coef=0.1))
    loss, metrics = algorithm.loss(logprobs, logprobs, torch.zeros(2), reference)
    expected = np.exp(0.5) - 0.5 - 1
    torch.testing.assert_close(loss, torch.tensor([0.0, 0.1 * expected], dtype=torch.float32))
    assert metrics["kl_reference"].item() == pytest.approx(expected)


def test_an_unknown_algorithm_is_refused_by_key_and_says_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.name: 'gropo' is none of grpo"):
        algorithms.build(Algorithm(name="gropo"))
    with pytest.raises(ConfigError, match=r"algorithm\.name: 'nowhere:Absent' cannot be imported"):
        algorithms.build(Algorithm(name="nowhere:Absent"))


def test_a_users_own_algorithm_is_found_by_its_path() -> None:
    assert isinstance(algorithms.build(Algorithm(name="aoffpolicy.algorithms.grpo:Grpo")), Grpo)


def test_advantages_need_no_torch() -> None:
    script = (
        "import sys; from aoffpolicy import algorithms; from aoffpolicy.config import Algorithm; "
        "algorithms.build(Algorithm()).advantages([]); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
