"""A member of the weight group in a process of its own: reads who it is from standard input and serves."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Iterator

import anyio
import msgspec
import torch

from aoffpolicy.transport.address import Address
from aoffpolicy.transport.control import ControlClient, Hello
from aoffpolicy.transport.manifest import Named, specs_of
from aoffpolicy.transport.weights import WeightMember


class Orders(msgspec.Struct):
    url: str
    run_id: str
    heartbeat_timeout_s: float
    role: str
    rank: int
    incarnation: int = 0
    pause_s: float = 0.0
    """Between two tensors that the sender gathers."""


def weights(seed: int) -> Iterator[Named]:
    """The first tensor says which weights the others must be."""
    generator = torch.Generator().manual_seed(seed)
    yield "seed", torch.tensor(seed)
    for index in range(40):
        yield f"layer.{index}", torch.randn(37, 11 + index, generator=generator)


def load(tensors: Iterator[Named]) -> set[str]:
    """Raises unless every tensor is, bit for bit, what the sender's seed gives."""
    first = next(tensors)
    received = dict([first, *tensors])
    for name, tensor in weights(int(first[1])):
        if not torch.equal(received[name], tensor):
            raise ValueError(f"{name} is not what was sent")
    return set(received)


def member(orders: Orders) -> WeightMember:
    specs = specs_of(weights(0))
    if orders.role == "rollout":
        return WeightMember("receive", backend="gloo", specs=specs, load=load)
    updates = itertools.count()

    def gather() -> Iterator[Named]:
        for named in weights(next(updates)):
            time.sleep(orders.pause_s)
            yield named

    return WeightMember("send", backend="gloo", specs=specs, gather=gather)


async def main(orders: Orders) -> None:
    torch.set_num_threads(1)
    hello = Hello(
        role=orders.role,
        rank=orders.rank,
        incarnation=orders.incarnation,
        host=os.uname().nodename,
        pid=os.getpid(),
        versions={},
        run_id=orders.run_id,
    )
    client = ControlClient(
        Address.parse(orders.url), hello, keys=None, server_key=None, heartbeat_timeout_s=orders.heartbeat_timeout_s
    )
    await client.serve(member(orders).handlers)


if __name__ == "__main__":
    anyio.run(main, msgspec.json.decode(sys.stdin.buffer.read(), type=Orders), backend_options={"use_uvloop": True})
