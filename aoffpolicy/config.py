"""The typed configuration: a TOML file plus `--section.key value` overrides. Every fault is named at once."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from aoffpolicy import registry
from aoffpolicy.errors import ConfigError


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Run(Section):
    name: str = Field("run", min_length=1, pattern=r"^[\w.-]+$", description="name of the run's folder")
    dir: Path = Field(Path("runs"), description="folder that holds the run folders")
    steps: int = Field(10, ge=1, description="training steps")
    seed: int = Field(0, ge=0, description="seed of data order and sampling")
    max_staleness: int = Field(1, ge=0, description="versions a trained token may be behind; 0 is on-policy")
    deterministic: bool = Field(False, description="fixed assignment and order: runs repeat bit for bit")


class Model(Section):
    path: Path = Field(..., description="Hugging Face model folder (config, safetensors, tokenizer)")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="dtype of rollouts and sent weights"
    )


class Data(Section):
    source: str = Field(..., description="'reasoning_gym:NAME', or the path of a .jsonl or .parquet file")
    params: dict[str, Any] = Field(
        default_factory=dict, description="parameters of a reasoning_gym data set; endless unless size is given"
    )
    prompts_per_step: int = Field(16, ge=1, description="groups in a batch")
    group_size: int = Field(8, ge=1, description="completions of a prompt")
    max_prompt_tokens: int = Field(512, ge=1, description="longer prompts are left out and counted")
    shuffle: bool = Field(True, description="another order in every epoch, from run.seed")
    epochs: int | None = Field(None, ge=1, description="passes over the data; unset: as many as the steps need")
    chat: bool = Field(True, description="apply the tokenizer's chat template")
    system_prompt: str = Field("", description="system message of chat prompts")
    suffix: str = Field("", description="text put after every prompt's question")
    bad_prompts: Literal["skip", "fail"] = Field(
        "skip", description="empty and too long prompts: left out and counted, or an error at start"
    )

    @model_validator(mode="after")
    def _system_prompt_needs_chat(self) -> Self:
        if self.system_prompt and not self.chat:
            raise ValueError("data.system_prompt needs data.chat = true")
        return self


class Reward(Section):
    function: str = Field(
        "reasoning_gym", description="reasoning_gym, exact_match, last_number, package.module:function"
    )
    timeout_s: float = Field(10.0, gt=0, description="seconds for scoring one completion; then its process is killed")
    workers: int = Field(1, ge=1, description="reward worker processes")
    processes: int = Field(2, ge=1, description="killable scoring processes of each reward worker")
    on_error: Literal["zero", "drop", "fail"] = Field(
        "zero", description="a NaN, None, exception or hang: reward 0, drop the group, or stop the run"
    )


class Rollout(Section):
    engine: str = Field("torch", description="torch (embedded), vllm, or package.module:Class")
    vllm: dict[str, Any] = Field(default_factory=dict, description="further engine arguments of vLLM, by their names")
    workers: int = Field(1, ge=1, description="rollout workers, each an independent engine")
    tensor_parallel: int = Field(1, ge=1, description="devices of one engine")
    max_tokens: int = Field(64, ge=1, description="tokens of a completion at most")
    min_tokens: int = Field(0, ge=0, description="tokens of a completion before it may stop (engine vllm)")
    temperature: float = Field(1.0, gt=0, description="sampling temperature; the trainer applies the same")
    max_sequences: int = Field(128, ge=1, description="sequences an engine decodes at once")
    group_deadline_s: float | None = Field(
        None, gt=0, description="seconds after which a group is dispatched again, once, then dropped; unset: none"
    )
    stop: list[str] = Field(default_factory=list, description="texts that end a completion (engine vllm)")
    stop_token_ids: list[int] = Field(default_factory=list, description="stop tokens besides the model's EOS")
    device: Literal["auto", "cpu", "cuda", "npu"] = Field("auto", description="kind of device")
    threads: int = Field(0, ge=0, description="CPU cores of a worker on device cpu; 0 shares the cores evenly")


class Trainer(Section):
    backend: str = Field("fsdp2", description="fsdp2, or package.module:Class")
    ranks: int = Field(1, ge=1, description="trainer processes, one a device")
    lr: float = Field(1e-6, ge=0, description="learning rate of AdamW")
    token_budget: int = Field(4096, ge=1, description="packed tokens of a micro-batch; a longer sample has its own")
    warmup_steps: int = Field(0, ge=0, description="steps of linear warm-up")
    weight_decay: float = Field(0.0, ge=0, description="AdamW weight decay")
    betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW betas")
    grad_clip: float = Field(1.0, gt=0, description="gradient norm is clipped to this")
    passes: int = Field(1, ge=1, description="optimizer steps on each batch, all of it in each; they make one version")
    nonfinite: Literal["stop", "skip"] = Field(
        "stop", description="a loss or gradient that is not finite: save the batch and stop, or skip the update"
    )
    logprob_chunk: int = Field(1024, ge=1, description="completion tokens whose logits are held at once")
    activation_checkpointing: bool = Field(False, description="recompute layer activations in backward")
    device: Literal["auto", "cpu", "cuda", "npu"] = Field("auto", description="kind of device")
    threads: int = Field(0, ge=0, description="CPU cores of a rank on device cpu; 0 shares the cores evenly")


class Algorithm(Section):
    """A key that is unset is as the named algorithm's paper has it; docs/algorithms.md has the table."""

    name: str = Field(
        "grpo",
        description="grpo, dr_grpo, rloo, reinforce_plus_plus, reinforce_plus_plus_baseline, dapo, gspo, cispo, "
        "or package.module:callable",
    )
    clip_low: float | None = Field(None, gt=0, description="importance ratios are clipped below 1 - clip_low")
    clip_high: float | None = Field(None, gt=0, description="importance ratios are clipped above 1 + clip_high")
    normalize_std: bool | None = Field(None, description="divide advantages by the group's reward deviation")
    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum", "sequence_budget"] | None = Field(
        None, description="mean over tokens; over samples of their means; of their sums; of sums / rollout.max_tokens"
    )
    kl_coef: float = Field(0.0, ge=0, description="weight of the KL to the initial model; 0: no reference")
    kl_in: Literal["loss", "reward"] = Field(
        "loss", description="KL as a term of the loss (k3), or taken off each token's reward (k1)"
    )
    ratio: Literal["behaviour", "proximal"] = Field(
        "behaviour",
        description="ratios are against the policy that sampled, or (decoupled) the trainer's at the start of the step",
    )
    correction: Literal["none", "token", "sequence"] | None = Field(
        None, description="importance weights from the behaviour policy to the one that ratios are against, by level"
    )
    correction_cap: float = Field(2.0, ge=0, description="correction weights are truncated here; 0: never")
    mask: Literal["none", "token", "sequence", "sequence_mean"] = Field(
        "none", description="leave out tokens, or whole samples, whose ratio to the behaviour policy is extreme"
    )
    mask_low: float = Field(0.5, ge=0, description="ratios below are extreme")
    mask_high: float = Field(5.0, gt=0, description="ratios above are extreme")
    overlong_tokens: int | None = Field(
        None, ge=0, description="last tokens of rollout.max_tokens over which the reward falls by 1; 0: no punishment"
    )
    filter_zero_variance: bool | None = Field(None, description="leave out groups whose rewards are all equal")
    on_filtered: Literal["refill", "shrink"] = Field(
        "refill", description="for a group left out: generate another one, or train a smaller batch"
    )

    @model_validator(mode="after")
    def _mask_has_an_inside(self) -> Self:
        if self.mask_low >= self.mask_high:
            raise ValueError("algorithm.mask_low must be below algorithm.mask_high")
        return self


