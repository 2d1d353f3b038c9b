from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.distributed import PrefixStore

from aoffpolicy.errors import RendezvousError
from aoffpolicy.transport import group
from aoffpolicy.transport.group import Collective, CollectiveError, GroupOptions
from aoffpolicy.transport.rendezvous import RendezvousStore, connect

Form = Callable[[str], list[Collective]]


@pytest.fixture(params=["127.0.0.1", "::1"])
def host(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def form(host: str) -> Iterator[Form]:
    """Form a gloo group of three between threads of this process."""
    store = RendezvousStore(host)
    groups: list[Collective] = []

    def rank(prefix: str, rank: int) -> Collective:
        options = GroupOptions(rank=rank, size=3, interface=host, device=torch.device("cpu"), timeout_s=5.0)
        return group.create("gloo", PrefixStore(prefix, connect(store.host, store.port, 5.0)), options)

    def form(prefix: str) -> list[Collective]:
        with ThreadPoolExecutor(3) as pool:
            formed = list(pool.map(lambda r: rank(prefix, r), range(3)))
        groups.extend(formed)
        return formed

    yield form
    for collective in groups:
        collective.abort("the test is over")
    store.close()


def on_all(ranks: list[Collective], buffers: list[torch.Tensor], timeout_s: float = 5.0) -> None:
    with ThreadPoolExecutor(len(ranks)) as pool:
        list(pool.map(lambda pair: pair[0].broadcast(pair[1], 0, timeout_s).wait(), zip(ranks, buffers, strict=True)))


def waiting(collective: Collective, timeout_s: float) -> tuple[threading.Thread, list[CollectiveError]]:
    """A thread that is in a broadcast whose root does not send."""
    errors: list[CollectiveError] = []
    started = threading.Event()

    def wait() -> None:
        try:
            pending = collective.broadcast(torch.zeros(1 << 22, dtype=torch.uint8), 0, timeout_s)
            started.set()
            pending.wait()
        except CollectiveError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    assert started.wait(5.0)
    return thread, errors


def test_a_broadcast_brings_the_roots_bytes_to_every_rank(form: Form) -> None:
    ranks = form("a")
    buffers = [torch.full((100_003,), rank + 1, dtype=torch.uint8) for rank in range(3)]
    on_all(ranks, buffers)
    assert all(bool((buffer == 1).all()) for buffer in buffers)


def test_abort_ends_a_blocked_broadcast_here_at_once_and_on_the_peers_when_all_have_left(form: Form) -> None:
    ranks = form("a")
    thread, errors = waiting(ranks[1], timeout_s=60.0)
    other, others_errors = waiting(ranks[2], timeout_s=60.0)
    began = time.monotonic()
    ranks[1].abort("somebody failed")
    thread.join(2.0)
    assert not thread.is_alive() and str(errors[0]) == "somebody failed"
    assert other.is_alive()
    ranks[0].abort("the root failed")
    other.join(5.0)
    assert not other.is_alive() and "from rank 0 broke" in str(others_errors[0])
    assert time.monotonic() - began < 5.0


def test_a_silent_root_ends_the_wait_after_the_time_out_given(form: Form) -> None:
    ranks = form("a")
    began = time.monotonic()
    with pytest.raises(CollectiveError, match="broadcast of 8 bytes from rank 0"):
        ranks[1].broadcast(torch.zeros(8, dtype=torch.uint8), 0, 0.3).wait()
    assert time.monotonic() - began < 2.0


def test_a_group_that_was_left_refuses_broadcasts_and_says_why(form: Form) -> None:
    ranks = form("a")
    ranks[0].abort("first reason")
    ranks[0].abort("second reason")
    with pytest.raises(CollectiveError, match="first reason"):
        ranks[0].broadcast(torch.zeros(8, dtype=torch.uint8), 0, 1.0)


def test_aborted_groups_leave_no_thread_and_no_descriptor_behind(form: Form) -> None:
    def resources() -> tuple[int, int]:
        return len(list(Path("/proc/self/task").iterdir())), len(os.listdir("/proc/self/fd"))

    def cycle(prefix: str) -> None:
        ranks = form(prefix)
        thread, _ = waiting(ranks[1], timeout_s=60.0)
        for collective in ranks:
            collective.abort("done")
        thread.join(5.0)

    cycle("warm")
    time.sleep(0.5)
    before = resources()
    for index in range(3):
        cycle(str(index))
    deadline = time.monotonic() + 10.0
    while any(now > then for now, then in zip(resources(), before, strict=True)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert all(now <= then for now, then in zip(resources(), before, strict=True))


def test_an_absent_rank_ends_the_forming_after_its_time_out(host: str) -> None:
    store = RendezvousStore(host)
    options = GroupOptions(rank=0, size=2, interface=host, device=torch.device("cpu"), timeout_s=0.5)
    began = time.monotonic()
    with pytest.raises(CollectiveError, match="could not connect rank 0 of 2"):
        group.create("gloo", PrefixStore("x", connect(store.host, store.port, 5.0)), options)
    assert time.monotonic() - began < 5.0


def test_an_unknown_backend_is_refused_by_name(host: str) -> None:
    store = RendezvousStore(host)
    options = GroupOptions(rank=0, size=1, interface=host, device=torch.device("cpu"), timeout_s=1.0)
    with pytest.raises(RendezvousError, match="no collective backend 'carrier-pigeon'; there are gloo"):
        group.create("carrier-pigeon", connect(store.host, store.port, 1.0), options)
