"""Exceptions that say who failed, where, and why. Every error of the package derives from `AoffpolicyError`."""

from __future__ import annotations

from collections.abc import Sequence


class AoffpolicyError(Exception):
    """Base of every error raised on purpose by this package."""


class ConfigError(AoffpolicyError):
    """The configuration is wrong; `faults` holds one line for each wrong key."""

    def __init__(self, faults: Sequence[str]) -> None:
        self.faults = tuple(faults)
        super().__init__("\n".join(self.faults))


class DataError(AoffpolicyError):
    """A data source, row or reward cannot be used; the message names the file and row."""


class RoleError(AoffpolicyError):
    """Something failed inside a role. `str()` starts with the role and rank.

    Args:
        role: "trainer", "rollout", "reward" or "controller".
        rank: Rank within the role, 0 where there is only one.
        cause: What went wrong, in one sentence.
        remote_traceback: The traceback in the other process as text, empty where there is none.
    """

    def __init__(self, role: str, rank: int, cause: str, remote_traceback: str = "") -> None:
        self.role = role
        self.rank = rank
        self.cause = cause
        self.remote_traceback = remote_traceback
        super().__init__(f"{role} {rank}: {cause}")


class RemoteError(RoleError):
    """A request was answered with an error by the peer that handled it."""


class PeerLostError(RoleError):
    """A peer died, was disconnected, or stopped sending heartbeats."""


class ProcessDiedError(RoleError):
    """A child process ended although it should have lived; the cause names its signal or exit code."""

    by_signal = False
    """Whether a signal ended it."""


class DeadlineError(RoleError):
    """A wait ran past its deadline; the cause says who waited for whom, for how long, and what to do."""


class RendezvousError(AoffpolicyError):
    """A collective group could not be formed; the message names term, phase and the ranks missing."""


class WeightSyncError(AoffpolicyError):
    """Weights were not delivered whole to every receiver; the message names the rank and the tensor."""


class CheckpointError(AoffpolicyError):
    """A checkpoint could not be written or read; the message names the folder."""


class ProtocolError(AoffpolicyError):
    """A frame, message or version on the wire is not what this side speaks."""


class EngineError(AoffpolicyError):
    """A rollout engine cannot do what it was asked for; the message names the model, prompt or version."""


class EngineDiedError(EngineError):
    """A process of the rollout engine has ended; the message names it, its pid and its exit code."""


class TrainerError(AoffpolicyError):
    """A trainer backend was asked for something that it does not hold; the message says what."""


class NonfiniteError(TrainerError):
    """A loss or gradient is not finite, and `trainer.nonfinite` is "stop"; the message holds both."""


class SchedulerError(AoffpolicyError):
    """The scheduler was asked for something it cannot do; the message explains what and why."""


def first_cause(error: BaseException) -> BaseException:
    """The first exception inside nested exception groups; cancellations count only when there is nothing else."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    causes = [first_cause(member) for member in error.exceptions]
    return next((cause for cause in causes if isinstance(cause, Exception)), causes[0])
