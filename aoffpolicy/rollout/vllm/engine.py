"""The rollout engine `vllm`: an `AsyncLLM` beside our rollout worker's event loop."""

from __future__ import annotations

import asyncio
import itertools
import logging
import multiprocessing
import os
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from multiprocessing import connection
from typing import Any, Self, cast

import anyio
import anyio.to_thread
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from aoffpolicy.config import Config
from aoffpolicy.devices import DeviceKind
from aoffpolicy.errors import DataError, EngineDiedError, EngineError
from aoffpolicy.rollout.vllm import arguments
from aoffpolicy.rollout.vllm.outputs import Stamps, sample_of
from aoffpolicy.rollout.vllm.plugin import OWNER
from aoffpolicy.rollout.vllm.receivers import EngineReceivers
from aoffpolicy.rollout.vllm.start import start
from aoffpolicy.samples import Prompt, SampleGroup
from aoffpolicy.transport.manifest import specs_of
from aoffpolicy.transport.messages import Sampling, TensorSpec

logger = logging.getLogger(__name__)
SEEDS = 2**31
LEAVE_S = 10.0
"""For the engine's workers to leave an update that failed."""


class VllmEngine:
    """Samples groups of completions with vLLM.

    Args:
        config: The resolved config.
        kind: Device of the engine.
        index: First device of the engine.

    Raises:
        EngineError: vLLM cannot be imported or started; the message says what to install, or what vLLM said.
    """

    def __init__(self, config: Config, kind: DeviceKind, index: int = 0) -> None:
        self._config = config
        self._kind = kind
        self.version = 0
        self._swap = config.weights.swap
        self._ids = itertools.count()
        self._running: dict[str, asyncio.Task[Any]] = {}
        """By request id, what is being generated."""
        self._refusal: str | None = None
        """Why nothing can be generated now; None where it can."""
        self._updated = asyncio.Event()
        """Cleared while an update goes on: what arrives then waits for the new weights."""
        self._updated.set()
        visible = arguments.visible_devices(kind, index, config.rollout.tensor_parallel)
        os.environ.update(
            arguments.environment(config, kind, torch.get_num_threads(), visible), **{OWNER: str(os.getpid())}
        )
        arguments.refuse_hidden_plugin()
        started: Future[Any] = Future()
        self._leave = threading.Event()
        threading.Thread(target=self._own_engine, args=(started,), name="vllm-parent", daemon=True).start()
        self._llm = started.result()
        self._reports_versions = hasattr(self._llm, "update_weight_version")
        self._vocab_size = int(self._llm.model_config.get_vocab_size())
        self._processes = {child.pid: child for child in multiprocessing.active_children()}
        logger.info("vLLM is up: %s", ", ".join(f"{child.name} (pid {pid})" for pid, child in self._processes.items()))

    @classmethod
    def from_config(cls, config: Config, device: torch.device) -> Self:
        return cls(config, cast(DeviceKind, device.type), device.index or 0)

    def _own_engine(self, started: Future[Any]) -> None:
        """In a thread that lives as long as this process: the engine's processes die with the thread that made them."""
        try:
            started.set_result(start(self._config, self._kind))
        except BaseException as error:
            started.set_exception(error)
        self._leave.wait()

    @property
    def capacity(self) -> int:
        """Twice the groups that are decoded at once: those that wait enter as soon as sequences of others end."""
        return 2 * max(1, self._config.rollout.max_sequences // self._config.data.group_size)

    @property
    def context_length(self) -> int:
        return int(self._llm.model_config.max_model_len)

    def specs(self) -> tuple[TensorSpec, ...]:
        """Every weight under its name in transformers, in the dtype of the engine; a tied output layer is left out."""
        path, dtype = self._config.model.path, getattr(torch, self._config.model.dtype)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=dtype)
        return specs_of(model.named_parameters(), dtype)

    async def receiver(self, backend: str, device: torch.device) -> EngineReceivers:
        """The membership of the engine's workers in the weight group.

        Args:
            backend: Collective backend.
            device: Unused: each engine worker receives on its own device.

        Raises:
            EngineError: Our plugin does not answer in one of them.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        model = {
            "dtype": str(self._llm.model_config.dtype).removeprefix("torch."),
            "quantized": self._llm.model_config.quantization is not None,
        }

        async def install(orders: Mapping[str, Any]) -> None:
            await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={**orders, **model}))

        receivers = EngineReceivers(
            host="::1" if ":" in self._config.control.host else "127.0.0.1",
            count=self._config.rollout.tensor_parallel,
            backend=backend,
            specs=self.specs(),
            install=install,
            load=self.update,
            heartbeat_timeout_s=self._config.control.heartbeat_timeout_s,
        )
        await receivers.open(self._config.weights.join_timeout_s)
        if self._reports_versions:
            await self._llm.update_weight_version(str(self.version))
        return receivers

    # --- Generating --------------------------------------------------------------------------------------------------

    async def generate(self, prompt: Prompt, sampling: Sampling) -> SampleGroup:
        """Sample one group; cancellation aborts it in the engine.

        Raises:
            DataError: The prompt is empty, does not fit into the context or holds unknown tokens.
            EngineError: The engine has died or holds no complete set of weights.
        """
        await self._updated.wait()
        self._refuse(prompt, sampling)
        request_id = f"{prompt.uid}-{next(self._ids)}"
        task = self._running[request_id] = asyncio.create_task(self._sample(request_id, prompt, sampling))
        try:
            await asyncio.wait({task})
        except anyio.get_cancelled_exc_class():
            task.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.wait({task})
            raise
        finally:
            del self._running[request_id]
        if task.cancelled():
            raise EngineError(f"prompt {prompt.uid} was lost: {self._refusal}")
        if (error := task.exception()) is not None:
            raise await self._explained(f"prompt {prompt.uid} was lost", error) from error
        group: SampleGroup = task.result()
        return group

    def _refuse(self, prompt: Prompt, sampling: Sampling) -> None:
        ids, context = prompt.token_ids_P, self.context_length
        if not 0 < len(ids) < context:
            raise DataError(
                f"prompt {prompt.uid} has {len(ids)} tokens; the engine takes 1 to {context - 1}, "
                f"in a context of {context}"
            )
        if ids.min() < 0 or ids.max() >= self._vocab_size:
            raise DataError(f"prompt {prompt.uid} holds a token outside the vocabulary of {self._vocab_size}")
        if sampling.n < 1 or sampling.max_tokens < 1 or not sampling.temperature >= 0:
            raise EngineError(f"prompt {prompt.uid}: cannot serve {sampling}")
        if self._refusal is not None:
            raise EngineError(f"prompt {prompt.uid} is refused: {self._refusal}")

    async def _sample(self, request_id: str, prompt: Prompt, sampling: Sampling) -> SampleGroup:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        rollout = self._config.rollout
        stamped = self._swap != "boundary" and not self._reports_versions
        parameters = SamplingParams(
            n=sampling.n,
            max_tokens=min(sampling.max_tokens, self.context_length - len(prompt.token_ids_P)),
            min_tokens=min(rollout.min_tokens, sampling.max_tokens),
            temperature=sampling.temperature,
            seed=(sampling.seed * 1_000_003 + prompt.uid * 8_191) % SEEDS,
            stop=list(rollout.stop) or None,
            stop_token_ids=list(rollout.stop_token_ids) or None,
            logprobs=0,
            output_kind=RequestOutputKind.CUMULATIVE if stamped else RequestOutputKind.FINAL_ONLY,
        )
        ids = prompt.token_ids_P.tolist()
        # The salt keeps keys and values that were computed under other weights out of reach.
        request = {"prompt_token_ids": ids, "cache_salt": f"version {self.version}"}
        stamps = [Stamps(self.version) for _ in range(sampling.n)]
        finished: dict[int, Any] = {}
        async for output in self._llm.generate(request, parameters, request_id):
            for completion in output.outputs:
                stamps[completion.index].mark(len(completion.token_ids), self.version)
                finished[completion.index] = completion
        samples = tuple(
            sample_of(ids, finished[index], stamps[index].versions(finished[index])) for index in range(sampling.n)
        )
        return SampleGroup(prompt=prompt, samples=samples)

    async def _explained(self, what: str, error: BaseException) -> EngineError:
        """The death of an engine process explains whatever else went wrong."""
        for _ in range(20):  # the news of a death may come a moment after its consequences
            if death := self._death():
                return EngineDiedError(f"{what}: {death}")
            if type(error).__name__ != "EngineDeadError":
                break
            await anyio.sleep(0.1)
        return EngineError(f"{what}: {type(error).__name__}: {error}")

    def _death(self) -> str:
        for child in self._processes.values():
            if child.exitcode is not None:
                return f"vLLM's {child.name} (pid {child.pid}) has died with exit code {child.exitcode}"
        return ""

    async def watch(self) -> None:
        """Wait for the end of one of vLLM's processes that this one started."""
        sentinels = [child.sentinel for child in self._processes.values()]
        await anyio.to_thread.run_sync(connection.wait, sentinels, abandon_on_cancel=True)
        raise EngineDiedError(self._death())

    # --- Weights -----------------------------------------------------------------------------------------------------

    async def update(self, term: int, version: int, timeout_s: float) -> None:
        """Load the update that the engine's workers are receiving; blocks what it must, and no longer.

        With swap mode "boundary" nothing may be in flight. In the others, running requests are held and go on under
        the new weights, with the keys and values they have or with new ones. After a failure nothing is generated
        until a later update has brought all weights.

        Raises:
            EngineError: A group is being generated and the swap mode is "boundary"; or the engine failed.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        if self._swap == "boundary" and self._running:
            raise EngineError(f"weights cannot be loaded while {len(self._running)} groups are being generated")
        self._updated.clear()
        try:
            with anyio.fail_after(timeout_s):
                if self._swap != "boundary":
                    await self._llm.pause_generation(mode="keep", clear_cache=False)
                await self._llm.start_weight_update()
                info = {"term": term, "timeout_s": timeout_s}
                await self._llm.update_weights(WeightTransferUpdateRequest(update_info=info))
                await self._llm.finish_weight_update()
                if self._reports_versions:
                    await self._llm.update_weight_version(str(version))
                self.version = version
                await self._forget_cache()
                if self._swap != "boundary":
                    await self._llm.resume_generation()
        except BaseException as error:
            self._lose_running(f"the last weight update failed and must be repeated: {error or type(error).__name__}")
            await self._leave_update()
            if isinstance(error, Exception):
                raise await self._explained(f"vLLM did not load version {version}", error) from error
            raise
        else:
            self._refusal = None
        finally:
            self._updated.set()

    async def _leave_update(self) -> None:
        """vllm-ascend 0.23 stays in an update that failed, and would refuse the next; vLLM itself leaves it."""
        if self._reports_versions:
            return
        with anyio.move_on_after(LEAVE_S, shield=True):
            try:
                await self._llm.finish_weight_update()
            except Exception as error:
                logger.info("the failed update was left already: %s", error)

    async def _forget_cache(self) -> None:
        if self._swap == "in_flight_recompute":
            if not await self._llm.reset_prefix_cache(reset_running_requests=True):
                raise EngineError("the keys and values of running requests could not be dropped")
        elif self._swap == "boundary":
            await self._llm.reset_prefix_cache()

    def _lose_running(self, refusal: str) -> None:
        """What was in flight under weights that are half gone is lost; nothing else is begun."""
        self._refusal = refusal
        for task in self._running.values():
            task.cancel()

    def close(self) -> None:
        """End the engine and its processes; no harm in a second call."""
        self._refusal = self._refusal or "the engine is closed"
        self._llm.shutdown()
        self._leave.set()
