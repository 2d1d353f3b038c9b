from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from aoffpolicy.errors import ProtocolError
from aoffpolicy.samples import Prompt, Sample, SampleGroup
from aoffpolicy.transport.messages import (
    REPLIES,
    REQUESTS,
    Done,
    Generated,
    Message,
    Prepare,
    Score,
    Stop,
    Train,
    decode,
    encode,
    pack,
    unpack,
)

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
rows = st.dictionaries(st.text(max_size=8), plain, max_size=3)


def arrays(dtype: Any, size: int) -> st.SearchStrategy[np.ndarray]:
    return npst.arrays(dtype, size)


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    size = draw(st.integers(0, 12))
    return Sample(
        token_ids_T=draw(arrays(np.int32, size)),
        loss_mask_T=draw(arrays(np.bool_, size)),
        behaviour_logprobs_T=draw(arrays(np.float32, size)),
        versions_T=draw(arrays(np.int32, size)),
        text=draw(st.text(max_size=20)),
        finish_reason=draw(st.sampled_from(["stop", "length"])),
        reward=draw(st.floats(allow_nan=False)),
        metadata=draw(rows),
    )


@st.composite
def groups(draw: st.DrawFn) -> SampleGroup:
    prompt = Prompt(draw(st.integers(0, 2**40)), draw(arrays(np.int32, draw(st.integers(0, 8)))), draw(rows))
    return SampleGroup(prompt, tuple(draw(st.lists(samples(), max_size=4))), draw(rows))


def assert_same(left: Any, right: Any) -> None:
    """Equal in every field, arrays also in dtype and shape, NaN equal to NaN."""
    assert type(left) is type(right)
    if isinstance(left, np.ndarray):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        np.testing.assert_array_equal(left, right)
    elif isinstance(left, Message | Prompt | Sample | SampleGroup):
        names = left.__struct_fields__ if isinstance(left, Message) else left.__slots__
        for name in names:
            assert_same(getattr(left, name), getattr(right, name))
    elif isinstance(left, tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    else:
        assert left == right


@settings(deadline=None, max_examples=150)
@given(groups())
def test_a_group_comes_back_as_it_was_sent(group: SampleGroup) -> None:
    message = Generated(group=group)
    frames = [bytes(frame) for frame in encode(message)]
    assert len(frames) == 2 + 4 * len(group.samples)
    assert_same(decode(frames, Generated), message)
    assert_same(unpack(pack(message), Generated), message)


@settings(deadline=None)
@given(
    npst.arrays(st.sampled_from([np.int64, np.float16, np.float64, np.uint8, np.bool_]), npst.array_shapes(min_dims=0))
)
def test_arrays_of_any_shape_and_dtype_come_back(array: np.ndarray) -> None:
    message = Train(step=0, groups=(), advantages=(array,), temperature=1.0)
    assert_same(decode(encode(message), Train), message)


def test_a_strided_array_is_sent_in_order() -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4).T
    (back,) = decode(encode(Train(step=0, groups=(), advantages=(array,), temperature=1.0)), Train).advantages
    np.testing.assert_array_equal(back, array)


def test_arrays_are_not_copied_and_arrive_read_only() -> None:
    array = np.arange(1000, dtype=np.float32)
    message = Train(step=0, groups=(), advantages=(array,), temperature=1.0)
    assert np.shares_memory(np.frombuffer(encode(message)[1], np.float32), array)
    frames = [bytes(frame) for frame in encode(message)]
    (back,) = decode(frames, Train).advantages
    assert np.shares_memory(back, np.frombuffer(frames[1], np.float32))
    assert not back.flags.writeable


def test_every_request_has_a_reply_type_and_is_known_by_its_name() -> None:
    assert set(REQUESTS.values()) == set(REPLIES)
    for name, request in REQUESTS.items():
        assert name == request.__name__ == request.__struct_config__.tag


def test_another_message_is_not_taken_for_the_expected_one() -> None:
    with pytest.raises(ProtocolError, match="not a Done"):
        decode(encode(Stop()), Done)


def test_a_missing_buffer_is_a_protocol_error() -> None:
    frames = encode(Train(step=0, groups=(), advantages=(np.zeros(3, np.float32),), temperature=1.0))
    with pytest.raises(ProtocolError, match="not a Train"):
        decode(frames[:1], Train)


@pytest.mark.parametrize(
    "reference",
    [
        ["|O", [1], 0],
        ["O,O", [1], 0],
        ["<f4", [3], 0],
        ["<f4", [-7], 0],
        ["V8", [1], 0],
        ["M8[s]", [1], 0],
        ["<f4", [2**63], 0],
        ["<f4", [2**62, 4], 0],
        ["<f4", [1], 7],
        ["<f4", [1], "0"],
        ["(", [1], 0],
        ["no such type", [1], 0],
        [None, None, None],
        ["<f4", 3],
        "text",
        None,
        7,
    ],
)
def test_a_hostile_array_reference_is_a_protocol_error(reference: Any) -> None:
    fields = {"type": "Train", "step": 0, "groups": [], "temperature": 1.0, "advantages": [reference]}
    with pytest.raises(ProtocolError):
        decode([msgspec.msgpack.encode(fields), b"\0" * 8], Train)


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=200), st.lists(st.binary(max_size=16), max_size=2))
def test_garbage_is_a_protocol_error_and_nothing_else(header: bytes, buffers: list[bytes]) -> None:
    for kind in (Train, Generated, Score):
        with pytest.raises(ProtocolError):
            decode([header, *buffers], kind)
    with pytest.raises(ProtocolError):
        unpack(header, Train)


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_a_damaged_header_is_decoded_or_refused(data: st.DataObject) -> None:
    frames = [bytes(f) for f in encode(Train(step=3, groups=(), advantages=(np.ones(2, np.float32),), temperature=1.0))]
    header = bytearray(frames[0])
    position = data.draw(st.integers(0, len(header) - 1))
    header[position] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ProtocolError):
        assert isinstance(decode([bytes(header), *frames[1:]], Train), Train)


def test_deep_nesting_is_a_protocol_error() -> None:
    bomb = b"\x91" * 200_000 + b"\xc0"
    with pytest.raises(ProtocolError):
        decode([b"\x83\xa4type\xa5Score\xabcompletions\x90\xa3row\x81\xa1a" + bomb], Score)


def test_what_cannot_be_sent_is_refused_at_the_sender() -> None:
    with pytest.raises(TypeError, match="cannot send a object"):
        encode(Score(row={"a": object()}, completions=()))


def test_numpy_scalars_travel_as_plain_numbers() -> None:
    row = {"a": np.float32(0.5), "b": np.int64(3), "c": np.bool_(True)}
    assert decode(encode(Score(row=row, completions=())), Score).row == {"a": 0.5, "b": 3, "c": True}


def test_messages_are_immutable() -> None:
    with pytest.raises(AttributeError):
        Prepare(term=1).term = 2  # type: ignore[misc]
