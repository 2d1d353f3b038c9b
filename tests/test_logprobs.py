from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from aoffpolicy.trainer.logprobs import LogprobModel
from aoffpolicy.trainer.packing import group_trained_tokens, pack_group, stack
from tests.groups import batch
from tests.tiny import tiny_llama, tiny_qwen3

MODELS: dict[str, Callable[[Path], Path]] = {
    "llama": tiny_llama,
    "llama-tied": lambda path: tiny_llama(path, tie=True),
    "qwen3-tied": tiny_qwen3,
    "qwen3": lambda path: tiny_qwen3(path, tie=False),
}
TEMPERATURE = 0.7


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> torch.nn.Module:
    loaded: torch.nn.Module = AutoModelForCausalLM.from_pretrained(MODELS[request.param](tmp_path), dtype=torch.float32)
    return loaded


def plain(model: torch.nn.Module) -> torch.Tensor:
    """Log-probabilities of all trained tokens, each sample alone in an unpacked forward."""
    scored = []
    for group in batch():
        for sample in group.samples:
            ids = torch.as_tensor(sample.token_ids_T, dtype=torch.int64)
            logits = model(ids[None], use_cache=False).logits[0, :-1].float() / TEMPERATURE
            logprobs = logits.log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1)
            scored.append(logprobs[torch.as_tensor(sample.loss_mask_T[1:])])
    return torch.cat(scored)


@pytest.mark.parametrize("chunk", [1, 4, 1000])
def test_packed_chunked_logprobs_and_gradients_equal_a_plain_forward(model: torch.nn.Module, chunk: int) -> None:
    expected = plain(model)
    expected.mean().backward()
    expected_gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()

    rows = [row for group in batch() for row in pack_group(group, np.zeros(group_trained_tokens(group)), 1000)]
    policy = LogprobModel(model, chunk)
    packed = torch.cat([policy(stack([row], 1000, torch.device("cpu"))[0], TEMPERATURE)[0] for row in rows])
    packed.mean().backward()

    torch.testing.assert_close(packed, expected, atol=1e-5, rtol=0)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected_gradients[name], atol=1e-6, rtol=1e-4)


def test_rows_stacked_with_padding_give_the_same_as_alone(model: torch.nn.Module) -> None:
    policy = LogprobModel(model, 1000)
    rows = sorted(
        (row for group in batch() for row in pack_group(group, np.zeros(group_trained_tokens(group)), 1000)), key=len
    )
    (together,) = stack(rows, 10_000, torch.device("cpu"))
    alone = [policy(stack([row], 1000, torch.device("cpu"))[0], 1.0)[0] for row in rows]
    torch.testing.assert_close(policy(together, 1.0)[0], torch.cat(alone), atol=1e-5, rtol=0)


def test_entropy_is_that_of_the_tempered_distribution(model: torch.nn.Module) -> None:
    rows = [row for group in batch() for row in pack_group(group, np.zeros(group_trained_tokens(group)), 1000)]
    (stacked,) = stack(rows[:1], 1000, torch.device("cpu"))
    _, entropy_N = LogprobModel(model, 1000)(stacked, TEMPERATURE)
    hidden = model(
        stacked.token_ids_RT,
        position_ids=stacked.position_ids_RT,
        attention_mask=stacked.mask_R1TT,
        use_cache=False,
    ).logits[0, stacked.source_N]
    expected = torch.distributions.Categorical(logits=hidden / TEMPERATURE).entropy()
    torch.testing.assert_close(entropy_N, expected, atol=1e-5, rtol=0)
    assert not entropy_N.requires_grad
