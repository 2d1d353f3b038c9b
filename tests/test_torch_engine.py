from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM

from aoffpolicy.errors import ConfigError, DataError, EngineError, WeightSyncError
from aoffpolicy.rollout.engine import engine_class
from aoffpolicy.rollout.torch_engine import TorchEngine
from aoffpolicy.samples import Prompt, Sample, SampleGroup
from aoffpolicy.transport.messages import Sampling
from tests.tiny import tiny_llama, tiny_qwen3

pytestmark = pytest.mark.anyio
EOS = 1
KINDS: dict[str, Callable[[Path], Path]] = {
    "llama": tiny_llama,
    "tied llama": lambda path: tiny_llama(path, tie=True),
    "qwen3": tiny_qwen3,
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: build(tmp_path_factory.mktemp(name.replace(" ", "-"))) for name, build in KINDS.items()}


@pytest.fixture
def folder(folders: dict[str, Path]) -> Path:
    return folders["llama"]


@pytest.fixture
def build() -> Iterator[Callable[..., TorchEngine]]:
    engines: list[TorchEngine] = []

    def make(path: Path, **settings: Any) -> TorchEngine:
        sizes = {"slots": 8, "prompt_length": 40, "completion_length": 40} | settings
        engines.append(TorchEngine(path, **sizes))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def prompt(uid: int, length: int | None = None) -> Prompt:
    rng = np.random.default_rng(uid)
    return Prompt(uid=uid, token_ids_P=rng.integers(3, 96, length or rng.integers(2, 20)).astype(np.int32))


def sampling(**changes: Any) -> Sampling:
    return Sampling(**({"n": 1, "max_tokens": 12, "temperature": 1.0, "seed": 0} | changes))


def completion(sample: Sample) -> list[int]:
    tokens: list[int] = sample.token_ids_T[sample.loss_mask_T].tolist()
    return tokens


def tokens_of(group: SampleGroup) -> list[list[int]]:
    return [completion(sample) for sample in group.samples]


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


async def many(engine: TorchEngine, prompts: list[Prompt], options: Sampling) -> list[SampleGroup]:
    return await asyncio.gather(*[engine.generate(one, options) for one in prompts])


async def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    with anyio.fail_after(timeout_s):
        while not condition():  # the engine's thread knows no event of this loop
            await anyio.sleep(0.005)


