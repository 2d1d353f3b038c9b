"""Rollouts on real vLLM: whole rollout worker processes, real weight groups, tiny models."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import anyio
import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from aoffpolicy.errors import AoffpolicyError, RemoteError, WeightSyncError
from aoffpolicy.samples import Prompt, SampleGroup
from aoffpolicy.transport.manifest import Named
from tests.tiny import tiny_llama, tiny_qwen3, tiny_qwen3_moe
from tests.vllm_rollouts import PROMPTS, Rollouts, config_of, rollouts

pytest.importorskip("vllm")
pytestmark = [pytest.mark.anyio, pytest.mark.vllm, pytest.mark.multiprocess, pytest.mark.timeout(600)]
Answers = list[tuple[list[int], np.ndarray]]


def llama(path: Path, *, tie: bool = False, seed: int = 0) -> Path:
    return tiny_llama(path, tie=tie, hidden=128, seed=seed)


def tied_llama(path: Path, *, seed: int = 0) -> Path:
    return llama(path, tie=True, seed=seed)


def qwen3(path: Path, *, seed: int = 0) -> Path:
    return tiny_qwen3(path, tie=True, hidden=128, head_dim=32, seed=seed)


def weights_of(path: Path, dtype: torch.dtype = torch.float32) -> list[Named]:
    """What a trainer would send: the names of transformers' modules, a tied output layer left out."""
    return list(AutoModelForCausalLM.from_pretrained(path, dtype=dtype).named_parameters())


def same(left: Answers, right: Answers) -> bool:
    """Equal tokens and, bit for bit, equal log-probabilities."""
    return all(
        ours == theirs and np.array_equal(mine, other)
        for (ours, mine), (theirs, other) in zip(left, right, strict=True)
    )


# --- Updates -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "dtype", "tensor_parallel", "workers"),
    [
        pytest.param(llama, "float32", 1, 2, id="untied-llama-float32-two-workers"),
        pytest.param(tied_llama, "bfloat16", 2, 1, id="tied-llama-bfloat16-tp2"),
        pytest.param(qwen3, "float32", 2, 1, id="tied-qwen3-float32-tp2"),
        pytest.param(tiny_qwen3_moe, "bfloat16", 1, 1, id="qwen3-moe-bfloat16"),
    ],
)
async def test_updated_engines_equal_one_that_was_loaded_with_the_new_weights(
    build: Callable[..., Path], dtype: str, tensor_parallel: int, workers: int, tmp_path: Path
) -> None:
    old, new = build(tmp_path / "old", seed=0), build(tmp_path / "new", seed=1)
    changes = {"model": {"dtype": dtype}, "rollout": {"tensor_parallel": tensor_parallel}}
    travelling: torch.dtype = getattr(torch, dtype)
    configs = [config_of(path, **changes) for path in [*[old] * workers, new]]
    async with rollouts(tmp_path / "logs", *configs) as running:
        *updated, fresh = running.peers
        expected = await running.batch(fresh)
        async with running.plane(weights_of(old, travelling)) as plane:
            await plane.form(updated)
            for peer in updated:
                assert not same(await running.batch(peer), expected)
            for version, path in enumerate([old, new], start=1):
                running.source = weights_of(path, travelling)
                await plane.send(version)
                assert len({reply.digest for reply in await plane.load(version)}) == 1
            for peer in updated:
                assert same(await running.batch(peer), expected)
                group = await running.generate(peer, PROMPTS[0], n=2, temperature=1.0)
                assert group.oldest_version == 2


async def test_a_running_engine(tmp_path: Path) -> None:
    """One engine, since it takes long to start: what is asked of it one after another."""
    old, new = llama(tmp_path / "old", seed=0), llama(tmp_path / "new", seed=1)
    small_steps = {"vllm": {"max_num_batched_tokens": 96}}
    configs = [config_of(path, rollout=small_steps) for path in (old, new)]
    async with rollouts(tmp_path / "logs", *configs) as running:
        engine, fresh = running.peers
        await many_long_prompts_are_served_at_once(running)
        await cached_prefixes_are_forgotten(running, weights_of(new))
        await mismatches_are_refused_before_anything_moves(running, weights_of(new))
        await failed_updates_are_repeated_in_full(running, weights_of(new), weights_of(old))
        await groups_have_their_own_seeds_and_limits(running)
        await a_cancelled_group_leaves_the_engine(running)
        await the_engine_does_not_outlive_the_worker(running)
        await the_death_of_the_core_is_reported(running)
        assert engine != fresh


LONG_PREFIX = Prompt(uid=9, token_ids_P=np.array([7, 8, 9, 10] * 15, dtype=np.int32))
"""Over three blocks of the prefix cache."""


async def many_long_prompts_are_served_at_once(running: Rollouts) -> None:
    """More tokens than one of vLLM's steps takes: a prompt cut in two would kill the worker on CPU (arguments.py)."""
    engine, _ = running.peers
    async with anyio.create_task_group() as tasks:
        for uid in range(20, 26):
            prompt = Prompt(uid=uid, token_ids_P=np.full(60, uid, dtype=np.int32))
            tasks.start_soon(lambda prompt=prompt: running.generate(engine, prompt, n=2, temperature=1.0))


