"""The weight plane as it runs: a process for every member, the real control plane, faults by signal."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import anyio
import msgspec
import pytest
from anyio.abc import Process

from aoffpolicy.errors import WeightSyncError
from aoffpolicy.transport.control import ControlServer, PeerId
from aoffpolicy.transport.coordinator import Coordinator, GroupSettings
from aoffpolicy.transport.rendezvous import RendezvousStore
from tests.weights_worker import Orders

pytestmark = [pytest.mark.anyio, pytest.mark.multiprocess]

TRAINER = PeerId("trainer", 0)
ROLLOUTS = (PeerId("rollout", 0), PeerId("rollout", 1))


class Plane:
    """Every member's process, and the coordinator."""

    def __init__(self, server: ControlServer, coordinator: Coordinator, heartbeat_timeout_s: float) -> None:
        self.coordinator = coordinator
        self._server = server
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._processes: list[Process] = []
        self._current: dict[PeerId, Process] = {}

    async def start(self, peer: PeerId, incarnation: int = 0, pause_s: float = 0.0) -> None:
        orders = Orders(
            url=self._server.address.url,
            run_id="run",
            heartbeat_timeout_s=self._heartbeat_timeout_s,
            role=peer.role,
            rank=peer.rank,
            incarnation=incarnation,
            pause_s=pause_s,
        )
        self._server.allow(peer, b"", incarnation)
        command = [sys.executable, "-m", "tests.weights_worker"]
        process = await anyio.open_process(command, stdin=subprocess.PIPE, stdout=None, stderr=None)
        self._processes.append(process)
        self._current[peer] = process
        assert process.stdin is not None
        async with process.stdin as stdin:
            await stdin.send(msgspec.json.encode(orders))

    async def start_all(self, pause_s: float = 0.0) -> None:
        for peer in (TRAINER, *ROLLOUTS):
            await self.start(peer, pause_s=pause_s)
        for peer in (TRAINER, *ROLLOUTS):
            await self._server.wait_for(peer, 60.0)

    async def replace(self, peer: PeerId) -> None:
        await self.start(peer, incarnation=1)
        await self._server.wait_for(peer, 60.0)

    def signal(self, peer: PeerId, number: signal.Signals) -> None:
        self._current[peer].send_signal(number)

    async def kill_after(self, delay_s: float, peer: PeerId) -> None:
        await anyio.sleep(delay_s)
        self.signal(peer, signal.SIGKILL)

    async def update(self, version: int) -> None:
        await self.coordinator.send(version)
        await self.coordinator.load(version)

    async def end(self) -> None:
        for process in self._processes:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


@asynccontextmanager
async def processes(
    host: str, *, sync_timeout_s: float = 20.0, heartbeat_timeout_s: float = 2.0
) -> AsyncIterator[Plane]:
    settings = GroupSettings(
        backend="gloo", interface=host, bucket_bytes=4096, join_timeout_s=20.0, sync_timeout_s=sync_timeout_s
    )
    store = RendezvousStore(host)
    async with (
        ControlServer(host, run_id="run", keys=None, heartbeat_timeout_s=heartbeat_timeout_s) as server,
        Coordinator(server.call, store, (TRAINER,), settings) as coordinator,
    ):
        plane = Plane(server, coordinator, heartbeat_timeout_s)
        try:
            yield plane
        finally:
            with anyio.CancelScope(shield=True):
                await plane.end()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_weights_reach_rollouts_in_other_processes_bit_for_bit(host: str) -> None:
    async with processes(host) as plane:
        await plane.start_all()
        await plane.coordinator.form(ROLLOUTS)
        for version in range(3):
            await plane.update(version)


async def test_a_killed_rollout_ends_the_update_by_name_and_its_replacement_joins_the_others() -> None:
    async with processes("127.0.0.1") as plane:
        await plane.start_all(pause_s=0.05)
        await plane.coordinator.form(ROLLOUTS)
        began = time.monotonic()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(plane.kill_after, 0.5, ROLLOUTS[1])
            with pytest.raises(WeightSyncError, match=r"version 1 was not delivered \(term 1\): rollout 1: "):
                await plane.update(1)
        assert time.monotonic() - began < 10.0
        await plane.replace(ROLLOUTS[1])
        await plane.coordinator.form(ROLLOUTS)
        assert plane.coordinator.term == 2
        await plane.update(2)


async def test_a_frozen_rollout_ends_the_update_by_name_within_the_deadline_and_may_join_again() -> None:
    async with processes("::1", sync_timeout_s=5.0, heartbeat_timeout_s=60.0) as plane:
        await plane.start_all()
        await plane.coordinator.form(ROLLOUTS)
        plane.signal(ROLLOUTS[1], signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(WeightSyncError, match=r"version 1 was not delivered \(term 1\): rollout 1: "):
            await plane.update(1)
        assert time.monotonic() - began < 9.0
        plane.signal(ROLLOUTS[1], signal.SIGCONT)
        await plane.coordinator.form(ROLLOUTS)
        await plane.update(2)
