from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import PrefixStore

from aoffpolicy.errors import RendezvousError
from aoffpolicy.transport.group import CollectiveError
from aoffpolicy.transport.rendezvous import RendezvousStore, arrive, connect

MEMBERS = ("trainer 0", "rollout 0", "rollout 1")


def client(store: RendezvousStore, prefix: str = "p") -> PrefixStore:
    return PrefixStore(prefix, connect(store.host, store.port, 5.0))


@pytest.mark.parametrize(("host", "bare"), [("127.0.0.1", "127.0.0.1"), ("::1", "::1")])
def test_the_store_listens_on_the_address_of_either_family_and_tells_it_without_brackets(host: str, bare: str) -> None:
    store = RendezvousStore(host)
    assert store.host == bare and store.port > 0
    client(store).set("key", "value")
    other = client(store)
    assert other.get("key") == b"value"


def test_the_store_takes_a_name_and_tells_a_literal_address() -> None:
    store = RendezvousStore("localhost")
    assert store.host in ("127.0.0.1", "::1")
    client(store).set("key", "value")


def test_the_port_is_held_from_the_first_moment_so_nobody_else_can_bind_it() -> None:
    store = RendezvousStore("127.0.0.1")
    with socket.socket() as rival, pytest.raises(OSError, match="in use"):
        rival.bind((store.host, store.port))


def test_two_stores_on_one_machine_do_not_meet() -> None:
    first, second = RendezvousStore("127.0.0.1"), RendezvousStore("127.0.0.1")
    client(first).set("key", "1")
    assert not client(second).check(["key"])


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_wildcard_address_is_refused(host: str) -> None:
    with pytest.raises(RendezvousError, match="needs the address of one interface"):
        RendezvousStore(host)


def test_a_host_that_is_not_ours_is_refused_by_name() -> None:
    with pytest.raises(RendezvousError, match=r"cannot listen on 192\.0\.2\.1"):
        RendezvousStore("192.0.2.1")


def test_a_closed_store_is_no_longer_there() -> None:
    store = RendezvousStore("127.0.0.1")
    store.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((store.host, store.port), timeout=1.0)


def test_everybody_arrives_however_late_the_last_one_is() -> None:
    store = RendezvousStore("::1")

    def come(rank: int) -> None:
        time.sleep(0.3 * (rank == 2))
        arrive(client(store), rank, MEMBERS, 5.0, threading.Event())

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(come, range(3)))


def test_whoever_does_not_come_is_named() -> None:
    store = RendezvousStore("127.0.0.1")
    client(store).set("arrived/1", "1")
    with pytest.raises(CollectiveError, match=r"waited 0\.[2-9] s for rollout 1 to come"):
        arrive(client(store), 0, MEMBERS, 0.2, threading.Event())


def test_the_wait_for_others_ends_at_once_when_aborted() -> None:
    store = RendezvousStore("127.0.0.1")
    aborted = threading.Event()
    threading.Timer(0.1, aborted.set).start()
    began = time.monotonic()
    with pytest.raises(CollectiveError, match="for rollout 0, rollout 1 to come"):
        arrive(client(store), 0, MEMBERS, 30.0, aborted)
    assert time.monotonic() - began < 2.0


def test_keys_of_another_prefix_do_not_count_as_arrived() -> None:
    store = RendezvousStore("127.0.0.1")
    for rank in (1, 2):
        client(store, "old term").set(f"arrived/{rank}", "1")
    with pytest.raises(CollectiveError):
        arrive(client(store, "new term"), 0, MEMBERS, 0.1, threading.Event())


def test_the_store_outlives_clients_that_come_and_go() -> None:
    store = RendezvousStore("127.0.0.1")
    for index in range(5):
        one = connect(store.host, store.port, 5.0)
        one.set_timeout(timedelta(seconds=1))
        one.set(f"key{index}", "x")
        del one
    assert client(store, "q").num_keys() >= 0
    assert connect(store.host, store.port, 5.0).check([f"key{index}" for index in range(5)])