async def cached_prefixes_are_forgotten(running: Rollouts, new: list[Named]) -> None:
    engine, fresh = running.peers
    before = await running.generate(engine, LONG_PREFIX)
    again = await running.generate(engine, LONG_PREFIX)
    assert np.array_equal(before.samples[0].token_ids_T, again.samples[0].token_ids_T)  # the second from the cache
    async with running.plane(new) as plane:
        await plane.form([engine])
        await plane.send(1)
        await plane.load(1)
    after = await running.generate(engine, LONG_PREFIX)
    expected = await running.generate(fresh, LONG_PREFIX)
    assert np.array_equal(after.samples[0].behaviour_logprobs_T, expected.samples[0].behaviour_logprobs_T)


async def mismatches_are_refused_before_anything_moves(running: Rollouts, new: list[Named]) -> None:
    engine, _ = running.peers
    name, tensor = new[3]
    for wrong, words in (
        ([*new[:3], (name, tensor[1:]), *new[4:]], f"tensor {name} is sent as"),
        ([*new[:3], ("other", tensor), *new[4:]], "tensor other is sent but not accepted"),
        ([*new[:3], (name, tensor.to(torch.float64)), *new[4:]], f"tensor {name} is sent as"),
        (new[:-1], f"tensor {new[-1][0]} is accepted but not sent"),
    ):
        async with running.plane(wrong, dtype=None) as plane:
            with pytest.raises(WeightSyncError, match=words):
                await plane.form([engine])
    assert (await running.generate(engine, PROMPTS[0])).oldest_version == 1


