"""The control plane with workers in processes of their own: dead, stopped and blocked ones."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec
import pytest

from aoffpolicy.errors import PeerLostError
from aoffpolicy.transport.control import ControlServer, PeerId
from aoffpolicy.transport.messages import Done, Prepare, SaveCheckpoint, Stop
from aoffpolicy.transport.security import KeyPair
from tests.control_worker import Orders

pytestmark = [pytest.mark.anyio, pytest.mark.multiprocess]
PEER = PeerId("trainer", 0)
SERVER_KEYS, WORKER_KEYS = KeyPair.generate(), KeyPair.generate()


def server(heartbeat_timeout_s: float) -> ControlServer:
    return ControlServer(
        "::1",
        run_id="run",
        keys=SERVER_KEYS,
        allowed={PEER: WORKER_KEYS.public},
        heartbeat_timeout_s=heartbeat_timeout_s,
    )


@contextlib.contextmanager
def worker(url: str, heartbeat_timeout_s: float) -> Iterator[subprocess.Popen[bytes]]:
    orders = Orders(url, "run", heartbeat_timeout_s, WORKER_KEYS.public, WORKER_KEYS.secret, SERVER_KEYS.public)
    command = [sys.executable, "-m", "tests.control_worker"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, cwd=Path(__file__).parents[1]) as process:
        assert process.stdin is not None
        process.stdin.write(msgspec.msgpack.encode(orders))
        process.stdin.close()
        try:
            yield process
        finally:
            process.kill()


async def exit_code(process: subprocess.Popen[bytes], timeout_s: float) -> int:
    return await anyio.to_thread.run_sync(process.wait, timeout_s)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_killed_or_stopped_process_is_noticed_and_fails_its_calls(how: signal.Signals) -> None:
    async with server(0.5) as control:
        with worker(control.address.url, 0.5) as process:
            assert (await control.wait_for(PEER, 30)).pid == process.pid
            reply = await control.call(PEER, Prepare(term=3), 5)
            assert reply.backend == f"pid {process.pid}"

            failed = anyio.Event()

            async def call() -> None:
                with pytest.raises(PeerLostError, match="trainer 0: no heartbeat"):
                    await control.call(PEER, SaveCheckpoint(path="", step=30, scheduler_state=b""), 60)
                failed.set()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(call)
                await anyio.sleep(0.1)
                os.kill(process.pid, how)
                began = time.monotonic()
                with anyio.fail_after(10), pytest.raises(PeerLostError) as caught:
                    await control.watch()
                assert 0.3 < time.monotonic() - began < 3
                assert f"pid {process.pid} on {os.uname().nodename}" in str(caught.value)
                await failed.wait()


async def test_a_call_to_a_killed_process_fails_at_once_when_its_connection_is_closed() -> None:
    async with server(30.0) as control:
        with worker(control.address.url, 30.0) as process:
            await control.wait_for(PEER, 30)
            process.kill()
            await exit_code(process, 5)
            await anyio.sleep(0.2)
            with anyio.fail_after(5), pytest.raises(PeerLostError, match="its connection is closed"):
                await control.call(PEER, Prepare(term=1), 60)
            with anyio.fail_after(5), pytest.raises(PeerLostError, match="its connection is closed"):
                await control.watch()


async def test_a_worker_whose_event_loop_is_blocked_is_not_taken_for_dead() -> None:
    async with server(0.5) as control:
        with worker(control.address.url, 0.5) as process:
            await control.wait_for(PEER, 30)
            blocked_s = 2
            request = SaveCheckpoint(path="", step=blocked_s, scheduler_state=b"")
            assert await control.call(PEER, request, 10) == Done()
            assert await control.call(PEER, Stop(), 5) == Done()
            assert await exit_code(process, 10) == 0


async def test_a_worker_ends_when_its_controller_is_gone() -> None:
    control = server(0.5)
    with contextlib.ExitStack() as workers:
        async with control:
            process = workers.enter_context(worker(control.address.url, 0.5))
            await control.wait_for(PEER, 30)
        assert await exit_code(process, 10) == 1


async def test_a_worker_that_was_suspended_does_not_take_its_controller_for_dead() -> None:
    """As when a cluster suspends a whole job: the controller waits long here, the worker would give up after 0.6 s."""
    async with server(30.0) as control:
        with worker(control.address.url, 0.2) as process:
            await control.wait_for(PEER, 30)
            await control.call(PEER, Prepare(term=0), 5)
            process.send_signal(signal.SIGSTOP)
            await anyio.sleep(1.5)
            process.send_signal(signal.SIGCONT)
            await anyio.sleep(0.3)
            assert (await control.call(PEER, Prepare(term=1), 5)).term == 1
