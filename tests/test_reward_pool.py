"""Rewards that hang, die, lie or shout, in real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import anyio
import pytest

from aoffpolicy.data.generated import generate
from aoffpolicy.data.rows import Row
from aoffpolicy.errors import DataError
from aoffpolicy.reward.pool import RewardPool

pytestmark = [pytest.mark.multiprocess, pytest.mark.anyio]

TIMEOUT_S = 1.0
ROW: Row = {"prompt": "?", "answer": "42"}


@asynccontextmanager
async def pool_of(name: str, processes: int = 1, timeout_s: float = TIMEOUT_S) -> AsyncIterator[RewardPool]:
    with anyio.fail_after(60):
        async with RewardPool(f"tests.odd_rewards:{name}", timeout_s=timeout_s, processes=processes) as pool:
            yield pool


Pool = Callable[..., AbstractAsyncContextManager[RewardPool]]
both = pytest.mark.parametrize("name", ["obey", "obey_async"])


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def gone(pid: int, within_s: float = 5.0) -> bool:
    with anyio.move_on_after(within_s):
        while alive(pid):
            await anyio.sleep(0.02)
    return not alive(pid)


@both
async def test_good_completions_get_their_rewards_in_order(name: str) -> None:
    async with pool_of(name) as pool:
        scored = await pool.score(ROW, ("row", "fine", "return numpy"))
        assert scored.rewards == (42.0, 1.0, 0.5)
        assert scored.errors == ()
        assert (await pool.score(ROW, ())).rewards == ()


@both
async def test_what_is_no_finite_number_is_none_with_a_reason(name: str) -> None:
    async with pool_of(name) as pool:
        orders = ("return none", "return nan", "return inf", "return text", "raise oh no", "exit", "fine")
        scored = await pool.score(ROW, orders)
    assert scored.rewards == (None,) * 6 + (1.0,)
    assert scored.errors[:4] == (
        "returned NoneType, not a number",
        "returned nan",
        "returned inf",
        "returned str, not a number",
    )
    assert scored.errors[4].startswith("exception LookupError: oh no (odd_rewards.py:")
    assert scored.errors[5].startswith("exception SystemExit: 3")


@both
async def test_a_hang_fails_only_its_own_completion_and_the_process_is_replaced(name: str) -> None:
    async with pool_of(name) as pool:
        first = await pool.score(ROW, ("pid",))
        scored = await pool.score(ROW, ("fine", "hang", "pid"))
        assert scored.rewards[:2] == (1.0, None)
        assert scored.errors == ("hang: no reward within 1 s",)
        assert scored.rewards[2] not in (None, first.rewards[0])
        assert await gone(int(first.rewards[0] or 0))


@both
@pytest.mark.parametrize(("order", "ending"), [("_exit", "exit code 7"), ("segfault", "signal SIGSEGV")])
async def test_a_crash_fails_only_its_own_completion(name: str, order: str, ending: str) -> None:
    async with pool_of(name) as pool:
        scored = await pool.score(ROW, ("fine", order, "fine", order, "row"))
    assert scored.rewards == (1.0, None, 1.0, None, 42.0)
    assert scored.errors == (f"crash: the scoring process ended with {ending}",) * 2


async def test_slow_completions_have_a_time_out_each_not_together() -> None:
    async with pool_of("obey") as pool:
        scored = await pool.score(ROW, ("sleep 0.6", "sleep 0.6", "sleep 0.6"))
    assert scored.rewards == (1.0, 1.0, 1.0)


async def test_async_completions_of_a_group_are_scored_at_the_same_time() -> None:
    async with pool_of("obey_async") as pool:
        started = time.monotonic()
        scored = await pool.score(ROW, ("await 0.8",) * 20 + ("await 50",))
        took_s = time.monotonic() - started
    assert scored.rewards == (1.0,) * 20 + (None,)
    assert scored.errors == ("hang: no reward within 1 s",)
    assert took_s < 5


async def test_printing_and_reading_do_not_disturb_the_protocol() -> None:
    async with pool_of("obey") as pool:
        scored = await pool.score(ROW, ("print", "read", "print", "row"))
    assert scored.rewards == (1.0, 0.0, 1.0, 42.0)


async def test_a_killed_function_leaves_no_process_that_it_started(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    async with pool_of("obey") as pool:
        scored = await pool.score(ROW, (f"orphan {note}",))
        assert scored.rewards == (None,)
        assert await gone(int(note.read_text()))


async def test_a_hang_in_one_process_does_not_hold_up_the_others() -> None:
    finished: list[str] = []
    async with pool_of("obey", processes=2, timeout_s=4.0) as pool:
        assert pool.capacity == 4

        async def score(order: str) -> None:
            await pool.score(ROW, (order,))
            finished.append(order)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(score, "hang")
            await anyio.sleep(0.1)
            for _ in range(5):
                tasks.start_soon(score, "fine")
    assert finished == ["fine"] * 5 + ["hang"]


async def test_cancelling_kills_the_process_and_the_pool_goes_on() -> None:
    async with pool_of("obey", timeout_s=30) as pool:
        pid = int((await pool.score(ROW, ("pid",))).rewards[0] or 0)
        with anyio.move_on_after(0.3) as scope:
            await pool.score(ROW, ("hang",))
        assert scope.cancelled_caught
        assert await gone(pid)
        assert (await pool.score(ROW, ("row",))).rewards == (42.0,)


async def test_closing_ends_every_process() -> None:
    async with pool_of("obey", processes=2) as pool:
        pids: set[int] = set()

        async def note() -> None:
            scored = await pool.score(ROW, ("sleep 0.3", "pid"))
            pids.add(int(scored.rewards[1] or 0))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(note)
            tasks.start_soon(note)
    assert len(pids) == 2
    assert not any(map(alive, pids))


async def test_scoring_processes_import_no_torch_for_a_function_that_does_not() -> None:
    async with pool_of("obey") as pool:
        assert (await pool.score(ROW, ("torch",))).rewards == (0.0,)


async def test_large_rows_and_completions_pass_through_the_pipes() -> None:
    async with pool_of("obey", timeout_s=30) as pool:
        scored = await pool.score({**ROW, "text": "x" * 2_000_000}, ("row " + "y" * 2_000_000, "row"))
    assert scored.rewards == (42.0, 42.0)


@pytest.mark.parametrize(
    ("function", "fault"),
    [
        ("no_such_module:f", "cannot be imported: ModuleNotFoundError"),
        ("tests.odd_rewards:takes_one", "does not take"),
        ("exact", "no reward 'exact'"),
    ],
)
async def test_a_function_that_cannot_be_used_fails_at_start(function: str, fault: str) -> None:
    with anyio.fail_after(60), pytest.raises(DataError, match=fault):
        await RewardPool(function, timeout_s=1, processes=2).start()


async def test_an_import_that_ends_or_holds_up_the_process_fails_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dies.py").write_text("import os; os._exit(9)")
    (tmp_path / "sleeps.py").write_text("import time; time.sleep(60)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with anyio.fail_after(60):
        with pytest.raises(DataError, match="importing dies:f ended its process: exit code 9"):
            await RewardPool("dies:f", timeout_s=1, processes=1).start()
        with pytest.raises(DataError, match="sleeps:f was not imported within 3 s"):
            await RewardPool("sleeps:f", timeout_s=1, processes=1, start_timeout_s=3).start()


async def test_a_module_in_the_working_directory_can_be_a_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("def length(completion, row):\n    return len(completion)\n")
    monkeypatch.chdir(tmp_path)
    with anyio.fail_after(60):
        async with RewardPool("mine:length", timeout_s=TIMEOUT_S, processes=1) as pool:
            assert (await pool.score(ROW, ("abc", ""))).rewards == (3.0, 0.0)


async def test_the_reasoning_gym_reward_works_in_a_scoring_process() -> None:
    row = next(generate("chain_sum", {"min_terms": 2, "max_terms": 2}, seed=0))
    with anyio.fail_after(60):
        async with RewardPool("reasoning_gym", timeout_s=30, processes=1) as pool:
            scored = await pool.score(row, (row["answer"], "nothing"))
    assert scored.rewards == (1.0, 0.0)


async def test_importing_reasoning_gym_is_not_charged_to_the_first_completion() -> None:
    row = next(generate("chain_sum", {"min_terms": 2, "max_terms": 2}, seed=0))
    with anyio.fail_after(60):
        async with RewardPool("reasoning_gym", timeout_s=0.3, processes=1) as pool:  # the import takes longer
            assert (await pool.score(row, (row["answer"],))).errors == ()


def test_scoring_processes_die_with_a_killed_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import anyio\n"
        "from aoffpolicy.reward.pool import RewardPool\n"
        "async def main():\n"
        "    async with RewardPool('tests.odd_rewards:obey', timeout_s=60, processes=1) as pool:\n"
        "        print(int((await pool.score({}, ('pid',))).rewards[0]), flush=True)\n"
        "        await pool.score({}, ('hang',))\n"
        "anyio.run(main)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.send_signal(signal.SIGKILL)
        assert anyio.run(gone, pid)


def test_a_pool_works_the_same_on_uvloop() -> None:
    async def score() -> None:
        async with pool_of("obey") as pool:
            scored = await pool.score(ROW, ("fine", "hang", "_exit", "row"))
            pid = int((await pool.score(ROW, ("pid",))).rewards[0] or 0)
        assert scored.rewards == (1.0, None, None, 42.0)
        assert scored.errors == (
            "hang: no reward within 1 s",
            "crash: the scoring process ended with exit code 7",
        )
        assert not alive(pid)

    anyio.run(score, backend_options={"use_uvloop": True})
