"""The status stream's events, schema 1, and how they travel; `docs/status.md` has it field by field.

For subscribers in any language: a ZeroMQ XPUB socket sends two frames, a topic and a msgpack map. Live events have the
topic `event/<kind>`. A newcomer subscribes to `event/` and then to `replay/<something unique>`; on that topic, seen by
nobody else, it gets the last values (`last_value_key`) with `replay` true, the oldest first, and at the end an empty
second frame. An event that comes both live and replayed has the same `seq`.
"""

from __future__ import annotations

from typing import Literal, dataclass_transform

import msgspec

from aoffpolicy.errors import ProtocolError

SCHEMA = 1
"""Version of the events; a reader refuses others."""
HISTORY_STEPS = 64
"""Steps whose events a newcomer gets."""
LIVE = b"event/"
REPLAY = b"replay/"

Metric = float | int | bool | str | None


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(msgspec.field,))
class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Base of all events; the publisher fills in these fields."""

    schema: int = SCHEMA
    seq: int = 0
    """1, 2, ... in the order published."""
    time: float = 0.0
    """Unix time in seconds."""
    run_id: str = ""
    replay: bool = False
    """A last value sent to a newcomer, not news."""


class RunEvent(Event, tag="run"):
    """The run as a whole."""

    name: str
    state: str
    """"starting", "running", "finished", "failed", "interrupted"."""
    steps: int
    """Training steps planned."""
    run_dir: str


class StepEvent(Event, tag="step"):
    """A training step was recorded."""

    step: int
    metrics: dict[str, Metric]
    """The step's row of metrics.jsonl."""


class PhaseEvent(Event, tag="phase"):
    """A phase of a step (generate, train, send, load, eval, checkpoint) begins or ends."""

    name: str
    step: int
    version: int
    """Policy version that the phase works with or makes."""
    state: Literal["begin", "end"]
    seconds: float = 0.0
    """Duration; 0 at the begin."""


class WorkerEvent(Event, tag="worker"):
    """A worker changed its state."""

    role: str
    rank: int
    state: str
    """"starting", "ready", "busy", "stopped", "lost"."""
    host: str = ""
    pid: int = 0
    device: str = ""
    detail: str = ""
    """For instance its last progress line."""
    version: int = -1
    """Policy version that a rollout worker generates under; -1 before the first, and for other roles."""
    load: int = 0
    """Requests in flight: groups for rollout and reward workers, 1 for a trainer rank that trains."""
    tokens_per_s: float = 0.0
    """Completion tokens a second of a rollout worker, over its newest busy time and the groups that came out of it."""
    memory_bytes: int = 0
    """Resident memory of the process; 0 where it is not on the launcher's machine."""


class FaultEvent(Event, tag="fault"):
    """A worker was lost, and the run goes on."""

    role: str
    rank: int
    cause: str
    groups: int
    """Groups that it was generating; they go to others."""
    restart_in_s: float | None
    """When it is started again; null: not any more."""


class ErrorEvent(Event, tag="error"):
    """Something failed."""

    role: str
    rank: int
    cause: str


AnyEvent = RunEvent | StepEvent | PhaseEvent | WorkerEvent | FaultEvent | ErrorEvent
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyEvent] = msgspec.msgpack.Decoder(AnyEvent)


class _Header(msgspec.Struct):
    schema: int


_header = msgspec.msgpack.Decoder(_Header)


def encode_event(event: AnyEvent) -> bytes:
    return _encoder.encode(event)


def decode_event(data: bytes) -> AnyEvent:
    """An event from its bytes, validated.

    Raises:
        ProtocolError: It is no event of this schema.
    """
    try:
        schema = _header.decode(data).schema
        if schema != SCHEMA:
            raise ProtocolError(
                f"the event has schema {schema} and this reads schema {SCHEMA}; use the run's own version"
            )
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not a status event: {error}") from error


def last_value_key(event: AnyEvent) -> tuple[str | int, ...]:
    """Of all events with the same key, a newcomer gets the newest: the run; each worker, its last fault and its last
    error; and of the last `HISTORY_STEPS` steps each step and each phase, so that it can draw what it did not see."""
    match event:
        case WorkerEvent() | FaultEvent() | ErrorEvent():
            return (kind_of(event), event.role, event.rank)
        case StepEvent():
            return (kind_of(event), event.step % HISTORY_STEPS)
        case PhaseEvent():
            return (kind_of(event), event.name, event.step % HISTORY_STEPS)
        case RunEvent():
            return (kind_of(event),)


def kind_of(event: AnyEvent) -> str:
    """ "run", "step", "phase", "worker", "fault" or "error"."""
    return str(event.__struct_config__.tag)
