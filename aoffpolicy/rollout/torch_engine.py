"""The embedded engine: continuous batching of a Hugging Face model in one dedicated thread.

The thread alone touches the batch. Callers hand it requests through a queue and wait for futures; only the set of
requests in flight is shared, under a lock, and weights are loaded only while that set is empty.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Collection, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Self, cast

import anyio
import torch
from transformers import AutoTokenizer

from aoffpolicy.config import Config
from aoffpolicy.devices import DeviceKind, synchronize, torch_device
from aoffpolicy.errors import DataError, EngineError
from aoffpolicy.rollout.batch import ContinuousBatch, Group
from aoffpolicy.rollout.causal_lm import CausalLM
from aoffpolicy.rollout.engine import Receiver, loading_here
from aoffpolicy.rollout.kv_cache import CacheShape
from aoffpolicy.samples import Prompt, SampleGroup
from aoffpolicy.transport.manifest import Named
from aoffpolicy.transport.messages import Sampling, TensorSpec

logger = logging.getLogger(__name__)

DRAIN_TIMEOUT_S = 60.0
"""How long loading and closing wait for the thread to let go of cancelled groups: one decode step."""


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    group: Group
    future: Future[SampleGroup]


class TorchEngine:
    """Samples groups of completions with an unmodified Hugging Face causal language model.

    Args:
        path: Model folder, tokenizer included.
        device: Where the model and the key/value cache live.
        dtype: Of weights and cache.
        slots: Sequences decoded at once.
        group_size: Completions of a usual group; capacity is reckoned in such groups.
        prompt_length: Tokens of a prompt at most.
        completion_length: Tokens of a completion at most; both are taken down to what the model was built for.
        stop_token_ids: End a completion, besides those of the model's generation config.
        ignore_eos: Only the stop tokens given and the length end a completion.
        deterministic: Run one group at a time: slower, but log-probabilities then repeat bit for bit, whatever the
            order and timing of the requests. Without it they repeat up to rounding, as do the tokens.

    Raises:
        EngineError: The model cannot be run this way, or a group does not fit into the slots.
    """

    def __init__(
        self,
        path: Path,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
        slots: int = 128,
        group_size: int = 1,
        prompt_length: int = 1024,
        completion_length: int = 1024,
        stop_token_ids: Collection[int] = (),
        ignore_eos: bool = False,
        deterministic: bool = False,
    ) -> None:
        if group_size > slots:
            raise EngineError(f"a group of {group_size} completions does not fit into {slots} slots")
        self._device = device or torch.device("cpu")
        self._tokenizer = AutoTokenizer.from_pretrained(path)
        shape = CacheShape(2 * (slots // group_size), prompt_length, slots, completion_length)
        self._model = CausalLM(path, dtype, self._device, shape)
        self._model.probe()
        stops = frozenset(stop_token_ids) | (frozenset() if ignore_eos else self._model.eos_token_ids)
        self._batch = ContinuousBatch(self._model, stops, one_group=deterministic)
        self.version = 0
        self._queue: SimpleQueue[_Request | None] = SimpleQueue()
        self._requests: dict[Group, _Request] = {}
        """In flight: from `generate` until the future is done and the thread has let go of the group."""
        self._changed = threading.Condition()
        """Guards `_requests` and `_closed_because`; notified whenever a request leaves."""
        self._closed_because: str | None = None
        """Why nothing can be generated now; None where it can."""
        self._cause: BaseException | None = None
        """What ended the thread."""
        self._thread = threading.Thread(target=self._run, name="rollout-engine", daemon=True)
        self._thread.start()
        logger.info(
            "%s: %d slots, context of %d tokens, %.2f GB key/value cache",
            path,
            slots,
            self.context_length,
            self._model.cache.nbytes / 1e9,
        )

    @classmethod
    def from_config(cls, config: Config, device: torch.device) -> Self:
        """The engine of a run: it has room for the longest prompt that the data let in and the longest completion."""
        return cls(
            config.model.path,
            device=torch_device(cast(DeviceKind, device.type), device.index or 0),
            dtype=getattr(torch, config.model.dtype),
            slots=config.rollout.max_sequences,
            group_size=config.data.group_size,
            prompt_length=config.data.max_prompt_tokens,
            completion_length=config.rollout.max_tokens,
            stop_token_ids=config.rollout.stop_token_ids,
            deterministic=config.run.deterministic,
        )

    @property
    def capacity(self) -> int:
        """Twice the groups that fit into the slots: those that wait enter as soon as sequences of others end."""
        return self._model.shape.prompts

    @property
    def context_length(self) -> int:
        return self._model.context_length

    @property
    def active_sequences(self) -> int:
        """Slots in use."""
        return self._batch.active

    def specs(self) -> tuple[TensorSpec, ...]:
        return self._model.specs()

    async def receiver(self, backend: str, device: torch.device) -> Receiver:
        return loading_here(self, backend, device)

    async def generate(self, prompt: Prompt, sampling: Sampling) -> SampleGroup:
        """Sample one group; cancellation frees its slots before the next token.

        Raises:
            DataError: The prompt is empty, does not fit into the context or holds unknown tokens.
            EngineError: The engine has failed, is closed, or has no complete set of weights.
        """
        group = Group(prompt, sampling, self._max_tokens(prompt, sampling), self.version)
        request = _Request(group, Future())
        with self._changed:
            if self._closed_because:
                raise EngineError(f"prompt {prompt.uid} is refused: {self._closed_because}") from self._cause
            self._requests[group] = request
        self._queue.put(request)
        return await asyncio.wrap_future(request.future)

    def _max_tokens(self, prompt: Prompt, sampling: Sampling) -> int:
        """What a completion of this prompt may have; raises where the request cannot be served."""
        ids, shape = prompt.token_ids_P, self._model.shape
        if not 0 < len(ids) <= shape.prompt_length:
            raise DataError(
                f"prompt {prompt.uid} has {len(ids)} tokens; the engine takes 1 to {shape.prompt_length}, "
                f"in a context of {self.context_length}"
            )
        if ids.min() < 0 or ids.max() >= self._model.vocab_size:
            raise DataError(f"prompt {prompt.uid} holds a token outside the vocabulary of {self._model.vocab_size}")
        if not 0 < sampling.n <= shape.slots or sampling.max_tokens < 1 or not sampling.temperature >= 0:
            raise EngineError(f"prompt {prompt.uid}: cannot serve {sampling} in {shape.slots} slots")
        return min(sampling.max_tokens, shape.slot_length, self.context_length - len(ids))

    def load_weights(self, tensors: Iterable[Named]) -> Collection[str]:
        """Replace all weights and forget the key/value cache; blocks. After an error it must be repeated.

        Raises:
            EngineError: A group is being generated, or the engine has failed or is closed.
            WeightSyncError: A tensor is missing, unknown or of another shape.
        """
        with self._changed:
            self._refuse_while_generating()
            self._closed_because = "weights are being loaded"
        try:
            loaded = self._model.load(tensors)
            synchronize(self._device)
        except BaseException as error:
            with self._changed:
                self._closed_because = f"the last weight update failed and must be repeated: {error}"
            raise
        with self._changed:
            self._closed_because = None
        return loaded

    def _refuse_while_generating(self) -> None:
        if not self._thread.is_alive():
            raise EngineError(f"weights cannot be loaded: {self._closed_because}") from self._cause
        wanted = [group for group, request in self._requests.items() if not request.future.cancelled()]
        if wanted:
            raise EngineError(
                f"weights cannot be loaded while {len(wanted)} groups are being generated, "
                f"prompt {wanted[0].prompt.uid} among them"
            )
        if not self._changed.wait_for(lambda: not self._requests, DRAIN_TIMEOUT_S):
            raise EngineError(f"{len(self._requests)} cancelled groups did not end within {DRAIN_TIMEOUT_S} s")

    async def watch(self) -> None:
        """This engine has no process of its own."""
        await anyio.sleep_forever()

    def close(self) -> None:
        """Fail what is still being generated and end the thread; no harm in a second call."""
        with self._changed:
            self._closed_because = self._closed_because or "the engine is closed"
        self._queue.put(None)
        self._thread.join(DRAIN_TIMEOUT_S)

    # --- In the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            torch_device(cast(DeviceKind, self._device.type), self._device.index or 0)  # current in this thread too
            while self._take_requests():
                self._drop_cancelled()
                for group in self._batch.step():
                    self._finish(group)
            self._fail_all(EngineError("the engine was closed"))
        except BaseException as error:
            logger.exception("the engine has failed")
            self._fail_all(error)

    def _take_requests(self) -> bool:
        """Move requests into the batch, waiting where it is empty; False when the engine is closed."""
        while not self._batch or not self._queue.empty():
            request = self._queue.get()
            if request is None:
                return False
            if request.group in self._requests:  # and not let go of since, as cancelled groups are
                self._batch.add(request.group)
        return True

    def _drop_cancelled(self) -> None:
        with self._changed:
            cancelled = {group for group, request in self._requests.items() if request.future.cancelled()}
        if cancelled:
            self._batch.drop(cancelled)
            self._let_go(cancelled)

    def _finish(self, group: Group) -> None:
        result = group.result(self._text)
        future = self._requests[group].future
        self._let_go({group})
        if future.set_running_or_notify_cancel():
            future.set_result(result)

    def _let_go(self, groups: Collection[Group]) -> None:
        with self._changed:
            for group in groups:
                del self._requests[group]
            self._changed.notify_all()

    def _fail_all(self, error: BaseException) -> None:
        with self._changed:
            self._cause = error
            self._closed_because = f"the engine has ended: {error}"
            requests = list(self._requests.values())
            self._requests.clear()
            self._changed.notify_all()
        for request in requests:
            if request.future.set_running_or_notify_cancel():
                failure = EngineError(f"prompt {request.group.prompt.uid} was lost: {self._closed_because}")
                failure.__cause__ = error
                request.future.set_exception(failure)

    def _text(self, token_ids: list[int]) -> str:
        text = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        assert isinstance(text, str)
        return text
