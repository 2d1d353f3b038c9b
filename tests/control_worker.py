"""A worker process for the control plane's tests: reads who it is from standard input and serves."""

from __future__ import annotations

import os
import sys
import time

import anyio
import msgspec

from aoffpolicy.transport.address import Address
from aoffpolicy.transport.control import ControlClient, Hello
from aoffpolicy.transport.messages import Done, Message, Prepare, Ready, SaveCheckpoint
from aoffpolicy.transport.security import KeyPair


class Orders(msgspec.Struct):
    url: str
    run_id: str
    heartbeat_timeout_s: float
    public: bytes = b""
    secret: bytes = b""
    server: bytes = b""


async def prepare(request: Prepare) -> Message:
    return Ready(term=request.term, backend=f"pid {os.getpid()}")


async def block(request: SaveCheckpoint) -> Message:
    """Block the event loop, as a bad handler or a long compilation would."""
    time.sleep(request.step)  # noqa: ASYNC251
    return Done()


async def main(orders: Orders) -> None:
    hello = Hello(
        role="trainer",
        rank=0,
        incarnation=0,
        host=os.uname().nodename,
        pid=os.getpid(),
        versions={},
        run_id=orders.run_id,
    )
    client = ControlClient(
        Address.parse(orders.url),
        hello,
        keys=KeyPair(orders.public, orders.secret) if orders.secret else None,
        server_key=orders.server or None,
        heartbeat_timeout_s=orders.heartbeat_timeout_s,
    )
    client.progress("serving")
    await client.serve({Prepare: prepare, SaveCheckpoint: block})


if __name__ == "__main__":
    anyio.run(main, msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Orders), backend_options={"use_uvloop": True})
