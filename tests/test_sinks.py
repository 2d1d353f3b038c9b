from __future__ import annotations

import importlib.util
import json
import os
import struct
import subprocess
import sys
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from aoffpolicy import config as configuration
from aoffpolicy.config import Config
from aoffpolicy.errors import ConfigError
from aoffpolicy.sinks import Row, open_sinks
from tests.recorded import row

ROWS = [row(0), row(1, skipped=True, loss=None, note="text"), row(2, eval_reward_mean=0.75)]


def config_of(tmp_path: Path, *sinks: str, host: str = "127.0.0.1", **metrics: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "sums", "dir": tmp_path},
            "model": {"path": "m"},
            "data": {"source": "d.jsonl"},
            "control": {"host": host},
            "metrics": {"sinks": sinks, **metrics},
        }
    )


def write(config: Config, folder: Path, rows: list[Mapping[str, Any]] = ROWS) -> str:
    """Everything through the one sink of the config; returns what went wrong."""
    (sink,) = open_sinks(config, folder)
    for each in rows:
        sink.outlet.put((each["step"], each))
    assert sink.outlet.close(60)
    return sink.outlet.take_news()


# --- Choosing ------------------------------------------------------------------------------------------------------


def faults(tmp_path: Path, *sinks: str) -> tuple[str, ...]:
    (tmp_path / "m").mkdir(exist_ok=True)
    (tmp_path / "m" / "config.json").write_text("{}")
    path = tmp_path / "c.toml"
    path.write_text(
        f'[model]\npath = "{tmp_path}/m"\n[data]\nsource = "reasoning_gym:x"\n[metrics]\nsinks = {list(sinks)}\n'
    )
    try:
        configuration.load(path)
    except ConfigError as error:
        return error.faults
    return ()


def test_a_sink_whose_package_is_missing_is_a_fault_that_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert faults(tmp_path, "wandb", "prometheus") == (
        "metrics.sinks: 'wandb' needs a package that is not installed: pip install wandb",
        "metrics.sinks: 'prometheus' needs a package that is not installed: pip install prometheus-client",
    )


def test_an_unknown_sink_is_a_fault_that_names_the_known_ones(tmp_path: Path) -> None:
    (fault,) = faults(tmp_path, "wandbb")
    assert fault.startswith("metrics.sinks: 'wandbb' is none of prometheus, tensorboard, trackio, wandb")


class Collecting:
    """A sink of a user's own."""

    seen: list[tuple[int, Row]]

    def __init__(self, config: Config, folder: Path) -> None:
        type(self).seen = []

    @property
    def place(self) -> str:
        return "memory"

    def write(self, step: int, row: Row) -> None:
        if row["skipped"]:
            raise ConnectionError("away")
        self.seen.append((step, row))

    def close(self) -> None:
        self.seen.append((-1, {}))


def test_a_users_own_sink_needs_no_registry_and_may_fail_for_a_while(tmp_path: Path) -> None:
    assert write(config_of(tmp_path, "tests.test_sinks:Collecting"), tmp_path) == (
        "tests.test_sinks:Collecting: ConnectionError: away"
    )
    assert [step for step, _ in Collecting.seen] == [0, 2, -1]


# --- Each of them --------------------------------------------------------------------------------------------------


