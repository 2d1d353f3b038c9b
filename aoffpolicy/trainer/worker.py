"""The trainer worker process: one rank of the trainer and its membership in the weight plane."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from aoffpolicy import child
from aoffpolicy.child import Bootstrap, Handlers
from aoffpolicy.devices import COLLECTIVE_BACKEND, torch_device
from aoffpolicy.errors import NonfiniteError, ProtocolError
from aoffpolicy.trainer import batch_file, checkpoint
from aoffpolicy.trainer.backend import Backend, build
from aoffpolicy.transport.lane import Lane
from aoffpolicy.transport.manifest import specs_of
from aoffpolicy.transport.messages import (
    Abort,
    Done,
    Join,
    Message,
    Prepare,
    ReferenceScored,
    SaveCheckpoint,
    ScoreReference,
    SendWeights,
    Start,
    Started,
    Stop,
    Train,
    Trained,
)
from aoffpolicy.transport.rendezvous import connect
from aoffpolicy.transport.weights import WeightMember

T = TypeVar("T")


class TrainerWorker:
    """Answers the controller's requests to one trainer rank.

    All work on the model runs in one thread, so that the ranks' collectives are issued in one order and the event
    loop stays free.

    Args:
        bootstrap: Who this rank is; its config names the backend.
    """

    def __init__(self, bootstrap: Bootstrap) -> None:
        self._bootstrap = bootstrap
        self._lane = Lane("trainer")
        self._backend: Backend | None = None
        self._member: WeightMember | None = None
        self._last: tuple[int, Trained] | None = None
        """The last step trained and its reply: a repeated request is answered, not trained again."""

    @property
    def handlers(self) -> Handlers:
        return {
            Start: self.start,
            Train: self.train,
            ScoreReference: self.score_reference,
            SaveCheckpoint: self.save,
            Prepare: self._in_member,
            Join: self._in_member,
            Abort: self._in_member,
            SendWeights: self._in_member,
            Stop: self.stop,
        }

    async def start(self, request: Start) -> Started:
        """Meet the other ranks, build the model, and load the checkpoint if there is one."""
        scheduler_state = await self._lane.run(lambda: self._build(request.resume_from))
        backend = self._started()
        root = self._bootstrap.rank == 0
        dtype = getattr(torch, self._bootstrap.config.model.dtype)
        self._member = WeightMember(
            "send",
            backend=self._bootstrap.config.weights.backend,
            specs=specs_of(backend.named_weights(), dtype) if root else (),
            gather=backend.export_weights,
            root=root,
            device=self._device(),
        )
        return Started(shard=backend.shard, shards=backend.shards, scheduler_state=scheduler_state if root else b"")

    def _build(self, resume_from: str) -> bytes:
        torch.set_num_threads(self._bootstrap.threads)
        torch.manual_seed(self._bootstrap.config.run.seed)
        timeout_s = self._bootstrap.config.control.request_timeout_s
        store = connect(self._bootstrap.store_host, self._bootstrap.store_port, timeout_s)
        dist.init_process_group(
            COLLECTIVE_BACKEND[self._bootstrap.device_kind],
            store=dist.PrefixStore(f"trainers/{self._bootstrap.incarnation}", store),
            rank=self._bootstrap.rank,
            world_size=self._bootstrap.world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        self._backend = build(self._bootstrap.config, self._device())
        return checkpoint.load(self._backend, Path(resume_from)) if resume_from else b""

    def _device(self) -> torch.device:
        return torch_device(self._bootstrap.device_kind, self._bootstrap.device_index)

    async def train(self, request: Train) -> Trained:
        """One step on this rank's shard; idempotent by step."""
        if self._last is None or self._last[0] != request.step:
            metrics = await self._lane.run(lambda: self._train(request))
            self._last = (request.step, Trained(metrics=metrics))
        return self._last[1]

    def _train(self, request: Train) -> dict[str, float]:
        try:
            return self._started().train(request.groups, request.advantages, request.temperature, request.version)
        except NonfiniteError as error:
            path = self._bootstrap.config.run_dir / "nonfinite" / f"step-{request.step}-rank-{self._bootstrap.rank}.bin"
            batch_file.save(path, request)
            raise NonfiniteError(f"step {request.step}: {error}; this rank's batch is in {path}") from error

    async def score_reference(self, request: ScoreReference) -> ReferenceScored:
        backend = self._started()
        logprobs = await self._lane.run(lambda: backend.reference_logprobs(request.groups, request.temperature))
        return ReferenceScored(logprobs=logprobs)

    async def save(self, request: SaveCheckpoint) -> Done:
        backend = self._started()
        await self._lane.run(lambda: checkpoint.save(backend, Path(request.path), request.scheduler_state))
        return Done()

    async def stop(self, request: Stop) -> Done:
        if self._member is not None:
            self._member.close()
        self._lane.close()
        return Done()

    async def _in_member(self, request: Message) -> Message:
        if self._member is None:
            raise ProtocolError(f"{type(request).__name__} came before Start")
        return await self._member.handlers[type(request)](request)

    def _started(self) -> Backend:
        if self._backend is None:
            raise ProtocolError("the trainer has not been started")
        return self._backend


if __name__ == "__main__":
    child.run(TrainerWorker)
