from __future__ import annotations

import numpy as np
import pytest
import torch

from aoffpolicy.rollout.sampling import inverse_cdf, sample, uniforms


def draw(logits: torch.Tensor, count: int, temperature: float = 1.0, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    uniform = np.random.default_rng(seed).random(count)
    return sample(logits[None], np.array([temperature]), np.zeros(count, dtype=np.int64), uniform)


@pytest.mark.parametrize("vocabulary", [5, 64, 96, 1000])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_follow_the_distribution_of_the_logits_at_that_temperature(vocabulary: int, temperature: float) -> None:
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(1))
    tokens, _ = draw(logits, 200_000, temperature)
    expected = torch.softmax(logits.double() / temperature, -1).numpy() * len(tokens)
    observed = np.bincount(tokens, minlength=vocabulary)
    chi_square = float(((observed - expected) ** 2 / expected).sum())
    freedom = vocabulary - 1
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom)


def test_a_wrong_temperature_fails_the_distribution_test() -> None:
    logits = torch.randn(64, generator=torch.Generator().manual_seed(1))
    tokens, _ = draw(logits, 200_000, 0.9)
    expected = torch.softmax(logits.double(), -1).numpy() * len(tokens)
    chi_square = float(((np.bincount(tokens, minlength=64) - expected) ** 2 / expected).sum())
    assert chi_square > 63 + 4 * np.sqrt(2 * 63)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_log_probabilities_are_those_of_the_log_softmax_at_the_temperature(temperature: float) -> None:
    logits = 3 * torch.randn(500, generator=torch.Generator().manual_seed(2))
    tokens, logprobs = draw(logits, 1000, temperature)
    expected = torch.log_softmax(logits.double() / temperature, -1).numpy()[tokens]
    assert logprobs.dtype == np.float32
    np.testing.assert_allclose(logprobs, expected, atol=1e-5)


def test_temperature_zero_takes_the_most_likely_token_with_its_log_probability_at_temperature_one() -> None:
    logits = torch.randn(96, generator=torch.Generator().manual_seed(3))
    tokens, logprobs = draw(logits, 10, 0.0)
    assert (tokens == int(logits.argmax())).all()
    np.testing.assert_allclose(logprobs, float(logits.log_softmax(-1).max()), atol=1e-6)


def test_greedy_and_sampled_rows_go_together_in_one_batch() -> None:
    logits = torch.randn(3, 96, generator=torch.Generator().manual_seed(4))
    rows, uniform = np.array([0, 1, 1, 2]), np.array([0.99, 0.01, 0.99, 0.5])
    tokens, logprobs = sample(logits, np.array([0.0, 1.0, 0.7]), rows, uniform)
    assert tokens[0] == int(logits[0].argmax())
    for index, row in enumerate(rows):
        alone = sample(logits[row][None], np.array([[0.0, 1.0, 0.7][row]]), np.array([0]), uniform[index : index + 1])
        assert tokens[index] == alone[0][0]
        assert logprobs[index] == pytest.approx(alone[1][0], abs=1e-6)


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    probabilities = torch.zeros(1, 200)
    probabilities[0, [3, 70, 71, 140]] = torch.tensor([0.1, 0.2, 0.3, 0.4])
    edges = torch.tensor([0.0, 1e-30, 0.1, 0.3, 0.6, 0.9999999, 1.0])
    tokens = inverse_cdf(probabilities, torch.zeros(len(edges), dtype=torch.int64), edges)
    assert set(tokens.tolist()) <= {3, 70, 71, 140}
    assert tokens[0] == 3
    assert tokens[-1] == 140


def test_bfloat16_logits_are_sampled_in_float32() -> None:
    logits = torch.randn(96, generator=torch.Generator().manual_seed(5)).bfloat16()
    tokens, logprobs = draw(logits, 100)
    np.testing.assert_allclose(logprobs, logits.double().log_softmax(-1).numpy()[tokens], atol=1e-5)


def test_uniform_numbers_of_a_longer_completion_begin_with_those_of_a_shorter_one() -> None:
    np.testing.assert_array_equal(uniforms(7, 3, 2, 5), uniforms(7, 3, 2, 500)[:5])


def test_seed_prompt_and_completion_each_give_other_uniform_numbers() -> None:
    streams = [uniforms(*key, 8).tobytes() for key in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1)]]
    assert len(set(streams)) == len(streams)


def test_uniform_numbers_are_the_same_in_every_process_and_version() -> None:
    np.testing.assert_allclose(uniforms(1, 2, 3, 2), UNIFORMS_OF_1_2_3, rtol=1e-15)


UNIFORMS_OF_1_2_3 = [0.06344102965932141, 0.707504754819708]
