from __future__ import annotations

import os
from pathlib import Path

import anyio
import pytest

from aoffpolicy import supervisor as module
from aoffpolicy.child import Bootstrap
from aoffpolicy.config import Config
from aoffpolicy.errors import ProcessDiedError
from aoffpolicy.supervisor import Supervisor
from tests.launching import ROOT, assert_gone, descendants

pytestmark = [pytest.mark.anyio, pytest.mark.multiprocess]


@pytest.fixture(autouse=True)
def fake_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MODULES", {"rollout": "tests.fake_worker"})
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def bootstrap(rank: int = 0) -> Bootstrap:
    config = Config.model_validate({"model": {"path": "m"}, "data": {"source": "reasoning_gym:x"}})
    return Bootstrap(role="rollout", rank=rank, world_size=2, config=config, parent_pid=os.getpid())


@pytest.mark.parametrize(("behaviour", "words"), [("exit", "exited with code 7"), ("killed", "killed by SIGKILL")])
async def test_a_childs_death_is_raised_with_role_rank_and_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behaviour: str, words: str
) -> None:
    monkeypatch.setenv("FAKE_WORKER", behaviour)
    async with Supervisor(tmp_path, stop_timeout_s=5) as supervisor:
        await supervisor.spawn(bootstrap(rank=1))
        with pytest.raises(ProcessDiedError, match=words) as caught, anyio.fail_after(20):
            await supervisor.watch()
    assert (caught.value.role, caught.value.rank) == ("rollout", 1)
    assert caught.value.by_signal == (behaviour == "killed")
    assert "rollout 1 here" in caught.value.remote_traceback


async def test_leaving_the_supervisor_kills_children_that_ignore_sigterm_and_what_they_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_WORKER", "stubborn")
    async with Supervisor(tmp_path, stop_timeout_s=0.5) as supervisor:
        child = await supervisor.spawn(bootstrap())
        with anyio.fail_after(20):
            while "ready" not in child.log.read_text():
                await anyio.sleep(0.05)
        family = [child.pid, *descendants(child.pid)]
        assert len(family) == 2
    assert_gone(family, within_s=1)


async def test_a_secret_is_neither_on_the_command_line_nor_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_WORKER", "sleep")
    secret = b"very-secret-key"
    async with Supervisor(tmp_path, stop_timeout_s=5) as supervisor:
        config = bootstrap().config
        child = await supervisor.spawn(
            Bootstrap(role="rollout", rank=0, world_size=1, config=config, parent_pid=os.getpid(), secret_key=secret)
        )
        with anyio.fail_after(20):
            while "here" not in child.log.read_text():
                await anyio.sleep(0.05)
        for name in ("cmdline", "environ"):
            assert secret not in Path(f"/proc/{child.pid}/{name}").read_bytes()
        assert secret.decode() not in child.log.read_text()
