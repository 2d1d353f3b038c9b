"""Where the members of a group meet: a key-value store of our own, and the wait until all of them have come.

The store has no authentication, so it listens on one interface, under prefixes that nobody can guess, and nothing read
from it is unpickled.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import TCPStore
from torch.distributed.distributed_c10d import Store

from aoffpolicy.errors import RendezvousError
from aoffpolicy.transport.group import CollectiveError

POLL_S = 0.02
"""Between two looks at who has come: `TCPStore.wait` cannot be interrupted, and logs every time-out."""


class RendezvousStore:
    """A TCPStore server on a socket of our own; it lives as long as the run.

    Args:
        host: IPv4 or IPv6 literal without brackets, or a name. A wildcard is refused: peers could not connect to it.
        timeout_s: Of a request to the store.

    Attributes:
        host: Bare address that is listened on.
        port: Chosen by the kernel and never given up.

    Raises:
        RendezvousError: The host cannot be resolved or bound.
    """

    def __init__(self, host: str, timeout_s: float = 60.0) -> None:
        try:
            family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            listener = socket.create_server(address[:2], family=family, backlog=1024)
        except OSError as error:
            raise RendezvousError(f"the rendezvous store cannot listen on {host}: {error}") from error
        with listener:
            self.host, self.port = listener.getsockname()[:2]
            if ipaddress.ip_address(self.host).is_unspecified:
                raise RendezvousError(f"the rendezvous store needs the address of one interface, not {host}")
            self._server: TCPStore | None = TCPStore(
                self.host,
                self.port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=timeout_s),
                master_listen_fd=listener.detach(),
            )

    def close(self) -> None:
        """Stop listening; who still waits for a key gets an error."""
        self._server = None


def connect(host: str, port: int, timeout_s: float) -> TCPStore:
    """A client of the store.

    Raises:
        CollectiveError: Nobody answers there within the time-out.
    """
    try:
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise CollectiveError(f"the rendezvous store at {host} port {port} does not answer: {error}") from error


def arrive(store: Store, rank: int, members: Sequence[str], timeout_s: float, aborted: threading.Event) -> None:
    """Say that this rank is here and wait for all others, so that forming the group itself need not be interrupted.

    Args:
        store: Its keys belong to this group alone.
        rank: Place of this member in `members`.
        members: Name of every rank, for the error.
        timeout_s: How long to wait.
        aborted: Ends the wait when set.

    Raises:
        CollectiveError: Aborted, or somebody did not come in time.
    """
    started = time.monotonic()
    store.set(f"arrived/{rank}", "1")
    missing = [other for other in range(len(members)) if other != rank]
    while missing := [other for other in missing if not store.check([f"arrived/{other}"])]:
        waited = time.monotonic() - started
        if aborted.wait(POLL_S) or waited > timeout_s:
            names = ", ".join(members[other] for other in missing)
            raise CollectiveError(f"waited {waited:.1f} s for {names} to come")
