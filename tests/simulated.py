"""Simulated roles and a virtual clock: whole runs in microseconds of real time, on asyncio and on trio.

The roles check what a real system would suffer from: generation while weights are swapped, a step trained twice or out
of order, two versions on their way at once, tokens older than allowed.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import anyio
import anyio.lowlevel
import numpy as np
import trio.testing

from aoffpolicy import (
    Batch,
    GroupDropped,
    GroupRequest,
    PhaseEvent,
    Prompt,
    RolloutsLost,
    Sample,
    SampleGroup,
    Scheduler,
    SchedulerSettings,
    SchedulerState,
    StepRecord,
)

T = TypeVar("T")


# --- Virtual time --------------------------------------------------------------------------------------------------


class _VirtualSelector(selectors.SelectSelector):
    """Jumps to the next timer instead of sleeping; waits for real only while worker threads run."""

    now = 0.0
    limiter: anyio.CapacityLimiter | None = None
    at_every_turn: Callable[[], bool] | None = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self.at_every_turn is not None and self.at_every_turn():
            return super().select(0)
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if self.limiter is not None and self.limiter.borrowed_tokens:
            return super().select(10)
        if timeout is None:
            raise RuntimeError("deadlock: every task waits, and no timer is set")
        self.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An asyncio event loop whose time passes only in timers."""

    def __init__(self) -> None:
        self._virtual = _VirtualSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now

    def at_every_turn(self, call: Callable[[], bool] | None) -> None:
        """Have something called between the turns of the loop, when every task waits somewhere.

        It says whether it did anything: then no time passes in this turn.
        """
        self._virtual.at_every_turn = call

    def wait_for_threads_of(self, limiter: anyio.CapacityLimiter) -> None:
        self._virtual.limiter = limiter


def run_virtually(main: Callable[[], Awaitable[T]], backend: str = "asyncio") -> T:
    """Run `main` in virtual time."""

    async def prepared() -> T:
        if backend == "asyncio":
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualLoop)
            loop.wait_for_threads_of(anyio.to_thread.current_default_thread_limiter())
        return await main()

    options: dict[str, Any] = (
        {"loop_factory": VirtualLoop}
        if backend == "asyncio"
        else {"clock": trio.testing.MockClock(autojump_threshold=0)}
    )
    return anyio.run(prepared, backend=backend, backend_options=options)


# --- Data ----------------------------------------------------------------------------------------------------------


def prompts(count: int) -> list[Prompt]:
    return [Prompt(uid, np.arange(3, dtype=np.int32)) for uid in range(count)]


def group(
    prompt: Prompt,
    version: int,
    *,
    rewards: Sequence[float] = (0.0, 1.0),
    tokens: int = 2,
    last_version: int | None = None,
) -> SampleGroup:
    """A group of tiny samples, all tokens of one version, or the last one of a later version."""
    length = len(prompt.token_ids_P) + tokens
    mask = np.arange(length) >= len(prompt.token_ids_P)
    versions = np.where(mask, version, -1).astype(np.int32)
    versions[-1] = version if last_version is None else last_version
    samples = tuple(
        Sample(
            token_ids_T=np.zeros(length, np.int32),
            loss_mask_T=mask,
            behaviour_logprobs_T=np.zeros(length, np.float32),
            versions_T=versions,
            text="",
            finish_reason="stop",
            reward=reward,
        )
        for reward in rewards
    )
    return SampleGroup(prompt, samples)


# --- Roles ---------------------------------------------------------------------------------------------------------


