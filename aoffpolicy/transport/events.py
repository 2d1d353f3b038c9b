"""The status stream's public names: versioned events from one publisher to any number of readers.

Read `event_schema` for what travels, `publisher` and `subscriber` for the two ends, `status_files` for what a run
folder holds about it.
"""

from __future__ import annotations

from aoffpolicy.transport.event_schema import (
    AnyEvent,
    ErrorEvent,
    Event,
    FaultEvent,
    PhaseEvent,
    RunEvent,
    StepEvent,
    WorkerEvent,
    kind_of,
)
from aoffpolicy.transport.publisher import StatusPublisher
from aoffpolicy.transport.status_files import subscriber_for, write_status_files
from aoffpolicy.transport.subscriber import StatusSubscriber

__all__ = [
    "AnyEvent",
    "ErrorEvent",
    "Event",
    "FaultEvent",
    "PhaseEvent",
    "RunEvent",
    "StatusPublisher",
    "StatusSubscriber",
    "StepEvent",
    "WorkerEvent",
    "kind_of",
    "subscriber_for",
    "write_status_files",
]
