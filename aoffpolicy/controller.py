"""Remote roles behind the scheduler's protocols: a pool of rollout workers, the trainer ranks, the weight plane."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import anyio
import numpy as np

from aoffpolicy.algorithms import Algorithm
from aoffpolicy.config import Config
from aoffpolicy.errors import (
    EngineDiedError,
    PeerLostError,
    RendezvousError,
    RoleError,
    WeightSyncError,
    first_cause,
)
from aoffpolicy.fleet import RolloutFleet
from aoffpolicy.pool import PoolEmptyError, WorkerPool
from aoffpolicy.protocols import GroupDropped, GroupRequest, RolloutsLost
from aoffpolicy.samples import Batch, SampleGroup
from aoffpolicy.trainer.checkpoint import prune
from aoffpolicy.transport.control import ControlServer, PeerId
from aoffpolicy.transport.coordinator import Coordinator
from aoffpolicy.transport.messages import (
    Generate,
    Generated,
    Message,
    ReferenceScored,
    Sampling,
    SaveCheckpoint,
    Score,
    Scored,
    ScoreReference,
    Started,
    Train,
    Trained,
)

logger = logging.getLogger(__name__)


async def call_all(server: ControlServer, requests: Mapping[PeerId, Message], timeout_s: float) -> dict[PeerId, Any]:
    """Ask several peers at once; the first failure cancels the other calls and is raised.

    Raises:
        RoleError: What the first peer to fail said, or that it was lost or too late.
    """
    replies: dict[PeerId, Any] = {}

    async def ask(peer: PeerId, request: Message) -> None:
        replies[peer] = await server.call(peer, request, timeout_s)

    try:
        async with anyio.create_task_group() as tasks:
            for peer, request in requests.items():
                tasks.start_soon(ask, peer, request)
    except BaseExceptionGroup as group:
        raise first_cause(group) from None
    return replies


class GroupWatcher(Protocol):
    """Is told what becomes of groups; must not block."""

    def load(self, peer: PeerId, in_flight: int) -> None:
        """A rollout or reward worker has so many requests in flight now."""
        ...

    def group(self, request: GroupRequest, group: SampleGroup) -> None:
        """A group was generated and scored."""
        ...

    def batch(self, batch: Batch, advantages: Sequence[np.ndarray]) -> None:
        """A step is about to train on this; advantages are float32 [G] for each group."""
        ...


class RemoteRollout:
    """`Rollout` over the control plane: one rollout worker samples a group, then a reward worker scores it.

    Args:
        server: The control plane.
        config: The resolved config.
        fleet: The rollout workers.
        rewards: Groups that each reward worker takes at once.
        reward_errors: Counts, by reason, the completions that could not be scored.
        watcher: Sees every group and every change of a worker's load.
    """

    def __init__(
        self,
        server: ControlServer,
        config: Config,
        fleet: RolloutFleet,
        rewards: Mapping[PeerId, int],
        reward_errors: Counter[str],
        watcher: GroupWatcher,
    ) -> None:
        self._server = server
        self._config = config
        self._fleet = fleet
        self._rewards = WorkerPool(watcher.load, rewards)
        self._reward_errors = reward_errors
        self._watcher = watcher

    async def generate(self, request: GroupRequest) -> SampleGroup:
        generated = await self._generate(request)
        since = anyio.current_time()
        scored = self._with_rewards(generated, await self._score(request, generated))
        group = replace(scored, metadata={**scored.metadata, "score_s": anyio.current_time() - since})
        self._watcher.group(request, group)
        return group

    async def _generate(self, request: GroupRequest) -> SampleGroup:
        """The group as sampled; its metadata tell by which `rollout` and in how many seconds (`generate_s`)."""
        static = request.prompt.uid % self._fleet.size if self._config.run.deterministic else None
        message = Generate(prompt=request.prompt, sampling=self._sampling(request))
        while True:
            try:
                async with self._fleet.pool.worker(static) as peer:
                    since = anyio.current_time()
                    reply = await self._server.call(peer, message, self._config.control.request_timeout_s)
                    seconds = anyio.current_time() - since
                    break
            except PoolEmptyError:
                raise RolloutsLost from None
            except RoleError as error:
                if not self._another_may_try(peer, error):
                    raise
                logger.warning("prompt %d goes to another rollout worker: %s", request.prompt.uid, error)
        assert isinstance(reply, Generated)
        return replace(reply.group, metadata={**reply.group.metadata, "rollout": peer.rank, "generate_s": seconds})

    def _another_may_try(self, peer: PeerId, error: RoleError) -> bool:
        """Whether the worker is at fault and not the request."""
        if isinstance(error, PeerLostError) or error.cause.startswith(EngineDiedError.__name__):
            return self._fleet.takes_over(error)
        return not self._fleet.pool.serves(peer)  # its weights were being replaced

    async def _score(self, request: GroupRequest, group: SampleGroup) -> Scored:
        message = Score(row=request.prompt.row, completions=tuple(sample.text for sample in group.samples))
        timeout_s = self._config.reward.timeout_s * len(group.samples) + self._config.control.request_timeout_s
        async with self._rewards.worker() as peer:
            reply = await self._server.call(peer, message, timeout_s)
        assert isinstance(reply, Scored)
        return reply

    def _sampling(self, request: GroupRequest) -> Sampling:
        evaluating = request.purpose == "eval"
        return Sampling(
            n=1 if evaluating else self._config.data.group_size,
            max_tokens=self._config.rollout.max_tokens,
            temperature=self._config.eval.temperature if evaluating else self._config.rollout.temperature,
            seed=self._config.run.seed,
        )

    def _with_rewards(self, group: SampleGroup, scored: Scored) -> SampleGroup:
        """Apply `reward.on_error` to what could not be scored; afterwards every reward is finite."""
        if scored.errors:
            self._reward_errors.update(scored.errors)
            where = f"prompt {group.prompt.uid}: {scored.errors[0]}"
            if self._config.reward.on_error == "fail":
                raise RoleError("reward", 0, where)
            if self._config.reward.on_error == "drop":
                raise GroupDropped(f"reward: {scored.errors[0]}")
            logger.warning("reward 0 for %d completions of %s", len(scored.errors), where)
        samples = tuple(
            replace(sample, reward=0.0 if reward is None else reward)
            for sample, reward in zip(group.samples, scored.rewards, strict=True)
        )
        return replace(group, samples=samples)


@dataclass(frozen=True, slots=True)
class Shards:
    """Which data shard each trainer rank takes."""

    of_rank: Mapping[PeerId, int]
    count: int

    @classmethod
    def of(cls, started: Mapping[PeerId, Started]) -> Shards:
        return cls({peer: reply.shard for peer, reply in started.items()}, next(iter(started.values())).shards)


def balance(costs: Sequence[int], shards: int) -> list[list[int]]:
    """Spread items over shards so that the largest sum is small: heaviest first, each to the lightest shard.

    Args:
        costs: Tokens of each group.
        shards: Number of shards.

    Returns:
        For each shard the indices of its groups, in ascending order; a shard may be empty.
    """
    chosen: list[list[int]] = [[] for _ in range(shards)]
    loads = [0] * shards
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        shard = loads.index(min(loads))
        chosen[shard].append(index)
        loads[shard] += costs[index]
    return [sorted(indices) for indices in chosen]


def group_tokens(group: SampleGroup) -> int:
    """Tokens of a group when its prompt is computed once."""
    prompt = len(group.prompt.token_ids_P)
    return prompt + sum(len(sample.token_ids_T) - prompt for sample in group.samples)


class RemoteTrainer:
    """`Trainer` over the control plane: every rank gets its shard of the batch at the same time."""

    def __init__(
        self,
        server: ControlServer,
        config: Config,
        algorithm: Algorithm,
        shards: Shards,
        checkpoints: Path,
        watcher: GroupWatcher,
    ) -> None:
        self._server = server
        self._config = config
        self._algorithm = algorithm
        self._shards = shards
        self._checkpoints = checkpoints
        self._watcher = watcher

    async def train(self, step: int, batch: Batch) -> Mapping[str, float]:
        parts = balance([group_tokens(group) for group in batch.groups], self._shards.count)
        reference = await self._reference(batch.groups, parts) if self._algorithm.wants_reference else None
        advantages = self._algorithm.advantages(batch.groups, reference)
        self._watcher.batch(batch, advantages)
        requests = {
            peer: self._part(step, batch, advantages, parts[shard]) for peer, shard in self._shards.of_rank.items()
        }
        replies = await call_all(self._server, requests, self._config.control.request_timeout_s)
        first = replies[min(replies)]
        assert isinstance(first, Trained)
        return first.metrics

    async def _reference(self, groups: Sequence[SampleGroup], parts: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """The reference model's log-probabilities of each group's trained tokens, from the shards that score them."""
        requests = {
            peer: ScoreReference(
                groups=tuple(groups[i] for i in parts[shard]), temperature=self._config.rollout.temperature
            )
            for peer, shard in self._shards.of_rank.items()
        }
        replies = await call_all(self._server, requests, self._config.control.request_timeout_s)
        of_group: dict[int, np.ndarray] = {}
        for peer, reply in replies.items():
            assert isinstance(reply, ReferenceScored)
            of_group |= zip(parts[self._shards.of_rank[peer]], reply.logprobs, strict=True)
        return [of_group[index] for index in range(len(groups))]

    async def save(self, step: int, state: bytes) -> None:
        path = self._checkpoints / f"step-{step}"
        request = SaveCheckpoint(path=str(path), step=step, scheduler_state=state)
        await call_all(
            self._server,
            dict.fromkeys(self._shards.of_rank, request),
            self._config.control.request_timeout_s,
        )
        await anyio.to_thread.run_sync(partial(prune, self._checkpoints, self._config.checkpoint.keep))

    def _part(
        self,
        step: int,
        batch: Batch,
        advantages: Sequence[np.ndarray],
        indices: Sequence[int],
    ) -> Train:
        return Train(
            step=step,
            groups=tuple(batch.groups[i] for i in indices),
            advantages=tuple(advantages[i] for i in indices),
            temperature=self._config.rollout.temperature,
            version=batch.version,
        )


class RemoteWeightSync:
    """`WeightSync` over the weight plane, to whichever rollout workers are there."""

    def __init__(self, coordinator: Coordinator, fleet: RolloutFleet) -> None:
        self._coordinator = coordinator
        self._fleet = fleet
        self._receivers: Mapping[PeerId, int] = {}
        """Of the formed group, with their incarnations."""

    async def send(self, version: int) -> None:
        """Send to everybody who is there; once more if somebody is lost on the way.

        Raises:
            NoRolloutError: Nobody is there, nor comes in time.
            RendezvousError, WeightSyncError: The group was not formed, or the weights not sent, and nobody was lost.
        """
        self._fleet.hold()
        while True:
            receivers = await self._fleet.receivers()
            try:
                if receivers != self._receivers or not self._coordinator.is_formed:
                    await self._coordinator.form(tuple(receivers))
                    self._receivers = receivers
                await self._coordinator.send(version)
                return
            except (RendezvousError, WeightSyncError) as error:
                if not await self._fleet.lost_one_of(receivers):
                    raise
                logger.warning("version %d is sent again, to those who are left: %s", version, error)

    async def load(self, version: int) -> None:
        """Wait until it is loaded; who did not load it because somebody was lost gets the next version.

        Raises:
            WeightSyncError: Somebody failed who was not lost.
        """
        try:
            await self._coordinator.load(version)
        except WeightSyncError as error:
            if not await self._fleet.lost_one_of(self._receivers):
                raise
            logger.warning("version %d was not loaded by everybody: %s", version, error)
        loaded = self._coordinator.loaded(version)
        self._fleet.serve({peer: number for peer, number in self._receivers.items() if peer in loaded}, version)
