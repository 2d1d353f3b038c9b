from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aoffpolicy.errors import WeightSyncError
from aoffpolicy.transport.manifest import ALIGNMENT, Manifest, Named, difference, specs_of
from aoffpolicy.transport.messages import TensorSpec

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]


def random_tensor(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    if dtype is torch.bool:
        raw = raw % 2
    return raw.view(dtype).reshape(tuple(shape))


def transfer(manifest: Manifest, tensors: Sequence[Named]) -> list[Named]:
    """What a receiver gets: each bucket is copied at once, as its buffer is filled again later."""
    size = max(manifest.bucket_sizes, default=0)
    dirty = [torch.full((size,), 0xAB, dtype=torch.uint8) for _ in range(2)]
    return list(manifest.unpack(bucket.clone() for bucket in manifest.pack(tensors, dirty)))


def assert_same_bits(got: Sequence[Named], expected: Sequence[Named]) -> None:
    assert [name for name, _ in got] == [name for name, _ in expected]
    for (name, tensor), (_, other) in zip(got, expected, strict=True):
        assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape), name
        assert tensor.contiguous().view(-1).view(torch.uint8).equal(other.contiguous().view(-1).view(torch.uint8)), name


@given(
    forms=st.lists(
        st.tuples(st.lists(st.integers(0, 7), max_size=3), st.sampled_from(DTYPES), st.booleans()), max_size=12
    ),
    bucket_bytes=st.integers(1, 700),
)
@settings(max_examples=150, deadline=None)
def test_any_tensors_in_any_bucket_size_arrive_bit_for_bit(
    forms: list[tuple[list[int], torch.dtype, bool]], bucket_bytes: int
) -> None:
    tensors = []
    for index, (shape, dtype, transposed) in enumerate(forms):
        tensor = random_tensor(shape, dtype, index)
        tensors.append((f"t{index}", tensor.permute(tuple(reversed(range(tensor.dim())))) if transposed else tensor))
    manifest = Manifest(specs_of(tensors), bucket_bytes)
    assert_same_bits(transfer(manifest, tensors), tensors)
    assert sum(manifest.bucket_sizes) == manifest.total_bytes
    assert all(place.offset % ALIGNMENT == 0 for place in manifest.places)


def test_a_tensor_larger_than_a_bucket_is_cut_and_the_last_bucket_holds_only_what_is_left() -> None:
    tensors = [("small", torch.arange(3.0)), ("large", torch.arange(100.0))]
    manifest = Manifest(specs_of(tensors), 128)
    assert manifest.bucket_sizes == (128, 128, 128, 64)  # 32 bytes for the small one, 416 for the large one
    assert_same_bits(transfer(manifest, tensors), tensors)


def test_padding_bytes_are_zero_so_that_digests_compare() -> None:
    manifest = Manifest(
        specs_of([("a", torch.ones(3, dtype=torch.uint8)), ("b", torch.ones(1, dtype=torch.uint8))]), 64
    )
    dirty = [torch.full((64,), 0xAB, dtype=torch.uint8)]
    tensors = [("a", torch.ones(3, dtype=torch.uint8)), ("b", torch.ones(1, dtype=torch.uint8))]
    (bucket,) = manifest.pack(tensors, dirty)
    assert bucket.sum() == 4


def test_the_sender_converts_to_the_dtype_that_travels_but_leaves_integers_alone() -> None:
    tensors = [("w", torch.randn(5, 3, requires_grad=True)), ("steps", torch.tensor(7)), ("big", torch.randn(64))]
    manifest = Manifest(specs_of(tensors, torch.bfloat16), 64)
    assert [spec.dtype for spec in manifest.specs] == ["bfloat16", "int64", "bfloat16"]
    got = dict(transfer(manifest, tensors))
    assert got["w"].equal(tensors[0][1].detach().bfloat16())
    assert got["big"].equal(tensors[2][1].bfloat16())
    assert got["steps"].item() == 7 and not got["w"].requires_grad


def test_both_sides_of_the_wire_compute_the_same_digest_and_any_difference_changes_it() -> None:
    specs = (TensorSpec("a", "float32", (2, 3)), TensorSpec("b", "bfloat16", ()))
    same = Manifest([TensorSpec("a", "float32", (2, 3)), TensorSpec("b", "bfloat16", ())], 1024)
    digest = Manifest(specs, 1024).digest
    assert same.digest == digest
    others = [
        Manifest(specs, 2048),
        Manifest(specs[::-1], 1024),
        Manifest((TensorSpec("a", "float32", (3, 2)), specs[1]), 1024),
        Manifest((specs[0], TensorSpec("b", "float16", ())), 1024),
        Manifest((specs[0], TensorSpec("c", "bfloat16", ())), 1024),
    ]
    assert len({digest, *(other.digest for other in others)}) == 6


@pytest.mark.parametrize(
    ("gathered", "message"),
    [
        ([("a", torch.zeros(2))], "tensor b: the sender's weights ended before it"),
        ([("b", torch.zeros(3)), ("a", torch.zeros(2))], r"tensor a \[2\]: the sender gathered b \[3\] in its place"),
        ([("a", torch.zeros(3)), ("b", torch.zeros(3))], r"tensor a \[2\]: the sender gathered a \[3\] in its place"),
        ([("a", torch.zeros(2)), ("b", torch.zeros(3)), ("c", torch.zeros(1))], "tensor c: gathered by the sender but"),
    ],
)
def test_gathering_something_else_than_the_manifest_says_is_an_error_naming_the_tensor(
    gathered: list[Named], message: str
) -> None:
    manifest = Manifest((TensorSpec("a", "float32", (2,)), TensorSpec("b", "float32", (3,))), 1024)
    with pytest.raises(WeightSyncError, match=message):
        transfer(manifest, gathered)


@pytest.mark.parametrize(
    "specs",
    [
        (TensorSpec("a", "float32", (2,)), TensorSpec("a", "float32", (2,))),
        (TensorSpec("a", "save", (2,)),),
        (TensorSpec("a", "float32", (-2,)),),
    ],
)
def test_a_manifest_refuses_twice_the_same_name_an_unknown_dtype_and_a_negative_size(
    specs: tuple[TensorSpec, ...],
) -> None:
    with pytest.raises(WeightSyncError, match="tensor a: "):
        Manifest(specs, 1024)


def test_difference_names_the_first_tensor_that_is_missing_extra_or_of_another_form() -> None:
    a, b = TensorSpec("a", "float32", (2,)), TensorSpec("b", "float32", (3,))
    assert difference([a, b], [b, a]) is None
    assert difference([a, b], [a]) == "tensor b is sent but not accepted"
    assert difference([a], [a, b]) == "tensor b is accepted but not sent"
    other = TensorSpec("a", "bfloat16", (2, 1))
    assert difference([a], [other]) == "tensor a is sent as float32 [2] but accepted as bfloat16 [2, 1]"
