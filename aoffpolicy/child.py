"""The first and last lines of every child process: who it is, that it dies with its parent, and that it serves.

A child learns everything, secrets included, from its standard input: nothing is on its command line or in its
environment. `python -m aoffpolicy.trainer.worker` and its siblings call `run`.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Protocol

import anyio
import msgspec

from aoffpolicy.config import Config
from aoffpolicy.devices import DeviceKind
from aoffpolicy.errors import PeerLostError
from aoffpolicy.transport.messages import Message

logger = logging.getLogger(__name__)
Handlers = Mapping[type[Message], Callable[[Any], Awaitable[Message]]]

EXIT_FAILED = 1
EXIT_PARENT_LOST = 3


class _Wire(msgspec.Struct, frozen=True, kw_only=True):
    """`Bootstrap` as it travels; the config as its JSON."""

    role: str
    rank: int
    world_size: int
    incarnation: int
    run_id: str
    parent_pid: int
    config: str
    device_kind: DeviceKind
    device_index: int
    threads: int
    cores: tuple[int, ...]
    control_url: str
    store_host: str
    store_port: int
    public_key: bytes
    secret_key: bytes
    server_key: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Bootstrap:
    """What a child is told before anything else."""

    role: str
    rank: int
    world_size: int
    """Processes of this role."""
    config: Config
    device_kind: DeviceKind = "cpu"
    device_index: int = 0
    threads: int = 1
    """CPU threads of the numerical libraries."""
    cores: tuple[int, ...] = ()
    """CPU cores to run on; empty: wherever the parent may."""
    incarnation: int = 0
    """0 for the first process of this role and rank, then 1, 2, ... for its replacements."""
    run_id: str = ""
    parent_pid: int = 0
    control_url: str = ""
    store_host: str = ""
    """Bare address of the TCPStore that rendezvous use."""
    store_port: int = 0
    public_key: bytes = b""
    secret_key: bytes = b""
    """CURVE secret of this child; empty without CURVE."""
    server_key: bytes = b""
    """Public key of the controller; empty without CURVE."""

    def __repr__(self) -> str:
        return f"Bootstrap({self.role} {self.rank} of {self.world_size}, run {self.run_id!r})"

    def to_bytes(self) -> bytes:
        fields = {name: getattr(self, name) for name in _Wire.__struct_fields__ if name != "config"}
        return msgspec.msgpack.encode(_Wire(config=self.config.model_dump_json(), **fields))

    @classmethod
    def from_bytes(cls, data: bytes) -> Bootstrap:
        wire = msgspec.msgpack.decode(data, type=_Wire)
        fields = {name: getattr(wire, name) for name in _Wire.__struct_fields__ if name != "config"}
        return cls(config=Config.model_validate_json(wire.config), **fields)


class Worker(Protocol):
    """What a role's process does; built inside the running event loop."""

    @property
    def handlers(self) -> Handlers: ...


def set_parent_death_signal() -> None:
    """Have the kernel kill this process when the thread that started it ends (Linux; not inherited by children)."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def die_with_parent(parent_pid: int) -> None:
    """Tie this process's life to its parent's, also when the parent is gone already."""
    set_parent_death_signal()
    if os.getppid() != parent_pid:
        os._exit(EXIT_PARENT_LOST)


def package_versions() -> dict[str, str]:
    """Versions that both sides of the control plane compare."""
    return {
        "aoffpolicy": version("aoffpolicy"),
        "torch": version("torch"),
        "python": ".".join(map(str, sys.version_info[:3])),
    }


def configure_logging(role: str, rank: int) -> None:
    """Log lines carry time, role, rank and module; they go to standard error, which is the role's log file."""
    logging.basicConfig(
        level=os.environ.get("AOFFPOLICY_LOG", "INFO"),
        format=f"%(asctime)s %(levelname)s {role}-{rank} %(name)s: %(message)s",
        stream=sys.stderr,
        force=True,
    )


def run(worker_class: Callable[[Bootstrap], Worker]) -> None:
    """Be a child process: read the bootstrap, serve the controller until `Stop`, leave.

    Never returns: a thread that sits in a collective must not keep the process alive.
    """
    bootstrap = Bootstrap.from_bytes(sys.stdin.buffer.read())
    die_with_parent(bootstrap.parent_pid)
    configure_logging(bootstrap.role, bootstrap.rank)
    if bootstrap.cores:
        os.sched_setaffinity(0, bootstrap.cores)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides what Ctrl-C means
    code = 0
    try:
        anyio.run(_serve, bootstrap, worker_class, backend_options={"use_uvloop": True})
    except PeerLostError:
        logger.exception("the controller is gone")
        code = EXIT_PARENT_LOST
    except BaseException:
        logger.exception("%s %d failed", bootstrap.role, bootstrap.rank)
        code = EXIT_FAILED
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


async def _serve(bootstrap: Bootstrap, worker_class: Callable[[Bootstrap], Worker]) -> None:
    from aoffpolicy.transport.address import Address
    from aoffpolicy.transport.control import ControlClient, Hello
    from aoffpolicy.transport.security import KeyPair

    hello = Hello(
        role=bootstrap.role,
        rank=bootstrap.rank,
        incarnation=bootstrap.incarnation,
        host=os.uname().nodename,
        pid=os.getpid(),
        versions=package_versions(),
        run_id=bootstrap.run_id,
    )
    keys = KeyPair(bootstrap.public_key, bootstrap.secret_key) if bootstrap.secret_key else None
    client = ControlClient(
        Address.parse(bootstrap.control_url),
        hello,
        keys=keys,
        server_key=bootstrap.server_key or None,
        heartbeat_timeout_s=bootstrap.config.control.heartbeat_timeout_s,
    )
    worker = worker_class(bootstrap)
    await client.serve(worker.handlers)
