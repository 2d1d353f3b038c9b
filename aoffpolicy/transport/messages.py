"""Every message of the control plane, and how it becomes frames: one msgpack header, then raw array buffers.

Nothing here is pickled, and a message names no code: a request is known by its tag in `REQUESTS` or is refused.
Each request has exactly one reply type, given in its docstring and in `REPLIES`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, dataclass_transform

import msgspec
import numpy as np

from aoffpolicy.errors import ProtocolError
from aoffpolicy.samples import Prompt, SampleGroup

PROTOCOL = 1
"""Version of this wire format; peers with another one are refused."""

Frame = bytes | memoryview


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(msgspec.field,))
class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of requests and replies; the tag on the wire is the class name."""


class Done(Message):
    """The reply of a request that has nothing to say but that it is done."""


# --- Start and stop ------------------------------------------------------------------------------------------------


class Start(Message):
    """Build the model, engine or reward; reply `Started`. The configuration came with the process."""

    resume_from: str = ""
    """Checkpoint folder that trainer ranks load; empty for a fresh start."""


class Started(Message):
    shard: int = 0
    """Data shard of a trainer rank; ranks of one tensor- or pipeline-parallel group share one."""
    shards: int = 1
    capacity: int = 0
    """Groups that a rollout or reward worker takes at once; the controller never has more in flight there."""
    scheduler_state: bytes = b""
    """What `SaveCheckpoint` stored with the checkpoint resumed from; rank 0 only."""
    context_length: int = 0
    """Tokens (prompt and completion) that a rollout worker's model can hold."""


class Stop(Message):
    """Finish, release everything and exit 0 after the reply `Done`."""


# --- Training ------------------------------------------------------------------------------------------------------


class Train(Message):
    """Train one step on this rank's shard; idempotent by step; reply `Trained`. Sent to all ranks at once."""

    step: int
    groups: tuple[SampleGroup, ...]
    """This shard's groups; may be empty when there are fewer groups than shards."""
    advantages: tuple[np.ndarray, ...]
    """float32 [N] for each group, one for each trained token, computed over the global batch."""
    temperature: float
    version: int = 0
    """Policy version that is trained."""


class Trained(Message):
    metrics: dict[str, float]
    """Of the global batch, the same on every rank."""


class ScoreReference(Message):
    """Score this rank's shard with the initial model; reply `ReferenceScored`. Sent to all ranks at once."""

    groups: tuple[SampleGroup, ...]
    temperature: float


class ReferenceScored(Message):
    logprobs: tuple[np.ndarray, ...]
    """float32 [N] for each group, one for each trained token."""


class SaveCheckpoint(Message):
    """Write model, optimizer, schedule, random states and `scheduler_state` into `path` atomically; reply `Done`.

    Sent to all ranks at once. The folder appears whole or not at all.
    """

    path: str
    step: int
    """Steps trained, which is also the step that comes next."""
    scheduler_state: bytes


# --- Generating and scoring ----------------------------------------------------------------------------------------


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    n: int
    max_tokens: int
    temperature: float
    """0 is greedy."""
    seed: int
    """Of the run; the engine derives one for each (seed, prompt uid, completion)."""


class Generate(Message):
    """Sample one group under the loaded weights; reply `Generated` as soon as this group is finished."""

    prompt: Prompt
    sampling: Sampling


class Generated(Message):
    group: SampleGroup
    """Not scored yet."""


class Score(Message):
    """Score the completions of one prompt; reply `Scored`."""

    row: Mapping[str, Any]
    completions: tuple[str, ...]


class Scored(Message):
    rewards: tuple[float | None, ...]
    """Finite, or None where scoring failed (NaN, None, exception, hang)."""
    errors: tuple[str, ...]
    """One for each None, in order: what went wrong."""


# --- Rendezvous and weights ----------------------------------------------------------------------------------------


class Prepare(Message):
    """Get ready to form the weight group of this term (allocate, check, drop an older group); reply `Ready`."""

    term: int


class Ready(Message):
    term: int
    backend: str
    hold: tuple[TensorSpec, ...] = ()
    """What a sending trainer rank will send, in order; empty from receivers."""
    accepts: tuple[TensorSpec, ...] = ()
    """What a receiver's model needs in full; empty from senders."""
    ranks: int = 1
    """Ranks of the group that a receiver brings: one for each worker of a tensor-parallel engine."""


class TensorSpec(msgspec.Struct, frozen=True):
    """One weight under its Hugging Face name, in the dtype it travels in."""

    name: str
    dtype: str
    """As torch prints it without the prefix: float32, bfloat16, ..."""
    shape: tuple[int, ...]


