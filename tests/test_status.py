from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec
import pytest
from anyio.streams.buffered import BufferedByteReceiveStream

from aoffpolicy.status.__main__ import main
from aoffpolicy.status.lines import describe
from aoffpolicy.transport.events import (
    ErrorEvent,
    PhaseEvent,
    RunEvent,
    StatusPublisher,
    StepEvent,
    WorkerEvent,
    write_status_files,
)
from aoffpolicy.transport.security import KeyPair
from tests import recorded

pytestmark = pytest.mark.anyio
RUNNING = RunEvent(name="quick", state="running", steps=8, run_dir="/runs/quick")
FINISHED = RunEvent(name="quick", state="finished", steps=8, run_dir="/runs/quick")
STEP = StepEvent(step=3, metrics={"reward_mean": 0.51234, "time_train": 11.0, "skipped": False, "loss": float("nan")})
WORKER = WorkerEvent(
    role="rollout", rank=1, host="node-2", pid=99, device="npu:3", state="ready", detail="model loaded"
)


@asynccontextmanager
async def run_folder(folder: Path) -> AsyncIterator[StatusPublisher]:
    keys, reader = KeyPair.generate(), KeyPair.generate()
    async with StatusPublisher("::1", keys=keys, reader_public=reader.public, run_id="run-1") as publisher:
        write_status_files(folder, publisher.address, server_public=keys.public, reader=reader, run_id="run-1")
        yield publisher


async def status(*argv: str | Path) -> int:
    with anyio.fail_after(20):
        return await anyio.to_thread.run_sync(main, [str(word) for word in argv])


async def test_once_shows_the_screen_as_it_is_now_and_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    async with run_folder(tmp_path) as publisher:
        for event in (RUNNING, STEP, WORKER):
            publisher.publish(event)
        assert await status(tmp_path, "--once") == 0
        shown = capsys.readouterr().out
        assert shown.startswith("quick  running  4 of 8 steps")
        assert "0.5123" in shown
        assert re.search(r"rollout 1 +ready +0 +npu:3 +model loaded", shown)
        assert max(map(len, shown.splitlines())) <= 80


async def test_without_a_terminal_events_are_lines_and_a_worker_that_says_the_same_again_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with run_folder(tmp_path) as publisher:
        for event in (RUNNING, STEP, WORKER, msgspec.structs.replace(WORKER, memory_bytes=7), FINISHED):
            publisher.publish(event)
        assert await status(tmp_path) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[1] for line in lines] == ["step", "worker", "run"]
        assert "3 reward_mean 0.5123  time_train 11  loss nan" in lines[0]
        assert lines[1].endswith("rollout 1 ready (node-2, pid 99, npu:3): model loaded")
        assert lines[2].endswith("quick finished, 8 steps, /runs/quick")


async def test_a_run_that_is_over_is_shown_from_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = recorded.run_folder(tmp_path / "run", 12)
    async with run_folder(folder):
        pass
    assert await status(folder, "--once", "--timeout", "0.3") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("run  finished  12 of 12 steps")
    assert "trainer-bound" in shown
    assert "from the run's folder" in shown


