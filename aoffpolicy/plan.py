"""Which process runs where: role, rank, device, CPU cores. Planning starts nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from aoffpolicy import devices
from aoffpolicy.config import Config, Weights
from aoffpolicy.devices import DeviceKind
from aoffpolicy.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PlannedProcess:
    role: str
    rank: int
    world_size: int
    """Processes of this role."""
    device_kind: DeviceKind
    device_index: int
    cores: tuple[int, ...]
    """CPU cores it is bound to; empty: not bound."""
    threads: int

    @property
    def device(self) -> str:
        if self.device_kind != "cpu":
            return f"{self.device_kind}:{self.device_index}"
        return "cpu (cores " + ",".join(map(str, self.cores)) + ")" if self.cores else "cpu"


def make_plan(config: Config, cores: Sequence[int] | None = None) -> tuple[PlannedProcess, ...]:
    """Place every process of a run on this machine.

    On device cpu, roles with `threads = 0` share the cores evenly, at least one each; cores are given out in turn,
    trainer ranks first, and given out again only when there are more claims than cores. On cuda and npu, trainer
    ranks take the first devices and rollout workers the next ones.
    """
    cores = tuple(devices.cpu_cores() if cores is None else cores)
    kinds = {
        "trainer": devices.detect() if config.trainer.device == "auto" else config.trainer.device,
        "rollout": devices.detect() if config.rollout.device == "auto" else config.rollout.device,
    }
    counts = {"trainer": config.trainer.ranks, "rollout": config.rollout.workers}
    threads = {"trainer": config.trainer.threads, "rollout": config.rollout.threads}
    on_cpu = sum(counts[role] for role, kind in kinds.items() if kind == "cpu")
    share = max(1, len(cores) // on_cpu) if on_cpu else 1

    plan: list[PlannedProcess] = []
    next_core = 0
    next_device = 0
    for role, kind in kinds.items():
        for rank in range(counts[role]):
            wanted = min(threads[role] or share, len(cores))
            own: tuple[int, ...] = ()
            if kind == "cpu":
                own = tuple(sorted(cores[(next_core + i) % len(cores)] for i in range(wanted)))
                next_core += wanted
            plan.append(PlannedProcess(role, rank, counts[role], kind, next_device, own, wanted))
            if kind != "cpu":
                next_device += config.rollout.tensor_parallel if role == "rollout" else 1
    plan += [
        PlannedProcess("reward", rank, config.reward.workers, "cpu", 0, (), 1) for rank in range(config.reward.workers)
    ]
    return tuple(plan)


def with_weights_backend(config: Config, plan: Sequence[PlannedProcess]) -> Config:
    """The config with `weights.backend = "auto"` decided: that of the device that all members are on, or gloo.

    Raises:
        ConfigError: This version does not have it.
    """
    if config.weights.backend != "auto":
        return config
    kinds = {process.device_kind for process in plan if process.role != "reward"}
    backends = {devices.COLLECTIVE_BACKEND[kind] for kind in kinds}
    backend = backends.pop() if len(backends) == 1 else "gloo"
    if backend not in get_args(Weights.model_fields["backend"].annotation):
        raise ConfigError(
            [
                f"weights.backend: device {kinds.pop()} takes {backend}, which this version does not have yet; "
                'weights.backend = "gloo" sends through host memory'
            ]
        )
    return config.model_copy(update={"weights": config.weights.model_copy(update={"backend": backend})})
