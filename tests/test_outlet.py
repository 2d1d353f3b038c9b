from __future__ import annotations

import threading
import time

from aoffpolicy.outlet import CAPACITY, Outlet


def test_items_are_handled_in_order_in_a_thread_of_that_name() -> None:
    seen: list[tuple[int, str]] = []
    outlet: Outlet[int] = Outlet("disk", lambda item: seen.append((item, threading.current_thread().name)))
    for item in range(50):
        outlet.put(item)
    assert outlet.close(5)
    assert seen == [(item, "disk") for item in range(50)]


def test_an_error_is_told_once_and_the_next_item_is_tried() -> None:
    seen: list[int] = []

    def handle(item: int) -> None:
        if item == 1:
            raise ConnectionError("the server is away")
        seen.append(item)

    outlet: Outlet[int] = Outlet("wandb", handle)
    for item in range(3):
        outlet.put(item)
    assert outlet.close(5)
    assert (seen, outlet.failed) == ([0, 2], 1)
    assert outlet.take_news() == "wandb: ConnectionError: the server is away"
    assert outlet.take_news() == ""


def test_one_that_hangs_holds_up_neither_putting_nor_closing() -> None:
    release = threading.Event()
    outlet: Outlet[int] = Outlet("slow", lambda item: release.wait(30) and None)
    began = time.monotonic()
    for item in range(CAPACITY + 10):
        outlet.put(item)
    assert not outlet.close(0.2)
    assert time.monotonic() - began < 5
    assert outlet.dropped >= 9
    assert "were left out" in outlet.take_news()
    release.set()


def test_what_finishes_is_called_last_and_may_fail() -> None:
    seen: list[object] = []

    def finish() -> None:
        seen.append("end")
        raise OSError("disk full")

    outlet: Outlet[int] = Outlet("disk", seen.append, finish)
    outlet.put(1)
    assert outlet.close(5)
    assert seen == [1, "end"]
    assert outlet.take_news() == "disk: OSError: disk full"