def test_tensorboard_files_hold_every_number_and_a_resumed_run_replaces_its_steps(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = config_of(tmp_path, "tensorboard")
    assert write(config, tmp_path) == ""
    assert write(config, tmp_path, [row(2, loss=0.5), row(3)]) == ""
    accumulator = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    losses = {scalar.step: scalar.value for scalar in accumulator.Scalars("loss")}
    assert losses == pytest.approx({0: ROWS[0]["loss"], 2: 0.5, 3: row(3)["loss"]})
    assert "note" not in accumulator.Tags()["scalars"]
    assert [scalar.value for scalar in accumulator.Scalars("skipped")][:2] == [0, 1]


@pytest.mark.multiprocess
def test_wandb_offline_keeps_the_run_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert write(config_of(tmp_path, "wandb", project="sums"), tmp_path) == ""
    assert wandb_history(tmp_path) == [(0, ROWS[0]["loss"]), (1, None), (2, ROWS[2]["loss"])]


UNREACHABLE = """
import sys
from pathlib import Path
from aoffpolicy.sinks import wandb
from tests.test_sinks import config_of, write
wandb.INIT_TIMEOUT_S = 2.0
print(write(config_of(Path(sys.argv[1]), "wandb"), Path(sys.argv[1])))
"""


@pytest.mark.multiprocess
def test_wandb_goes_on_offline_when_the_service_cannot_be_reached_and_the_process_ends(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    away = {"WANDB_MODE": "online", "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "0" * 40}
    done = subprocess.run(
        [sys.executable, "-c", UNREACHABLE, str(tmp_path)],
        env=os.environ | away,
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    news = f"wandb: ConnectionError: from now on kept in {tmp_path}/wandb for `wandb sync`"
    assert done.stdout.splitlines()[-1] == news
    assert [step for step, _ in wandb_history(tmp_path)] == [0, 1, 2]


def wandb_history(folder: Path) -> list[tuple[int, float | None]]:
    """Step and loss of every row in the one offline run."""
    import wandb
    from wandb.proto import wandb_internal_pb2

    wandb.teardown()  # its service writes the end of the file after the run has finished
    (path,) = (folder / "wandb").glob("offline-run-*/run-*.wandb")
    history = []
    for data in leveldb_log(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            history.append((items["step"], items.get("loss")))
    return history


def leveldb_log(data: bytes) -> Iterator[bytes]:
    """The records of a file in LevelDB's log format, which wandb writes after a header of seven bytes."""
    position, parts = 7, b""
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:  # the rest of a block that is too short for a header
            position += 32768 - position % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


@pytest.mark.multiprocess
def test_trackio_has_every_step_in_its_local_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("trackio") is None:
        pytest.skip("trackio is not installed")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trackio = pytest.importorskip("trackio")
    assert write(config_of(tmp_path, "trackio", project="sums"), tmp_path) == ""
    from trackio.sqlite_storage import SQLiteStorage

    logged = SQLiteStorage.get_logs("sums", "sums")
    assert trackio is not None
    assert [(log["step"], log.get("loss")) for log in logged] == [(r["step"], r["loss"]) for r in ROWS]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("where", ["", "{host}:0"])
def test_prometheus_serves_the_newest_value_of_every_number(tmp_path: Path, host: str, where: str) -> None:
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    address = where.format(host=f"[{host}]" if ":" in host else host)
    (sink,) = open_sinks(config_of(tmp_path, "prometheus", host=host, prometheus_address=address), tmp_path)
    for each in ROWS:
        sink.outlet.put((each["step"], each))
    assert ("[::1]:" if ":" in host else "127.0.0.1:") in sink.place
    served = ""
    for _ in range(100):
        served = urllib.request.urlopen(sink.place, timeout=5).read().decode()
        if "aoffpolicy_eval_reward_mean" in served:
            break
    values = dict(line.rsplit(" ", 1) for line in served.splitlines() if not line.startswith("#"))
    assert float(values['aoffpolicy_loss{run="sums"}']) == ROWS[2]["loss"]
    assert float(values['aoffpolicy_step{run="sums"}']) == 2
    assert float(values['aoffpolicy_eval_reward_mean{run="sums"}']) == 0.75
    assert sink.outlet.close(10)
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(sink.place, timeout=5)


def test_a_port_in_use_is_a_fault_of_its_key_and_leaves_no_other_sink_open(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    (first,) = open_sinks(config_of(tmp_path, "prometheus"), tmp_path)
    taken = first.place.removeprefix("http://").removesuffix("/metrics")
    with pytest.raises(ConfigError, match=r"metrics\.prometheus_address: cannot bind 127\.0\.0\.1:\d+"):
        open_sinks(config_of(tmp_path, "tests.test_sinks:Collecting", "prometheus", prometheus_address=taken), tmp_path)
    assert Collecting.seen == [(-1, {})]
    assert first.outlet.close(10)