class Stalled:
    """Holds an engine's thread before its next decode step."""

    def __init__(self, engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        decode = engine._model.decode

        def wait(tokens_S: np.ndarray) -> torch.Tensor:
            self.reached.set()
            assert self.go_on.wait(20)
            return decode(tokens_S)

        monkeypatch.setattr(engine._model, "decode", wait)


# --- What is generated ----------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
async def test_greedy_tokens_are_those_of_transformers_generate(
    kind: str, folders: dict[str, Path], build: Callable[..., TorchEngine]
) -> None:
    prompts = [prompt(uid) for uid in range(6)]
    groups = await many(build(folders[kind]), prompts, sampling(temperature=0.0, n=2, max_tokens=20))
    model = AutoModelForCausalLM.from_pretrained(folders[kind], dtype=torch.float32)
    for one, group in zip(prompts, groups, strict=True):
        ids = torch.from_numpy(one.token_ids_P.astype(np.int64))[None]
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
        assert tokens_of(group) == [expected[0, ids.shape[1] :].tolist()] * 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
async def test_log_probabilities_are_those_of_a_plain_forward(
    kind: str, temperature: float, folders: dict[str, Path], build: Callable[..., TorchEngine]
) -> None:
    groups = await many(build(folders[kind]), [prompt(uid) for uid in range(5)], sampling(n=3, temperature=temperature))
    model = AutoModelForCausalLM.from_pretrained(folders[kind], dtype=torch.float32)
    for sample in (sample for group in groups for sample in group.samples):
        ids = torch.from_numpy(sample.token_ids_T.astype(np.int64))
        with torch.no_grad():
            logits_TV = model(ids[None], use_cache=False).logits[0, :-1].double() / (temperature or 1.0)
        expected = logits_TV.log_softmax(-1).gather(1, ids[1:, None])[:, 0].numpy()
        mask = sample.loss_mask_T[1:]
        np.testing.assert_allclose(sample.behaviour_logprobs_T[1:][mask], expected[mask], atol=1e-5)


async def test_a_sample_says_what_was_prompt_and_what_the_policy_produced(
    folder: Path, build: Callable[..., TorchEngine]
) -> None:
    engine = build(folder)
    engine.version = 7
    one = prompt(0, length=5)
    group = await engine.generate(one, sampling(n=2))
    assert group.prompt is one
    for sample in group.samples:
        count = len(sample.token_ids_T)
        assert sample.token_ids_T[:5].tolist() == one.token_ids_P.tolist()
        assert sample.loss_mask_T.tolist() == [False] * 5 + [True] * (count - 5)
        assert sample.versions_T.tolist() == [-1] * 5 + [7] * (count - 5)
        assert (sample.behaviour_logprobs_T[:5] == 0).all()
        assert (sample.behaviour_logprobs_T[5:] < 0).all()
        kinds = (sample.token_ids_T.dtype, sample.behaviour_logprobs_T.dtype, sample.versions_T.dtype)
        assert kinds == (np.int32, np.float32, np.int32)


async def test_a_completion_ends_with_the_stop_token_which_belongs_to_it(
    folder: Path, build: Callable[..., TorchEngine]
) -> None:
    groups = await many(build(folder), [prompt(uid) for uid in range(12)], sampling(n=8, max_tokens=40))
    samples = [sample for group in groups for sample in group.samples]
    stopped = [sample for sample in samples if sample.finish_reason == "stop"]
    assert stopped
    assert all(completion(sample).index(EOS) == sample.completion_tokens - 1 for sample in stopped)
    assert all("<eos>" not in sample.text for sample in stopped)
    cut_off = [sample for sample in samples if sample.finish_reason == "length"]
    assert cut_off
    assert all(EOS not in completion(sample) and sample.completion_tokens == 40 for sample in cut_off)


async def test_stop_tokens_of_the_configuration_are_added_to_the_models_own(
    folder: Path, build: Callable[..., TorchEngine]
) -> None:
    stops = set(range(1, 20))
    groups = await many(build(folder, stop_token_ids=range(2, 20)), [prompt(uid) for uid in range(4)], sampling(n=8))
    for sample in (sample for group in groups for sample in group.samples):
        tokens = completion(sample)
        assert not stops.intersection(tokens[:-1])
        assert (tokens[-1] in stops) == (sample.finish_reason == "stop")


async def test_one_token_is_generated_where_only_one_is_asked_for(
    folder: Path, build: Callable[..., TorchEngine]
) -> None:
    groups = await many(build(folder), [prompt(uid) for uid in range(5)], sampling(n=4, max_tokens=1))
    assert all(sample.completion_tokens == 1 for group in groups for sample in group.samples)


async def test_the_text_is_the_decoded_completion(folder: Path, build: Callable[..., TorchEngine]) -> None:
    engine = build(folder)
    group = await engine.generate(prompt(3), sampling())
    ids = completion(group.samples[0])
    assert group.samples[0].text == engine._tokenizer.decode(ids, skip_special_tokens=True) != ""


# --- Seeds ----------------------------------------------------


async def test_a_seed_gives_the_same_tokens_whatever_else_is_in_the_batch_and_however_many_slots(
    folder: Path, build: Callable[..., TorchEngine]
) -> None:
    prompts = [prompt(uid) for uid in range(8)]
    options = sampling(n=4, max_tokens=20)
    alone_engine = build(folder, slots=4)
    alone = [tokens_of(await alone_engine.generate(one, options)) for one in prompts]
    together = await many(build(folder, slots=32), prompts, options)
    backwards = await many(build(folder, slots=9), prompts[::-1], options)
    assert [tokens_of(group) for group in together] == alone
    assert [tokens_of(group) for group in backwards[::-1]] == alone


async def test_deterministic_log_probabilities_repeat_bit_for_bit_in_any_order_of_requests(
    folder: Path, build: Callable[..., TorchEngine]
) -> None:
    prompts, options = [prompt(uid) for uid in range(6)], sampling(n=3, max_tokens=20)
    engine = build(folder, slots=9, deterministic=True)
    forwards, backwards = await many(engine, prompts, options), await many(engine, prompts[::-1], options)
    for group, again in zip(forwards, backwards[::-1], strict=True):
        for sample, twin in zip(group.samples, again.samples, strict=True):
            np.testing.assert_array_equal(sample.token_ids_T, twin.token_ids_T)
            np.testing.assert_array_equal(sample.behaviour_logprobs_T, twin.behaviour_logprobs_T)


async def test_completions_of_a_group_and_runs_of_other_seeds_differ(
    folder: Path, build: Callable[..., TorchEngine]
) -> None:
    engine = build(folder)
    first = tokens_of(await engine.generate(prompt(0), sampling(n=8)))
    other = tokens_of(await engine.generate(prompt(0), sampling(n=8, seed=1)))
    assert len({tuple(tokens) for tokens in first + other}) == 16


# --- Slots ----------------------------------------------------


async def test_more_groups_than_slots_are_all_served(folder: Path, build: Callable[..., TorchEngine]) -> None:
    engine = build(folder, slots=6, group_size=3)
    groups = await many(engine, [prompt(uid) for uid in range(20)], sampling(n=3, max_tokens=15))
    assert [group.prompt.uid for group in groups] == list(range(20))
    assert engine.active_sequences == 0


async def test_groups_of_several_sizes_and_temperatures_go_together(
    folder: Path, build: Callable[..., TorchEngine]
) -> None:
    options = [sampling(n=n, temperature=t, max_tokens=m) for n, t, m in [(1, 0.0, 9), (8, 1.0, 3), (3, 0.5, 20)]]
    prompts = [prompt(uid) for uid in range(3)]
    engine = build(folder, slots=12)
    together = await asyncio.gather(*map(engine.generate, prompts, options))
    alone = [await engine.generate(one, option) for one, option in zip(prompts, options, strict=True)]
    assert list(map(tokens_of, together)) == list(map(tokens_of, alone))


async def test_a_group_is_returned_before_longer_ones_have_ended(
    folder: Path, build: Callable[..., TorchEngine]
) -> None:
    engine = build(folder, ignore_eos=True)
    ended: list[int] = []

    async def one(uid: int, max_tokens: int) -> None:
        await engine.generate(prompt(uid), sampling(max_tokens=max_tokens, temperature=0.0))
        ended.append(max_tokens)

    async with anyio.create_task_group() as tasks:
        for uid, max_tokens in enumerate([40, 2, 20]):
            tasks.start_soon(one, uid, max_tokens)
    assert ended == [2, 20, 40]


def test_a_group_larger_than_the_slots_is_refused_at_start(folder: Path) -> None:
    with pytest.raises(EngineError, match="group of 9 completions does not fit into 8 slots"):
        TorchEngine(folder, slots=8, group_size=9)


async def test_capacity_and_context_are_those_of_the_cache(folder: Path, build: Callable[..., TorchEngine]) -> None:
    engine = build(folder, slots=16, group_size=4, prompt_length=200, completion_length=100, ignore_eos=True)
    assert engine.capacity == 8
    assert engine.context_length == 256  # the model's max_position_embeddings
    group = await engine.generate(prompt(0, length=200), sampling(max_tokens=100))
    assert group.samples[0].finish_reason == "length"
    assert len(group.samples[0].token_ids_T) == 256


async def test_cancelling_a_group_frees_its_slots_for_those_that_wait(
    folder: Path, build: Callable[..., TorchEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(folder, slots=4)
    stalled = Stalled(engine, monkeypatch)
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.generate, prompt(0), sampling(n=4, max_tokens=40))
            tasks.start_soon(engine.generate, prompt(1), sampling(n=4, max_tokens=40))
            await anyio.to_thread.run_sync(stalled.reached.wait, 20)
            assert engine.active_sequences == 4
            tasks.cancel_scope.cancel()
    stalled.go_on.set()
    await until(lambda: not engine._requests)
    assert engine.active_sequences == 0
    with anyio.fail_after(20):
        group = await engine.generate(prompt(2), sampling(n=4))
    assert len(group.samples) == 4


async def test_groups_cancelled_at_any_moment_leave_the_engine_whole(
    folder: Path, build: Callable[..., TorchEngine]
) -> None:
    engine = build(folder, slots=8)
    expected = tokens_of(await engine.generate(prompt(0), sampling(n=3)))
    rng = np.random.default_rng(0)
    for round_ in range(30):
        async with anyio.create_task_group() as tasks:
            for uid in range(5):
                tasks.start_soon(engine.generate, prompt(uid), sampling(n=3, max_tokens=40))
            await anyio.sleep(float(rng.uniform(0, 0.02)) if round_ % 3 else 0)
            tasks.cancel_scope.cancel()
    with anyio.fail_after(20):
        assert tokens_of(await engine.generate(prompt(0), sampling(n=3))) == expected
    await until(lambda: not engine._requests)
    assert engine.active_sequences == 0


async def test_the_event_loop_stays_free_while_tokens_are_generated(
    folder: Path, build: Callable[..., TorchEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(folder)
    decode = engine._model.decode

    def slow(tokens_S: np.ndarray) -> torch.Tensor:
        time.sleep(0.2)
        return decode(tokens_S)

    monkeypatch.setattr(engine._model, "decode", slow)
    ticks = 0
    async with anyio.create_task_group() as tasks:

        async def tick() -> None:
            nonlocal ticks
            while True:
                await anyio.sleep(0.01)
                ticks += 1

        tasks.start_soon(tick)
        group = await engine.generate(prompt(0), sampling(max_tokens=4, temperature=0.0))
        tasks.cancel_scope.cancel()
    assert ticks >= 10 * (group.samples[0].completion_tokens - 1)


# --- Requests that are refused ----------------------------------------------------


@pytest.mark.parametrize("length", [0, 41, 300])
async def test_a_prompt_that_does_not_fit_is_refused_naming_its_uid_and_lengths(
    length: int, folder: Path, build: Callable[..., TorchEngine]
) -> None:
    engine = build(folder)
    bad = Prompt(uid=5, token_ids_P=np.full(length, 4, dtype=np.int32))
    with pytest.raises(DataError, match=rf"prompt 5 has {length} tokens; the engine takes 1 to 40, in a context of 80"):
        await engine.generate(bad, sampling())
    assert (await engine.generate(prompt(0), sampling())).samples


async def test_a_token_outside_the_vocabulary_is_refused(folder: Path, build: Callable[..., TorchEngine]) -> None:
    with pytest.raises(DataError, match="prompt 5 holds a token outside the vocabulary of 96"):
        await build(folder).generate(Prompt(uid=5, token_ids_P=np.array([4, 96], dtype=np.int32)), sampling())


@pytest.mark.parametrize("wrong", [{"n": 9}, {"n": 0}, {"max_tokens": 0}, {"temperature": -1.0}])
async def test_sampling_that_cannot_be_served_is_refused(
    wrong: dict[str, Any], folder: Path, build: Callable[..., TorchEngine]
) -> None:
    with pytest.raises(EngineError, match="prompt 0: cannot serve"):
        await build(folder).generate(prompt(0), sampling(**wrong))


def test_a_model_with_a_sliding_window_shorter_than_the_context_is_refused_at_start(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    config = MistralConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        sliding_window=16,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    MistralForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(EngineError, match="sliding window attention over 16 tokens, and sequences of 80"):
        TorchEngine(tmp_path, slots=2, prompt_length=40, completion_length=40)
    TorchEngine(tmp_path, slots=2, prompt_length=8, completion_length=8).close()


def test_a_model_that_gives_other_numbers_over_the_cache_is_refused_at_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prompt_only(*args: Any) -> torch.Tensor:
        return torch.zeros_like(args[0])

    monkeypatch.setattr("aoffpolicy.rollout.attention.decode_attention", prompt_only)
    with pytest.raises(EngineError, match="cannot run LlamaForCausalLM: over the key/value cache"):
        TorchEngine(folder, slots=2)


# --- Weights ----------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
async def test_loaded_weights_give_exactly_the_outputs_of_a_fresh_engine_with_them(
    kind: str, tmp_path: Path, build: Callable[..., TorchEngine]
) -> None:
    maker = {"llama": tiny_llama, "tied llama": tiny_llama, "qwen3": tiny_qwen3}[kind]
    tie = kind != "llama"
    old, new = maker(tmp_path / "old", tie=tie, seed=0), maker(tmp_path / "new", tie=tie, seed=1)
    engine, fresh = build(old, deterministic=True), build(new, deterministic=True)
    prompts, options = [prompt(uid) for uid in range(4)], sampling(n=2)
    before = await many(engine, prompts, options)
    weights = weights_of(new)
    assert {spec.name for spec in engine.specs()} == set(weights)
    assert ("lm_head.weight" in weights) == (kind == "llama")
    loaded = await anyio.to_thread.run_sync(engine.load_weights, iter(weights.items()))
    assert set(loaded) == set(weights)
    after, expected = await many(engine, prompts, options), await many(fresh, prompts, options)
    assert list(map(tokens_of, after)) == list(map(tokens_of, expected)) != list(map(tokens_of, before))
    for group, same in zip(after, expected, strict=True):
        for sample, twin in zip(group.samples, same.samples, strict=True):
            np.testing.assert_array_equal(sample.behaviour_logprobs_T, twin.behaviour_logprobs_T)


async def test_loading_while_a_group_is_generated_is_refused_and_harms_nothing(
    folder: Path, build: Callable[..., TorchEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(folder)
    expected = tokens_of(await engine.generate(prompt(0), sampling(max_tokens=40)))
    stalled = Stalled(engine, monkeypatch)
    groups: list[SampleGroup] = []

    async def generate() -> None:
        groups.append(await engine.generate(prompt(0), sampling(max_tokens=40)))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(generate)
        await anyio.to_thread.run_sync(stalled.reached.wait, 20)
        zeros = [(name, torch.zeros_like(weight)) for name, weight in weights_of(folder).items()]
        with pytest.raises(EngineError, match="while 1 groups are being generated, prompt 0 among them"):
            engine.load_weights(zeros)
        stalled.go_on.set()
    assert tokens_of(groups[0]) == expected


async def test_weights_load_as_soon_as_cancelled_groups_have_let_go(
    folder: Path, build: Callable[..., TorchEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(folder)
    stalled = Stalled(engine, monkeypatch)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(engine.generate, prompt(0), sampling(max_tokens=40))
        await anyio.to_thread.run_sync(stalled.reached.wait, 20)
        tasks.cancel_scope.cancel()
    threading.Timer(0.2, stalled.go_on.set).start()
    weights = weights_of(folder)
    assert len(await anyio.to_thread.run_sync(engine.load_weights, weights.items())) == len(weights)


async def test_a_group_asked_for_while_weights_are_loaded_is_refused(
    folder: Path, build: Callable[..., TorchEngine]
) -> None:
    engine = build(folder)
    loading, go_on = threading.Event(), threading.Event()

    def slowly() -> Iterator[tuple[str, torch.Tensor]]:
        loading.set()
        assert go_on.wait(20)
        yield from weights_of(folder).items()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.to_thread.run_sync, engine.load_weights, slowly())
        await anyio.to_thread.run_sync(loading.wait, 20)
        with pytest.raises(EngineError, match="prompt 0 is refused: weights are being loaded"):
            await engine.generate(prompt(0), sampling())
        go_on.set()
    assert (await engine.generate(prompt(0), sampling())).samples


def without(name: str, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: weight for key, weight in weights.items() if key != name}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda w: without("model.norm.weight", w), "1 of 21 weights were not received: model.norm.weight"),
        (lambda w: w | {"model.extra.weight": torch.zeros(1)}, "tensor model.extra.weight: the rollout model has no"),
        (
            lambda w: w | {"model.norm.weight": torch.zeros(3)},
            r"tensor model.norm.weight: \[3\] was .* \[32\]",
        ),
    ],
)
async def test_weights_that_are_not_the_models_are_refused_by_name_until_a_whole_set_comes(
    damage: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
    message: str,
    folder: Path,
    build: Callable[..., TorchEngine],
) -> None:
    engine, weights = build(folder), weights_of(folder)
    expected = tokens_of(await engine.generate(prompt(0), sampling()))
    with pytest.raises(WeightSyncError, match=message):
        engine.load_weights(damage(weights).items())
    with pytest.raises(EngineError, match="the last weight update failed and must be repeated"):
        await engine.generate(prompt(0), sampling())
    engine.load_weights(weights.items())
    assert tokens_of(await engine.generate(prompt(0), sampling())) == expected


async def test_weights_that_diverged_end_the_engine_naming_prompt_and_version(
    folder: Path, build: Callable[..., TorchEngine]
) -> None:
    engine, weights = build(folder), weights_of(folder)
    engine.load_weights((name, torch.full_like(weight, torch.nan)) for name, weight in weights.items())
    engine.version = 4
    with pytest.raises(EngineError, match=r"prompt 0: .* is not finite under policy version 4"):
        await engine.generate(prompt(0), sampling())


# --- Faults and end ----------------------------------------------------


async def test_a_fault_in_the_thread_fails_every_request_and_every_later_one_with_its_cause(
    folder: Path, build: Callable[..., TorchEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(folder, slots=2)

    def broken(tokens_S: np.ndarray) -> torch.Tensor:
        raise RuntimeError("the device fell off")

    monkeypatch.setattr(engine._model, "decode", broken)
    results = await asyncio.gather(
        *[engine.generate(prompt(uid), sampling(n=2)) for uid in range(3)], return_exceptions=True
    )
    for uid, error in enumerate(results):
        assert isinstance(error, EngineError)
        assert f"prompt {uid}" in str(error)
        assert "the device fell off" in str(error)
        assert isinstance(error.__cause__, RuntimeError)
    with pytest.raises(EngineError, match="the device fell off"):
        await engine.generate(prompt(9), sampling())
    await anyio.to_thread.run_sync(engine._thread.join, 20)
    with pytest.raises(EngineError, match="the device fell off"):
        engine.load_weights(weights_of(folder).items())


async def test_closing_fails_what_is_pending_and_leaves_no_thread(
    folder: Path, build: Callable[..., TorchEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(folder)
    stalled = Stalled(engine, monkeypatch)
    failures: list[EngineError] = []

    async def generate(uid: int) -> None:
        try:
            await engine.generate(prompt(uid), sampling(max_tokens=40))
        except EngineError as error:
            failures.append(error)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(generate, 0)
        await anyio.to_thread.run_sync(stalled.reached.wait, 20)
        tasks.start_soon(generate, 1)
        threading.Timer(0.1, stalled.go_on.set).start()
        await anyio.to_thread.run_sync(engine.close)
    assert len(failures) == 2
    assert not engine._thread.is_alive()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        await engine.generate(prompt(2), sampling())


def test_engines_are_found_by_name_or_by_import_path() -> None:
    assert engine_class("torch") is TorchEngine
    assert engine_class("aoffpolicy.rollout.torch_engine:TorchEngine") is TorchEngine
    with pytest.raises(ConfigError, match=r"rollout\.engine: 'vlm' is none of torch"):
        engine_class("vlm")
    with pytest.raises(ConfigError, match="cannot be imported: No module named 'nowhere'"):
        engine_class("nowhere:Engine")
