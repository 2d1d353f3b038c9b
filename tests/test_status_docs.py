"""docs/status.md says what the stream sends, field by field."""

from __future__ import annotations

import re
import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aoffpolicy.transport import event_schema
from aoffpolicy.transport.event_schema import AnyEvent, Event

PAGE = Path(__file__).parent.parent / "docs" / "status.md"
WORDS: dict[Any, str] = {str: "text", int: "integer", float: "number", bool: "boolean", float | None: "number or null"}


def documented() -> dict[str, dict[str, str]]:
    """Field to type, by section."""
    schema = PAGE.read_text().split(f"## The stream, schema {event_schema.SCHEMA}\n")[1]
    sections = re.split(r"^### (.*)\n", schema, flags=re.MULTILINE)[1:]
    return {
        title: dict(re.findall(r"^\| (\w+) \| ([^|]*?) \|", body, flags=re.MULTILINE)[1:])
        for title, body in zip(sections[::2], sections[1::2], strict=True)
    }


def word(annotation: Any) -> str:
    if typing.get_origin(annotation) is typing.Literal:
        return " or ".join(typing.get_args(annotation))
    return "map" if typing.get_origin(annotation) is dict else WORDS[annotation]


def fields(event: type[Event]) -> dict[str, str]:
    hints = typing.get_type_hints(event, include_extras=True)
    return {name: word(hints[name]) for name in event.__struct_fields__}


def test_the_page_lists_exactly_the_kinds_of_events() -> None:
    kinds = {event.__struct_config__.tag for event in typing.get_args(AnyEvent)}
    assert set(documented()) == {"every event", *kinds}


@pytest.mark.parametrize("event", typing.get_args(AnyEvent), ids=lambda event: event.__struct_config__.tag)
def test_a_kinds_fields_and_types_are_those_of_the_schema(event: type[Event]) -> None:
    common = fields(Event)
    own = {name: type_ for name, type_ in fields(event).items() if name not in common}
    assert documented()[str(event.__struct_config__.tag)] == own


def test_the_common_fields_are_those_on_the_wire() -> None:
    assert documented()["every event"] == {"kind": "text", **fields(Event)}
    sent = msgspec.msgpack.decode(event_schema.encode_event(event_schema.ErrorEvent(role="r", rank=0, cause="c")))
    assert set(sent) == {"kind", *fields(Event), "role", "rank", "cause"}


def test_the_page_says_how_many_steps_a_newcomer_gets() -> None:
    assert f"the last {event_schema.HISTORY_STEPS} steps" in " ".join(PAGE.read_text().split())
