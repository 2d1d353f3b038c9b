"""The processes of a run: spawned as planned, let in, told to start, ended, replaced."""

from __future__ import annotations

import os
from collections.abc import Sequence

from aoffpolicy.child import Bootstrap
from aoffpolicy.config import Config
from aoffpolicy.plan import PlannedProcess
from aoffpolicy.reporting import Reporter
from aoffpolicy.supervisor import Supervisor
from aoffpolicy.transport.control import ControlServer, PeerId
from aoffpolicy.transport.messages import Start, Started
from aoffpolicy.transport.rendezvous import RendezvousStore
from aoffpolicy.transport.security import KeyPair


class RunProcesses:
    """Starts the processes of one run; each incarnation has a key pair of its own.

    Args:
        config: The resolved config.
        plan: The processes.
        run_id: Of this run.
        server: Lets them in.
        server_public: The control plane's public key; empty without CURVE.
        store: Where their collectives meet.
        supervisor: Spawns and ends them.
        reporter: Is told of each.
    """

    def __init__(
        self,
        config: Config,
        plan: Sequence[PlannedProcess],
        run_id: str,
        server: ControlServer,
        server_public: bytes,
        store: RendezvousStore,
        supervisor: Supervisor,
        reporter: Reporter,
    ) -> None:
        self._config = config
        self._plan = {PeerId(process.role, process.rank): process for process in plan}
        self._run_id = run_id
        self._server = server
        self._server_public = server_public
        self._store = store
        self._supervisor = supervisor
        self._reporter = reporter

    async def start_all(self) -> tuple[PeerId, ...]:
        """Spawn every planned process and wait until each has said hello."""
        for peer in self._plan:
            await self._spawn(peer, incarnation=0)
        for peer in self._plan:
            await self._arrival(peer)
        return tuple(self._plan)

    async def start_again(self, peer: PeerId, incarnation: int) -> Started:
        """Put a new process in the place of one that is gone, and have it load what it needs.

        Raises:
            RoleError: It did not come, or could not start.
        """
        await self._spawn(peer, incarnation)
        await self._arrival(peer)
        reply = await self._server.call(peer, Start(), self._config.supervisor.start_timeout_s)
        assert isinstance(reply, Started)
        self._reporter.ready(peer)
        return reply

    async def end(self, peer: PeerId) -> None:
        """End what is left of a process that was lost; returns when it is gone."""
        self._server.lose(peer, "it is being replaced")
        await self._supervisor.end(peer.role, peer.rank)

    async def _spawn(self, peer: PeerId, incarnation: int) -> None:
        process = self._plan[peer]
        keys = KeyPair.generate() if self._server_public else None
        self._server.allow(peer, keys.public if keys else b"", incarnation)
        self._reporter.planned(process)
        await self._supervisor.spawn(
            Bootstrap(
                role=process.role,
                rank=process.rank,
                world_size=process.world_size,
                config=self._config,
                device_kind=process.device_kind,
                device_index=process.device_index,
                threads=process.threads,
                cores=process.cores,
                incarnation=incarnation,
                run_id=self._run_id,
                parent_pid=os.getpid(),
                control_url=self._server.address.url,
                store_host=self._store.host,
                store_port=self._store.port,
                public_key=keys.public if keys else b"",
                secret_key=keys.secret if keys else b"",
                server_key=self._server_public,
            )
        )

    async def _arrival(self, peer: PeerId) -> None:
        hello = await self._server.wait_for(peer, self._config.supervisor.start_timeout_s)
        self._reporter.arrived(peer, hello)
