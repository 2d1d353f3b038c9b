"""What the status stream costs the run: many workers, and a subscriber that never reads.

Prints one line a figure, all from one invocation; subscribers are processes of their own:
  core_share_N           N workers published once a second, one subscriber that reads: CPU time of the publisher's
                         process / wall time, ZeroMQ's own thread included (1,000 workers: limit 0.10)
  core_share_N_raw       the same bytes with a bare XPUB socket and no structs: what cannot be saved
  publish_p50_us_lazy    publishing one step event while a subscriber does not read, 100,000 events, past its high-water
  publish_p99_us_lazy    mark (limit 1,000)
  publish_max_us_lazy
  rss_growth_mib_lazy    resident memory of the publisher's process, from 20,000 events on to the last one
  rss_queue_mib_lazy     the same over the first 20,000 events: the subscriber's queue filling up to its high-water mark
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import anyio.lowlevel
import msgspec
import zmq

from aoffpolicy.transport.event_schema import LIVE, encode_event
from aoffpolicy.transport.events import StatusPublisher, StepEvent, WorkerEvent

SUBSCRIBER = """
import sys, time, zmq
socket = zmq.Context().socket(zmq.SUB)
socket.subscribe(b"event/")
socket.connect(sys.argv[1])
print("ready", flush=True)
if sys.argv[2] == "reads":
    while True:
        socket.recv_multipart()
sys.stdin.read()
"""
EVENTS, FULL = 100_000, 20_000


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--seconds", type=int, default=20)
    parser.add_argument("--json", type=Path, help="write the figures as one flat object")
    options = parser.parse_args()
    figures = anyio.run(measure, options.workers, options.seconds, backend_options={"use_uvloop": True})
    for name, value in figures.items():
        print(f"{name:<24} {value:.4g}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


async def measure(workers: int, seconds: int) -> dict[str, float]:
    figures: dict[str, float] = {}
    async with StatusPublisher("127.0.0.1", keys=None, reader_public=None, run_id="benchmark") as publisher:
        with subscriber(publisher.address.url, "reads"):
            figures[f"core_share_{workers}"] = await core_share(publisher, workers, seconds)
    figures[f"core_share_{workers}_raw"] = await core_share_raw(workers, seconds)
    async with StatusPublisher("127.0.0.1", keys=None, reader_public=None, run_id="benchmark") as publisher:
        with subscriber(publisher.address.url, "sleeps"):
            figures |= await lazy(publisher)
    return figures


async def core_share(publisher: StatusPublisher, workers: int, seconds: int) -> float:
    began, busy = time.monotonic(), time.process_time()
    for second in range(seconds):
        for worker in range(workers):
            publisher.publish(event_of(worker, second))
        await anyio.sleep(max(0.0, began + second + 1 - time.monotonic()))
    return (time.process_time() - busy) / (time.monotonic() - began)


async def core_share_raw(workers: int, seconds: int) -> float:
    context = zmq.Context()
    socket = context.socket(zmq.XPUB)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    with subscriber(f"tcp://127.0.0.1:{port}", "reads"):
        data = [encode_event(event_of(worker, 0)) for worker in range(workers)]
        began, busy = time.monotonic(), time.process_time()
        for second in range(seconds):
            for each in data:
                socket.send_multipart([LIVE + b"worker", each])
            await anyio.sleep(max(0.0, began + second + 1 - time.monotonic()))
        share = (time.process_time() - busy) / (time.monotonic() - began)
    socket.close(0)
    context.term()
    return share


async def lazy(publisher: StatusPublisher) -> dict[str, float]:
    event = StepEvent(step=0, metrics={f"metric_{index}": float(index) for index in range(50)})
    took: list[float] = []
    at_start = rss_mib()
    when_full = at_start
    for index in range(EVENTS):
        before = time.perf_counter()
        publisher.publish(msgspec.structs.replace(event, step=index))
        took.append(time.perf_counter() - before)
        if index % 100 == 0:
            await anyio.lowlevel.checkpoint()  # as in a run: the event loop has its turns
        if index == FULL:
            when_full = rss_mib()
    took.sort()
    return {
        "publish_p50_us_lazy": took[EVENTS // 2] * 1e6,
        "publish_p99_us_lazy": took[EVENTS * 99 // 100] * 1e6,
        "publish_max_us_lazy": took[-1] * 1e6,
        "rss_growth_mib_lazy": rss_mib() - when_full,
        "rss_queue_mib_lazy": when_full - at_start,
    }


def event_of(worker: int, second: int) -> WorkerEvent:
    return WorkerEvent(
        role="rollout",
        rank=worker,
        state="busy",
        host=f"node-{worker // 8}",
        pid=1000 + worker,
        device=f"npu:{worker % 8}",
        detail="model loaded",
        version=second,
        load=worker % 64,
        tokens_per_s=1234.5,
        memory_bytes=60 * 2**30,
    )


def rss_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@contextmanager
def subscriber(address: str, habit: str) -> Iterator[None]:
    """A subscriber in a process of its own that reads everything or nothing."""
    command = [sys.executable, "-c", SUBSCRIBER, address, habit]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield
        finally:
            process.kill()


if __name__ == "__main__":
    main()