class Weights(Section):
    backend: Literal["auto", "gloo"] = Field("auto", description="collective for weights; auto: from the device")
    mode: Literal["dense"] = Field("dense", description="send every weight")
    swap: Literal["boundary", "in_flight", "in_flight_recompute"] = Field(
        "boundary",
        description="swap between generations; or while they run (engine vllm), which then go on under the new weights "
        "with their key/value cache kept, or computed again",
    )
    bucket_bytes: int = Field(16 * 2**20, ge=1024, description="bytes of one broadcast")
    join_timeout_s: float = Field(60.0, gt=0, description="deadline of forming the group")
    sync_timeout_s: float = Field(300.0, gt=0, description="deadline of one weight update")


class Control(Section):
    host: str = Field("127.0.0.1", description="address that the controller binds: IPv4, IPv6 or name")
    curve: bool = Field(True, description="encrypt and authenticate (CURVE); needed off loopback")
    heartbeat_timeout_s: float = Field(10.0, gt=0, description="silence after which a peer is lost")
    request_timeout_s: float = Field(1800.0, gt=0, description="deadline of one training step or one group")


class Supervisor(Section):
    max_restarts: int = Field(
        3, ge=0, description="restarts of one rollout worker within restart_window_s; 0: its death ends the run"
    )
    restart_window_s: float = Field(3600.0, gt=0, description="older restarts do not count")
    restart_backoff_s: float = Field(
        1.0, gt=0, description="before the first restart; doubled for each one that counts"
    )
    rollouts_timeout_s: float = Field(
        600.0,
        gt=0,
        description="with all rollout workers lost, seconds until a checkpoint is written and the run fails",
    )
    start_timeout_s: float = Field(600.0, gt=0, description="deadline of starting all processes and loading the model")
    stop_timeout_s: float = Field(10.0, gt=0, description="grace before a child is killed")
    interrupt_timeout_s: float = Field(600.0, gt=0, description="deadline of the checkpoint that Ctrl-C asks for")


