"""Who may come, who has come, who is lost: the controller's rules about its workers, without a socket."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Never

import anyio

from aoffpolicy.errors import DeadlineError, PeerLostError
from aoffpolicy.transport.messages import PROTOCOL
from aoffpolicy.transport.sessions import Session
from aoffpolicy.transport.wire import Beat, Echo, Hello, PeerId, Refused, Welcome


class Roster:
    """The workers of one run.

    Invariant: a worker has one current session. What older incarnations say is refused, and a session once lost is
    never taken up again, so that a worker that was given up cannot answer later as if nothing had happened.

    Args:
        run_id: Workers of another run are refused.
        secure: Whether each worker must hold the key that it was listed with.
        heartbeat_timeout_s: Silence after which a worker is lost.
        versions: Package versions that a Hello must match, by name.
        max_in_flight: Calls of one type in flight to one worker.
    """

    def __init__(
        self,
        run_id: str,
        *,
        secure: bool,
        heartbeat_timeout_s: float,
        versions: Mapping[str, str],
        max_in_flight: int,
    ) -> None:
        self._run_id = run_id
        self._secure = secure
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._versions = versions
        self._max_in_flight = max_in_flight
        self._sessions: dict[PeerId, Session] = {}
        self._by_connection: dict[bytes, Session] = {}
        self._lost: dict[PeerId, Session] = {}
        """Lost without having been told to stop, the first one first."""
        self._refusals: dict[PeerId, str] = {}
        """The last reason for which a worker was refused."""
        self._changed = anyio.Event()
        """Set, and replaced, whenever a worker comes, is lost or is replaced."""

    @property
    def public_keys(self) -> set[bytes]:
        """Of everybody who may come."""
        return {session.public_key for session in self._sessions.values()}

    def session(self, peer: PeerId) -> Session:
        """The current session; KeyError for a worker that was never allowed."""
        return self._sessions[peer]

    def session_of(self, connection: bytes) -> Session | None:
        """The session, alive and current, whose calls go over this connection."""
        session = self._by_connection.get(connection)
        return session if session is not None and session.alive else None

    # --- Changes ---------------------------------------------------------------------------------------------------

    def allow(self, peer: PeerId, public_key: bytes, incarnation: int) -> None:
        """Let this incarnation come, and fence off older ones."""
        old = self._sessions.get(peer)
        if old is not None:
            if incarnation < old.incarnation + (old.hello is not None):
                raise ValueError(f"{peer}: incarnation {incarnation} cannot replace {old.incarnation}")
            self._by_connection.pop(old.connection, None)
            old.end(f"incarnation {old.incarnation} was replaced by {incarnation}")
        self._lost.pop(peer, None)
        self._sessions[peer] = Session(peer, public_key, incarnation, self._max_in_flight)
        self._announce()

    def forget(self, peer: PeerId) -> None:
        """Do not count this worker's silence as a loss."""
        self.session(peer).leaving = True
        self._lost.pop(peer, None)

    def lose(self, session: Session, cause: str) -> None:
        """Give a worker up."""
        if session.lost:
            return
        session.end(cause)
        self._by_connection.pop(session.connection, None)
        if not session.leaving:
            self._lost[session.peer] = session
        self._announce()

    def close(self) -> None:
        for session in self._sessions.values():
            session.end("the controller has closed")

    def _announce(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    # --- What workers say ------------------------------------------------------------------------------------------

    def on_hello(self, hello: Hello, key: bytes | None, connection: bytes) -> Welcome | Refused:
        """Let a worker in or say why not."""
        refused = self._objection(hello, key, connection)
        if refused is not None:
            self._refusals[hello.peer] = refused.reason
            return refused
        session = self.session(hello.peer)
        if hello.incarnation > session.incarnation:
            self.allow(hello.peer, session.public_key, hello.incarnation)
            session = self.session(hello.peer)
        session.hello = hello
        session.connection = connection
        session.heard_at = time.monotonic()
        self._by_connection[connection] = session
        self._announce()
        return Welcome()

    def _objection(self, hello: Hello, key: bytes | None, connection: bytes) -> Refused | None:
        session = self._sessions.get(hello.peer)
        if hello.protocol != PROTOCOL:
            return Refused(kind="protocol", reason=f"it speaks protocol {hello.protocol}, the controller {PROTOCOL}")
        if hello.run_id != self._run_id:
            return Refused(kind="run", reason=f"it belongs to run {hello.run_id!r}, this is run {self._run_id!r}")
        if session is None:
            return Refused(kind="peer", reason=f"{hello.peer} is not part of this run")
        if self._secure and key != session.public_key:
            return Refused(kind="key", reason=f"its key is not the one of {hello.peer}")
        if hello.incarnation < session.incarnation:
            return self._fenced_off(hello.incarnation, session)
        if hello.incarnation == session.incarnation and session.lost:
            return Refused(kind="lost", reason=session.lost)
        if hello.incarnation == session.incarnation and session.hello and session.connection != connection:
            reason = f"{hello.peer} is here already, as pid {session.hello.pid} on {session.hello.host}"
            return Refused(kind="incarnation", reason=reason)
        for name, version in self._versions.items():
            if hello.versions.get(name) != version:
                reason = f"it has {name} {hello.versions.get(name)}, the controller {version}"
                return Refused(kind="versions", reason=reason)
        return None

    def on_beat(self, beat: Beat, key: bytes | None, connection: bytes) -> Echo | Refused:
        """Take a sign of life."""
        session = self._sessions.get(PeerId(beat.role, beat.rank))
        if session is None or beat.run_id != self._run_id:
            return Refused(kind="peer", reason=f"{beat.role} {beat.rank} is not part of this run")
        if beat.incarnation != session.incarnation:
            return self._fenced_off(beat.incarnation, session)
        if self._secure and key != session.public_key:
            return Refused(kind="key", reason=f"its key is not the one of {session.peer}")
        if not session.alive:
            return Refused(kind="lost", reason=session.lost or "it has not said hello")
        session.pulse = connection
        session.heard_at = time.monotonic()
        return Echo()

    @staticmethod
    def _fenced_off(incarnation: int, session: Session) -> Refused:
        reason = f"incarnation {incarnation} of {session.peer} was replaced by {session.incarnation}"
        return Refused(kind="incarnation", reason=reason)

    # --- Waiting ---------------------------------------------------------------------------------------------------

    async def wait_for(self, peer: PeerId, timeout_s: float) -> Hello:
        """Wait until the worker was let in; see `ControlServer.wait_for`."""
        with anyio.move_on_after(timeout_s):
            while True:
                session = self.session(peer)
                if session.lost:
                    raise session.error()
                if session.hello is not None:
                    return session.hello
                await self._changed.wait()
        refused = f"; its last attempt was refused: {self._refusals[peer]}" if peer in self._refusals else ""
        cause = f"the controller waited {timeout_s:.1f} s for its hello{refused}; its log says how far it came"
        raise DeadlineError(peer.role, peer.rank, cause)

    async def watch(self, takes_over: Callable[[PeerLostError], bool]) -> Never:
        """Raise the first loss that nobody takes over; see `ControlServer.watch`."""
        while True:
            for peer, session in list(self._lost.items()):
                if not takes_over(session.error()):
                    raise session.error()
                del self._lost[peer]
            await self._changed.wait()

    async def watch_liveness(self) -> Never:
        """Give up workers that are silent for too long, until cancelled."""
        interval_s = self._heartbeat_timeout_s / 5
        slept_from = time.monotonic()
        while True:
            await anyio.sleep(interval_s)
            now = time.monotonic()
            late_s = now - slept_from - interval_s
            slept_from = now
            for session in list(self._sessions.values()):
                if late_s > interval_s:
                    # This process was blocked or suspended: the beats lie unread in its own socket.
                    session.heard_at = min(now, session.heard_at + late_s)
                elif session.alive and now - session.heard_at > self._heartbeat_timeout_s:
                    self.lose(session, self._silence(session, now - session.heard_at))

    def _silence(self, session: Session, silent_s: float) -> str:
        where = f"pid {session.hello.pid} on {session.hello.host}" if session.hello else "not connected"
        return (
            f"no heartbeat for {silent_s:.1f} s (limit {self._heartbeat_timeout_s:.1f} s); it was {where}, "
            "and is dead, stopped or cut off"
        )