@dataclass
class World:
    """What is true in the simulation, whoever is watching; survives a scheduler, like real processes may."""

    trained: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """uids of every step trained."""
    saved: list[tuple[int, bytes]] = field(default_factory=list)
    loaded: int = 0
    fresh_from: float = -math.inf
    """When the sending of the loaded weights began: rollouts that were lost later do not hold them."""
    generating: Counter[str] = field(default_factory=Counter)
    dispatched: list[GroupRequest] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    swapping: bool = False
    training: bool = False
    staleness: list[int] = field(default_factory=list)
    """Of every trained group."""
    busy_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds of each role, measured by itself."""


Duration = Callable[[str, int], float]
"""Seconds that a call (generate, train, send, load, save) takes, from its name and the prompt, step or version."""


def always(**seconds: float) -> Duration:
    """The same for all calls of a name; 0 for the names left out."""
    return lambda call, _: seconds.get(call, 0.0)


AT_ONCE = always()


class SimulatedRoles:
    """Rollout, trainer and weight sync in one object, over one `World`.

    Args:
        world: What they act on.
        duration: How long calls take.
        drop: Whether the rollout gives up on a prompt.
        rewards: Rewards of a prompt's group.
        in_flight: Weights may be swapped while groups are generated, which then have tokens of two versions.
        losses: Moments at which all rollouts are lost, for new ones to come at once.
        hook: Awaited at the beginning and at the end of every call with "call:begin" or "call:end"; may raise or hang.
    """

    def __init__(
        self,
        world: World,
        duration: Duration = AT_ONCE,
        *,
        drop: Callable[[int], bool] = lambda uid: False,
        rewards: Callable[[int], Sequence[float]] = lambda uid: (0.0, 1.0),
        in_flight: bool = False,
        losses: Sequence[float] = (),
        hook: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        self.world = world
        self._duration = duration
        self._drop = drop
        self._rewards = rewards
        self._in_flight = in_flight
        self._losses = sorted(losses)
        self._hook = hook

    async def generate(self, request: GroupRequest) -> SampleGroup:
        world = self.world
        assert self._in_flight or not world.swapping, "generation runs while weights are swapped"
        assert world.loaded == request.version, "a group was started under other weights than it was told"
        world.dispatched.append(request)
        world.generating[request.purpose] += 1
        first_version = world.loaded
        try:
            with anyio.CancelScope(deadline=self._next_loss()):
                await self._work("generate", request.prompt.uid)
                await anyio.lowlevel.checkpoint()  # so that a loss in the past is noticed without time passing
        finally:
            world.generating[request.purpose] -= 1
        if anyio.current_time() >= self._next_loss():
            raise RolloutsLost
        assert self._in_flight or not world.swapping, "weights were swapped under a running generation"
        if self._drop(request.prompt.uid):
            raise GroupDropped("simulated")
        rewards = self._rewards(request.prompt.uid)
        return group(request.prompt, first_version, rewards=rewards, last_version=world.loaded)

    def _next_loss(self) -> float:
        """The first moment since the weights were sent at which all rollouts are lost."""
        return next((moment for moment in self._losses if moment > self.world.fresh_from), math.inf)

    async def train(self, step: int, batch: Batch) -> Mapping[str, float]:
        world = self.world
        uids = tuple(group.prompt.uid for group in batch.groups)
        assert batch.step == step and uids == tuple(sorted(uids))
        assert not world.training, "two steps train at once"
        world.training = True
        try:
            if step not in world.trained:
                await self._work("train", step, then=lambda: world.trained.setdefault(step, uids))
            assert world.trained[step] == uids, "a step was repeated with another batch"
        finally:
            world.training = False
        world.staleness += [batch.version - group.oldest_version for group in batch.groups]
        return {"loss": float(step)}

    async def save(self, step: int, state: bytes) -> None:
        assert not self.world.training, "a checkpoint is saved while a step trains"
        await self._work("save", step, then=lambda: self.world.saved.append((step, state)))

    async def send(self, version: int) -> None:
        world = self.world
        assert not world.swapping and not world.training
        assert not world.generating["eval"] and (self._in_flight or not world.generating["train"])
        world.swapping = True
        world.sent.append(version)
        world.fresh_from = anyio.current_time()
        await self._work("send", version)

    async def load(self, version: int) -> None:
        world = self.world
        assert world.swapping and world.sent[-1] == version
        assert not world.generating["eval"] and (self._in_flight or not world.generating["train"])

        def loaded() -> None:
            world.loaded = version
            world.swapping = False

        await self._work("load", version, then=loaded)

    async def _work(self, call: str, number: int, then: Callable[[], Any] = lambda: None) -> None:
        """The effect happens between the two hooks, so that faults are met before and after it."""
        if self._hook:
            await self._hook(f"{call}:begin")
        began = anyio.current_time()
        await anyio.sleep(self._duration(call, number))
        self.world.busy_s[call] += anyio.current_time() - began
        then()
        if self._hook:
            await self._hook(f"{call}:end")


# --- Runs ----------------------------------------------------------------------------------------------------------


@dataclass
class Result:
    """How a run ended."""

    records: list[StepRecord]
    state: SchedulerState
    events: list[PhaseEvent]
    seconds: float
    scheduler: Scheduler


async def drive(
    roles: SimulatedRoles,
    settings: SchedulerSettings,
    data: Sequence[Prompt],
    *,
    state: SchedulerState | bytes | None = None,
    eval_prompts: Sequence[Prompt] | None = None,
) -> Result:
    """Run a scheduler to its end."""
    events: list[PhaseEvent] = []
    scheduler = Scheduler(
        roles, roles, roles, data, settings, state=state, eval_prompts=eval_prompts, observer=events.append
    )
    roles.world.loaded = scheduler.version  # the caller pushes the first weights
    began = anyio.current_time()
    async with scheduler:
        records = [record async for record in scheduler.run()]
    return Result(records, scheduler.state(), events, anyio.current_time() - began, scheduler)