class Status(Section):
    address: str = Field("", description="host:port of the status stream; empty: control.host and a free port")


class Samples(Section):
    max_bytes: int = Field(64 * 2**20, ge=0, description="size at which samples.jsonl is rotated; 0: no samples kept")
    files: int = Field(2, ge=1, description="sample files kept, the one being written included")


class Metrics(Section):
    sinks: list[str] = Field(
        default_factory=list,
        description="besides metrics.jsonl: tensorboard, wandb, trackio, prometheus, package.module:Class",
    )
    project: str = Field("aoffpolicy", min_length=1, description="project in wandb and trackio")
    prometheus_address: str = Field(
        "", description="host:port of the Prometheus endpoint; empty: control.host and a free port"
    )


class Checkpoint(Section):
    every: int = Field(0, ge=0, description="steps between checkpoints; 0: only when interrupted")
    keep: int = Field(2, ge=1, description="checkpoints kept")


class Eval(Section):
    every: int = Field(0, ge=0, description="policy versions between evaluations; 0: none")
    source: str = Field("", description="held-out data, in the form of data.source; empty: none")
    params: dict[str, Any] = Field(default_factory=dict, description="parameters of a reasoning_gym data set")
    prompts: int = Field(64, ge=1, description="prompts of an evaluation")
    temperature: float = Field(0.0, ge=0, description="sampling temperature; 0 is greedy")

    @model_validator(mode="after")
    def _source_for_every(self) -> Self:
        if self.every and not self.source:
            raise ValueError("eval.every is set, so eval.source must name held-out data")
        return self


class Config(Section):
    """A whole run."""

    run: Run = Run()
    model: Model
    data: Data
    reward: Reward = Reward()
    rollout: Rollout = Rollout()
    trainer: Trainer = Trainer()
    algorithm: Algorithm = Algorithm()
    weights: Weights = Weights()
    control: Control = Control()
    supervisor: Supervisor = Supervisor()
    status: Status = Status()
    samples: Samples = Samples()
    metrics: Metrics = Metrics()
    checkpoint: Checkpoint = Checkpoint()
    eval: Eval = Eval()

    @property
    def run_dir(self) -> Path:
        return self.run.dir / self.run.name


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file, apply `--section.key value` overrides, and check everything.

    Args:
        path: The TOML file.
        overrides: Alternating `--section.key` and value, or `--section.key=value`; values are TOML or plain text.

    Raises:
        ConfigError: One fault for each wrong key, all of them at once.
    """
    try:
        tree = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: cannot be read: {error}"]) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([f"{path}: not valid TOML: {error}"]) from error
    faults = [fault for key, value in _pairs(overrides) if (fault := _put(tree, key, value))]
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        faults += [_explain(detail["loc"], detail["msg"], detail["type"]) for detail in error.errors()]
        raise ConfigError(faults) from error
    faults += list(_conflicts(config))
    if faults:
        raise ConfigError(faults)
    return config


def describe(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Every key of the config as (key, default, meaning)."""
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from describe(field.annotation, f"{prefix}{name}.")
        else:
            default = "(required)" if field.is_required() else str(field.get_default(call_default_factory=True))
            yield prefix + name, default, field.description or ""


def to_toml(config: Config) -> str:
    """The resolved config as a TOML file that `load` reads back to the same config."""
    import tomli_w

    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def _pairs(overrides: Sequence[str]) -> Iterator[tuple[str, str]]:
    words = iter(overrides)
    for word in words:
        key, equals, value = word.partition("=")
        if not key.startswith("--"):
            raise ConfigError([f"{word}: expected --section.key value"])
        if not equals:
            following = next(words, None)
            if following is None:
                raise ConfigError([f"{key}: a value is missing"])
            value = following
        yield key.removeprefix("--"), value