class Join(Message):
    """Form the group now: both sides at once; includes the warm-up collective; reply `Joined`."""

    term: int
    rank: int
    """The first rank of a receiver that brings several."""
    members: tuple[str, ...]
    """Role and rank ("rollout 1") of every rank of the group, for error messages; the length is the group's size."""
    store_host: str
    """Bare address, without brackets."""
    store_port: int
    prefix: str
    """Unguessable, and another one in every term."""
    interface: str
    """Bare address that this member's collective binds."""
    manifest: Sequence[TensorSpec]
    """Every tensor in the order sent; both sides cut it into the same buckets."""
    bucket_bytes: int
    timeout_s: float
    """Shorter than the deadline of the request itself."""


class Joined(Message):
    term: int
    manifest_digest: str


class Abort(Message):
    """Leave the group of this term, also in the middle of a collective; reply `Done` once the member is at rest."""

    term: int
    reason: str


class SendWeights(Message):
    """Broadcast the current weights to the group as this version; reply `WeightsSent`. To all trainer ranks."""

    term: int
    version: int
    timeout_s: float


class WeightsSent(Message):
    term: int
    version: int
    digest: str
    """Hex xxh3-128 over every bucket sent, in order; empty from ranks that only helped to gather."""
    bytes: int
    seconds: float


class ReceiveWeights(Message):
    """Receive all buckets, load them, set the version; reply `WeightsReceived`. To all rollout workers."""

    term: int
    version: int
    timeout_s: float


class WeightsReceived(Message):
    term: int
    version: int
    digest: str
    bytes: int
    seconds: float
    """From the first bucket to loaded."""
    loaded: int
    """Tensors loaded; equals the length of the manifest."""


REPLIES: dict[type[Message], type[Message]] = {
    Start: Started,
    Stop: Done,
    Train: Trained,
    ScoreReference: ReferenceScored,
    SaveCheckpoint: Done,
    Generate: Generated,
    Score: Scored,
    Prepare: Ready,
    Join: Joined,
    Abort: Done,
    SendWeights: WeightsSent,
    ReceiveWeights: WeightsReceived,
}
"""Reply type of every request."""
REQUESTS: dict[str, type[Message]] = {request.__name__: request for request in REPLIES}


# --- Frames --------------------------------------------------------------------------------------------------------

M = TypeVar("M")


def encode(message: Any) -> list[Frame]:
    """Turn a message into frames; array memory is not copied where it is contiguous.

    Returns:
        The msgpack header, then one frame for each array, in the order met.
    """
    buffers: list[Frame] = []

    def hook(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            array = np.ascontiguousarray(value)
            buffers.append(array.reshape(-1).view(np.uint8).data)
            return (array.dtype.str, value.shape, len(buffers) - 1)
        if isinstance(value, np.generic):
            return value.item()
        raise TypeError(f"cannot send a {type(value).__name__}")

    header = msgspec.msgpack.encode(message, enc_hook=hook)
    return [header, *buffers]


def decode(frames: Sequence[Frame], kind: type[M]) -> M:
    """Turn frames back into a message of type `kind`; arrays are read-only views of the frames.

    Raises:
        ProtocolError: The frames are not a message of this type.
    """
    buffers = frames[1:]

    def hook(expected: type, value: Any) -> Any:
        if expected is not np.ndarray:
            raise TypeError(f"unexpected field type {expected!r}")
        dtype, shape, index = value
        kind_of = np.dtype(str(dtype))
        if kind_of.kind not in "biufc" or min(shape, default=0) < 0:
            raise ValueError(f"not an array of numbers: {dtype} {shape}")
        return np.frombuffer(buffers[index], dtype=kind_of).reshape(shape)

    try:
        return msgspec.msgpack.decode(frames[0], type=kind, dec_hook=hook)
    except (msgspec.MsgspecError, ValueError, TypeError, IndexError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"not a {getattr(kind, '__name__', kind)}: {error}") from error


def pack(message: Any) -> bytes:
    """One self-contained byte string of a message: what checkpoints store."""
    return msgspec.msgpack.encode([bytes(frame) for frame in encode(message)])


def unpack(data: bytes, kind: type[M]) -> M:
    """The message that `pack` made.

    Raises:
        ProtocolError: The bytes are not a packed message of this type.
    """
    try:
        frames = msgspec.msgpack.decode(data, type=list[bytes])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(f"not a packed message: {error}") from error
    return decode(frames, kind)