async def failed_updates_are_repeated_in_full(running: Rollouts, new: list[Named], old: list[Named]) -> None:
    engine, fresh = running.peers
    async with running.plane(old) as plane:
        await plane.form([engine])
        running.fail_at = old[len(old) // 2][0]
        with pytest.raises(WeightSyncError, match=f"trainer 0.*cannot gather {running.fail_at}"):
            await plane.send(2)
            await plane.load(2)
        with pytest.raises(RemoteError, match="the last weight update failed and must be repeated"):
            await running.generate(engine, PROMPTS[0])
        running.fail_at, running.source = "", new
        await plane.form([engine])
        await plane.send(2)
        await plane.load(2)
    assert same(await running.batch(engine), await running.batch(fresh))


async def groups_have_their_own_seeds_and_limits(running: Rollouts) -> None:
    engine, _ = running.peers
    first = await running.generate(engine, PROMPTS[1], n=4, max_tokens=10, temperature=1.0)
    second = await running.generate(engine, PROMPTS[1], n=4, max_tokens=10, temperature=1.0)
    tokens = [[sample.token_ids_T.tolist() for sample in group.samples] for group in (first, second)]
    assert tokens[0] == tokens[1]
    assert len({tuple(completion) for completion in tokens[0]}) == 4
    for sample in first.samples:
        assert sample.completion_tokens <= 10
        assert sample.finish_reason == ("stop" if sample.token_ids_T[-1] == 1 else "length")
        assert (sample.behaviour_logprobs_T[sample.loss_mask_T] < 0).all()
    with pytest.raises(RemoteError, match="DataError: prompt 5 has 300 tokens; the engine takes 1 to 87"):
        await running.generate(engine, Prompt(uid=5, token_ids_P=np.zeros(300, dtype=np.int32)))
    with pytest.raises(RemoteError, match="outside the vocabulary of 96"):
        await running.generate(engine, Prompt(uid=6, token_ids_P=np.array([99], dtype=np.int32)))


async def a_cancelled_group_leaves_the_engine(running: Rollouts) -> None:
    """Were it not aborted, ten times as many sequences as are decoded at once would be waited for."""
    engine, _ = running.peers
    with anyio.move_on_after(0.6):
        async with anyio.create_task_group() as tasks:
            for uid in range(40):
                prompt = Prompt(uid=uid, token_ids_P=PROMPTS[0].token_ids_P)
                tasks.start_soon(lambda prompt=prompt: running.generate(engine, prompt, n=2, temperature=1.0))
    async with running.plane(running.source) as plane:  # refused while anything is in flight
        await plane.form([engine])
        await plane.send(3)
        await plane.load(3)
    assert (await running.generate(engine, PROMPTS[0])).oldest_version == 3


async def the_engine_does_not_outlive_the_worker(running: Rollouts) -> None:
    _, fresh = running.peers
    running.supervisor.expect_exits()
    worker = psutil.Process(running.pid(fresh))
    below = worker.children(recursive=True)
    assert len(below) >= 2  # EngineCore and a worker of its own
    worker.kill()
    _, alive = await anyio.to_thread.run_sync(lambda: psutil.wait_procs(below, timeout=5))
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


async def the_death_of_the_core_is_reported(running: Rollouts) -> None:
    engine, _ = running.peers
    core = next(
        child for child in psutil.Process(running.pid(engine)).children() if "EngineCore" in " ".join(child.cmdline())
    )
    killed_at = 0.0

    async def kill() -> None:
        nonlocal killed_at
        await anyio.sleep(0.3)
        killed_at = time.monotonic()
        os.kill(core.pid, signal.SIGKILL)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(kill)
        with pytest.raises(RemoteError, match=rf"rollout 0: .*EngineCore.*\(pid {core.pid}\) has died") as caught:
            while True:
                await running.generate(engine, PROMPTS[0], n=2, temperature=1.0)
    assert time.monotonic() - killed_at < 5.0, caught.value


# --- Swaps in flight -----------------------------------------------------------------------------------------------


EOS = 1
LONG = 3000
"""Tokens of a request that is still running when an update comes."""


@pytest.mark.parametrize("swap", ["in_flight", "in_flight_recompute"])
async def test_a_long_request_goes_on_under_the_new_weights(swap: str, tmp_path: Path) -> None:
    old, new = (tiny_llama(tmp_path / name, hidden=128, positions=4096, seed=seed) for seed, name in enumerate("ab"))
    rollout = {"max_tokens": LONG, "min_tokens": LONG, "engine": "tests.vllm_engines:InterruptedEngine"}
    config = config_of(old, rollout=rollout, weights={"swap": swap})
    async with rollouts(tmp_path / "logs", config) as running:
        (engine,) = running.peers
        groups: list[SampleGroup] = []

        async def long_request() -> None:
            groups.append(await running.generate(engine, PROMPTS[0], max_tokens=LONG))

        async with running.plane(weights_of(new)) as plane:
            await plane.form([engine])
            undisturbed = (await running.generate(engine, PROMPTS[0], max_tokens=LONG)).samples[0]
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(long_request)
                await plane.send(1)
                await plane.load(1)
        sample = groups[0].samples[0]
        versions = sample.versions_T[sample.loss_mask_T]
        swapped = int((versions == 0).sum())
        assert 0 < swapped < LONG and (versions[swapped:] == 1).all()
        assert groups[0].oldest_version == 0
        until = len(PROMPTS[0].token_ids_P) + swapped
        assert np.array_equal(sample.token_ids_T[:until], undisturbed.token_ids_T[:until])
        await the_rest_is_of_the_new_weights(new, sample.token_ids_T, sample.behaviour_logprobs_T, until, swap)


async def the_rest_is_of_the_new_weights(
    new: Path, tokens_T: np.ndarray, logprobs_T: np.ndarray, until: int, swap: str
) -> None:
    """With the cache computed again they are exactly the new model's; with the old cache they cannot be."""
    model = AutoModelForCausalLM.from_pretrained(new, dtype=torch.float32)
    with torch.no_grad():
        logits_TV = model(torch.from_numpy(tokens_T[None].astype(np.int64))).logits[0]
    logits_TV[:, EOS] = -torch.inf  # by min_tokens
    expected_T = logits_TV.log_softmax(-1).numpy()[np.arange(until - 1, len(tokens_T) - 1), tokens_T[until:]]
    # The token sampled first after the swap came from a step that was computed before or after it.
    difference = np.abs(logprobs_T[until + 1 :] - expected_T[1:]).max()
    assert (difference < 1e-4) == (swap == "in_flight_recompute"), difference


# --- What can go wrong at the start --------------------------------------------------------------------------------


async def test_an_engine_that_our_plugin_does_not_reach_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "lora_filesystem_resolver")
    with pytest.raises(
        AoffpolicyError, match=r"VLLM_PLUGINS=lora_filesystem_resolver keeps vLLM from .* add aoffpolicy"
    ):
        async with rollouts(tmp_path / "logs", config_of(llama(tmp_path / "model"))):
            pass


async def test_a_failed_start_says_what_vllm_said(tmp_path: Path) -> None:
    config = config_of(llama(tmp_path / "model"), rollout={"vllm": {"block_size": 7}})
    with pytest.raises(AoffpolicyError, match=r"(?s)vLLM did not start.*it said.*block"):
        async with rollouts(tmp_path / "logs", config):
            pass
    config = config_of(tmp_path / "model", rollout={"vllm": {"max_modle_len": 7}})
    with pytest.raises(AoffpolicyError, match=r"rollout.vllm.max_modle_len: this vLLM has no such engine argument"):
        async with rollouts(tmp_path / "logs2", config):
            pass


async def test_ready_is_refused_where_an_engine_worker_has_no_receiver(tmp_path: Path) -> None:
    config = config_of(llama(tmp_path / "model"), rollout={"engine": "tests.vllm_engines:DeafEngine"})
    with pytest.raises(AoffpolicyError, match=r"engine worker 0 of 1 cannot receive weights.*VLLM_PLUGINS"):
        async with rollouts(tmp_path / "logs", config):
            pass