def _put(tree: dict[str, Any], key: str, text: str) -> str | None:
    """Set a dotted key in the tree; returns the fault if there is one."""
    *sections, name = key.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            return f"{key}: {section} is a value, not a section"
    try:
        tree[name] = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        tree[name] = text
    return None


def _explain(location: tuple[int | str, ...], message: str, kind: str) -> str:
    key = ".".join(map(str, location)) or "config"
    if kind == "extra_forbidden":
        known = [name for name, _, _ in describe()]
        close = difflib.get_close_matches(key, known, n=1)
        return f"{key}: no such key" + (f"; did you mean {close[0]}?" if close else "")
    return f"{key}: {message}"


def _conflicts(config: Config) -> Iterator[str]:
    """Faults that concern more than one section, or what the config points to."""
    named = [
        ("rollout.engine", config.rollout.engine),
        ("trainer.backend", config.trainer.backend),
        ("algorithm.name", config.algorithm.name),
        *(("metrics.sinks", name) for name in config.metrics.sinks),
    ]
    yield from filter(None, (registry.fault(key, name) for key, name in named))
    if not config.model.path.is_dir():
        yield f"model.path: {config.model.path} is not a folder; `make model` builds the quickstart's"
    elif not (config.model.path / "config.json").is_file():
        yield f"model.path: {config.model.path} holds no config.json, so it is not a Hugging Face model folder"
    if config.data.group_size > config.rollout.max_sequences:
        yield (
            f"data.group_size: {config.data.group_size} completions do not fit into "
            f"rollout.max_sequences = {config.rollout.max_sequences}"
        )
    for key, source in (("data.source", config.data.source), ("eval.source", config.eval.source)):
        if not source or source.startswith("reasoning_gym:"):
            continue
        if not Path(source).is_file():
            yield f"{key}: {source} is neither a file nor reasoning_gym:NAME"
        elif config.reward.function == "reasoning_gym":
            yield f"{key}: the reward reasoning_gym scores data of reasoning_gym:NAME only, not {source}"
    if (config.algorithm.overlong_tokens or 0) > config.rollout.max_tokens:
        yield (
            f"algorithm.overlong_tokens: {config.algorithm.overlong_tokens} are more than "
            f"rollout.max_tokens = {config.rollout.max_tokens}, so every completion would be punished"
        )
    if config.rollout.engine == "torch":
        yield from _beyond_the_torch_engine(config)
    for name, key in VLLM_ARGUMENTS.items():
        if name in config.rollout.vllm:
            yield f"rollout.vllm.{name}: this argument of vLLM is set by {key}"
    if config.run.deterministic and config.weights.swap != "boundary":
        yield f"weights.swap: {config.weights.swap} depends on timing, so run.deterministic cannot be had with it"
    if config.rollout.min_tokens > config.rollout.max_tokens:
        yield (
            f"rollout.min_tokens: {config.rollout.min_tokens} is above rollout.max_tokens = {config.rollout.max_tokens}"
        )


VLLM_ARGUMENTS = {
    "model": "model.path",
    "tokenizer": "model.path",
    "dtype": "model.dtype",
    "tensor_parallel_size": "rollout.tensor_parallel",
    "max_num_seqs": "rollout.max_sequences",
    "max_model_len": "data.max_prompt_tokens and rollout.max_tokens",
    "seed": "run.seed",
    "data_parallel_size": "rollout.workers",
    "pipeline_parallel_size": "nothing: one engine is tensor-parallel only",
    "logprobs_mode": "nothing: training needs processed log-probabilities",
    "weight_transfer_config": "nothing: weights come through the weight plane",
}
"""Engine arguments of vLLM that are not to be given in `[rollout.vllm]`, and the keys that set them."""


def _beyond_the_torch_engine(config: Config) -> Iterator[str]:
    if config.rollout.tensor_parallel > 1:
        yield "rollout.tensor_parallel: the embedded torch engine runs on one device; use 1"
    if config.weights.swap != "boundary":
        yield 'weights.swap: the embedded torch engine swaps at the boundary only; use rollout.engine = "vllm"'
    for name in ("vllm", "stop", "min_tokens"):
        if getattr(config.rollout, name):
            yield f'rollout.{name}: the embedded torch engine does not know it; use rollout.engine = "vllm"'