@pytest.mark.parametrize("held", [False, True])
async def test_of_a_run_that_does_not_answer_it_is_told_whether_its_launcher_lives(
    held: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = recorded.run_folder(tmp_path / "run", 3, state="")
    async with run_folder(folder):
        pass
    with (folder / "lock").open("w") as lock:
        if held:
            fcntl.flock(lock, fcntl.LOCK_EX)
        assert await status("why", folder, "--timeout", "0.3") == 0
    told = capsys.readouterr().out
    assert "The run run is not finished; 3 of 3 steps are recorded." in told
    assert ("a launcher holds it, but does not answer" if held else "its launcher is gone") in told


async def test_why_asks_the_run_itself_when_it_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with run_folder(tmp_path) as publisher:
        for event in (RUNNING, *(StepEvent(step=step, metrics=recorded.row(step)) for step in range(4))):
            publisher.publish(event)
        assert await status("why", tmp_path) == 0
        told = capsys.readouterr().out
        assert told.startswith("The run quick is running; 4 of 8 steps are recorded.\nTrainer-bound: rollouts idle")


async def test_without_a_place_the_newest_run_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert await status() == 1
    assert "no run in " in capsys.readouterr().err
    for name, seconds in (("old", 100), ("new", 200)):
        (tmp_path / "runs" / name).mkdir(parents=True)
        async with run_folder(tmp_path / "runs" / name) as publisher:
            publisher.publish(msgspec.structs.replace(RUNNING, name=name))
            os.utime(tmp_path / "runs" / name / "status.json", (seconds, seconds))
            if name == "new":
                assert await status("--once") == 0
                assert capsys.readouterr().out.startswith("new  running")


async def test_json_prints_one_object_a_line_with_every_metric(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with run_folder(tmp_path) as publisher:
        for event in (RUNNING, STEP):
            publisher.publish(event)
        assert await status(tmp_path, "--once", "--json") == 0
        run, step = map(json.loads, capsys.readouterr().out.splitlines())
        assert (run["kind"], run["seq"], run["replay"], run["run_id"]) == ("run", 1, True, "run-1")
        assert step["metrics"] == {"reward_mean": 0.51234, "time_train": 11.0, "skipped": False, "loss": None}


async def test_following_ends_with_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with run_folder(tmp_path) as publisher, anyio.create_task_group() as tasks:
        publisher.publish(RUNNING)
        codes: list[int] = []

        async def follow() -> None:
            codes.append(await status(tmp_path, "--json"))

        tasks.start_soon(follow)
        printed = ""
        with anyio.fail_after(10):
            while "running" not in printed:
                await anyio.sleep(0.02)
                printed += capsys.readouterr().out
        publisher.publish(STEP)
        publisher.publish(FINISHED)
        with anyio.fail_after(10):
            while not codes:
                await anyio.sleep(0.02)
        kinds = [json.loads(line)["kind"] for line in (printed + capsys.readouterr().out).splitlines()]
        assert (codes, kinds) == ([0], ["run", "step", "run"])


async def test_following_a_run_that_is_over_prints_its_end_and_leaves(tmp_path: Path) -> None:
    async with run_folder(tmp_path) as publisher:
        publisher.publish(FINISHED)
        assert await status(tmp_path) == 0


async def test_a_key_file_elsewhere_opens_the_address(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with run_folder(tmp_path) as publisher:
        publisher.publish(RUNNING)
        key = tmp_path / "status.key"
        assert await status(publisher.address.url, "--key", key, "--once", "--json") == 0
        assert json.loads(capsys.readouterr().out)["name"] == "quick"


async def test_when_nothing_answers_it_says_so_and_exits_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with run_folder(tmp_path):
        pass
    began = time.monotonic()
    assert await status(tmp_path, "--timeout", "0.3") == 1
    assert time.monotonic() - began < 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "nothing answered at [::1]:" in captured.err
    assert "within 0.3 s" in captured.err


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("nowhere", "neither a run folder nor an address"),
        ("::1:99x", "is not an address"),
        (".", "has a run started in this folder?"),
    ],
)
async def test_a_place_that_is_none_is_one_line_and_exit_1(
    place: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert await status(place) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_events_are_told_in_one_line() -> None:
    assert describe(ErrorEvent(role="trainer", rank=0, cause="killed by SIGKILL")) == "trainer 0: killed by SIGKILL"
    assert describe(StepEvent(step=4, metrics={"skipped": True})) == "4 skipped"
    begin = PhaseEvent(name="generate", step=4, version=3, state="begin")
    end = PhaseEvent(name="generate", step=4, version=3, state="end", seconds=1.5)
    assert describe(begin) == "step 4, version 3: generate begin"
    assert describe(end) == "step 4, version 3: generate end after 1.50 s"


@pytest.mark.multiprocess
async def test_the_command_runs_without_torch_and_survives_a_closed_pipe(tmp_path: Path) -> None:
    async with run_folder(tmp_path) as publisher:
        for event in (RUNNING, STEP, WORKER):
            publisher.publish(event)
        command = f'"{sys.executable}" -X importtime -m aoffpolicy.status "{tmp_path}" --once --json | head -n 1'
        result = await anyio.to_thread.run_sync(
            lambda: subprocess.run(
                ["bash", "-o", "pipefail", "-c", command],
                capture_output=True,
                text=True,
                timeout=30,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
            )
        )
        assert result.returncode == 0
        assert json.loads(result.stdout)["kind"] == "run"
        imported = [line.rsplit("|", 1)[-1].strip() for line in result.stderr.splitlines()]
        assert "zmq" in imported
        assert not {"torch", "pydantic"} & set(imported)
        assert "Traceback" not in result.stderr


@pytest.mark.multiprocess
async def test_the_example_prints_the_reward_of_every_step_in_ten_lines(tmp_path: Path) -> None:
    example = Path(__file__).parent.parent / "examples" / "watch_reward.py"
    code = [line for line in example.read_text().split('"""')[2].splitlines() if line.strip()]
    assert len(code) <= 10
    async with run_folder(tmp_path) as publisher:
        publisher.publish(RUNNING)
        publisher.publish(msgspec.structs.replace(STEP, step=0))
        async with await anyio.open_process([sys.executable, str(example), str(tmp_path)]) as process:
            assert process.stdout is not None
            lines = BufferedByteReceiveStream(process.stdout)
            with anyio.fail_after(60):
                assert await lines.receive_until(b"\n", 100) == b"0 0.51234"  # a step from before it came
                publisher.publish(msgspec.structs.replace(STEP, step=1))
                assert await lines.receive_until(b"\n", 100) == b"1 0.51234"
                publisher.publish(FINISHED)
                assert await process.wait() == 0
