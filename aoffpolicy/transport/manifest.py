"""The manifest: which bytes of which tensor lie in which bucket. Both sides derive every cut from it alone.

The tensors lie one after another in a stream of bytes, each at a multiple of `ALIGNMENT`; the stream is cut every
`bucket_bytes`. So a cut never depends on local memory, a large tensor lies in several buckets, and the last bucket is
only as long as what it holds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import torch

from aoffpolicy.errors import WeightSyncError
from aoffpolicy.transport.messages import TensorSpec

Named = tuple[str, torch.Tensor]

ALIGNMENT = 32
"""Bytes; any dtype may be viewed at such an offset, and vector units read it without penalty."""
DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


@dataclass(frozen=True, slots=True)
class Place:
    """Where one tensor lies in the stream."""

    spec: TensorSpec
    dtype: torch.dtype
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Piece:
    """The bytes of one tensor that lie in one bucket."""

    bucket: int
    begin: int
    """First byte within the bucket."""
    end: int
    at: int
    """First byte within the tensor."""


def specs_of(tensors: Iterable[Named], dtype: torch.dtype | None = None) -> tuple[TensorSpec, ...]:
    """Describe tensors as they will travel.

    Args:
        tensors: (name, tensor) in the order sent.
        dtype: What floating-point tensors are converted to; unset: every tensor keeps its own.
    """
    return tuple(
        TensorSpec(name=name, dtype=_travelling_dtype(tensor, dtype), shape=tuple(tensor.shape))
        for name, tensor in tensors
    )


def difference(sent: Sequence[TensorSpec], accepted: Sequence[TensorSpec]) -> str | None:
    """The first tensor on which sender and receiver disagree, in words; None where they agree. Order is free."""
    theirs = {spec.name: spec for spec in accepted}
    for spec in sent:
        other = theirs.pop(spec.name, None)
        if other is None:
            return f"tensor {spec.name} is sent but not accepted"
        if other != spec:
            return f"tensor {spec.name} is sent as {_form(spec)} but accepted as {_form(other)}"
    for name in theirs:
        return f"tensor {name} is accepted but not sent"
    return None


class Manifest:
    """Every tensor in the order sent, and the buckets that the whole is cut into.

    Args:
        specs: Every tensor in the order sent; names are unique.
        bucket_bytes: Bytes of one bucket at most, taken down to a multiple of `ALIGNMENT` (at least one).

    Raises:
        WeightSyncError: A name comes twice, a dtype is unknown or a size negative.
    """

    def __init__(self, specs: Sequence[TensorSpec], bucket_bytes: int) -> None:
        self.specs = tuple(specs)
        self.bucket_bytes = max(bucket_bytes // ALIGNMENT, 1) * ALIGNMENT
        self.places, self.total_bytes = _lay_out(self.specs)
        self.bucket_sizes = tuple(
            min(self.bucket_bytes, self.total_bytes - start) for start in range(0, self.total_bytes, self.bucket_bytes)
        )
        """Bytes of every bucket."""
        self.digest = hashlib.sha256(msgspec.msgpack.encode((self.bucket_bytes, self.specs))).hexdigest()

    def __len__(self) -> int:
        return len(self.specs)

    def pack(self, tensors: Iterable[Named], buffers: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Fill one bucket after another; the consumer sends it before asking for the one that reuses its buffer.

        Args:
            tensors: (name, tensor) in the manifest's order; any layout, dtype and device. Consumed to its end.
            buffers: uint8 [bucket_bytes or all there is], filled in turn.

        Yields:
            The filled part of a buffer, uint8 [size of the bucket], every padding byte 0.

        Raises:
            WeightSyncError: The tensors are not those of the manifest.
        """
        current = 0
        for place, tensor in self._matched(tensors):
            source = torch.empty(0)
            for piece in self.pieces(place):
                if piece.bucket > current:
                    yield buffers[current % len(buffers)][: self.bucket_sizes[current]]
                    current = piece.bucket
                bucket = buffers[current % len(buffers)]
                if piece.end - piece.begin == place.nbytes:
                    bucket[piece.begin : piece.end].view(place.dtype).view(place.spec.shape).copy_(tensor.detach())
                else:
                    source = source if piece.at else _as_bytes(tensor.detach().to(place.dtype))
                    bucket[piece.begin : piece.end].copy_(source[piece.at : piece.at + piece.end - piece.begin])
                bucket[piece.end : _aligned(piece.end)].zero_()
        if self.bucket_sizes:
            yield buffers[current % len(buffers)][: self.bucket_sizes[current]]

    def unpack(self, buckets: Iterable[torch.Tensor]) -> Iterator[Named]:
        """Yield every tensor as soon as its last byte is there.

        Args:
            buckets: uint8 [size of the bucket], in order; taken only when the next tensor needs one.

        Yields:
            (name, tensor), a view of its bucket where it lies in one, otherwise in memory of its own.
        """
        incoming = iter(buckets)
        current, bucket = -1, torch.empty(0, dtype=torch.uint8)
        for place in self.places:
            flat = bucket[:0]
            for piece in self.pieces(place):
                if piece.bucket > current:
                    current, bucket = piece.bucket, next(incoming)
                part = bucket[piece.begin : piece.end]
                if len(part) == place.nbytes:
                    flat = part
                else:
                    flat = flat if piece.at else torch.empty(place.nbytes, dtype=torch.uint8, device=bucket.device)
                    flat[piece.at : piece.at + len(part)].copy_(part)
            yield place.spec.name, _from_bytes(flat, place)

    def pieces(self, place: Place) -> Iterator[Piece]:
        """The parts of one tensor, bucket by bucket; none for a tensor without elements."""
        at = 0
        while at < place.nbytes:
            bucket, begin = divmod(place.offset + at, self.bucket_bytes)
            size = min(place.nbytes - at, self.bucket_bytes - begin)
            yield Piece(bucket=bucket, begin=begin, end=begin + size, at=at)
            at += size

    def _matched(self, tensors: Iterable[Named]) -> Iterator[tuple[Place, torch.Tensor]]:
        iterator = iter(tensors)
        for place in self.places:
            gathered = next(iterator, None)
            if gathered is None:
                raise WeightSyncError(f"tensor {place.spec.name}: the sender's weights ended before it")
            name, tensor = gathered
            if (name, tuple(tensor.shape)) != (place.spec.name, place.spec.shape):
                raise WeightSyncError(
                    f"tensor {place.spec.name} {list(place.spec.shape)}: "
                    f"the sender gathered {name} {list(tensor.shape)} in its place"
                )
            yield place, tensor
        for name, _ in iterator:
            raise WeightSyncError(f"tensor {name}: gathered by the sender but not in the manifest")


def _lay_out(specs: Sequence[TensorSpec]) -> tuple[tuple[Place, ...], int]:
    places, names, offset = [], set(), 0
    for spec in specs:
        dtype = DTYPES.get(spec.dtype)
        if dtype is None or min(spec.shape, default=0) < 0 or spec.name in names:
            raise WeightSyncError(f"tensor {spec.name}: twice in the manifest, or not a tensor: {_form(spec)}")
        names.add(spec.name)
        nbytes = dtype.itemsize
        for size in spec.shape:
            nbytes *= size
        places.append(Place(spec=spec, dtype=dtype, offset=offset, nbytes=nbytes))
        offset = _aligned(offset + nbytes)
    return tuple(places), offset


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _from_bytes(flat: torch.Tensor, place: Place) -> torch.Tensor:
    if place.nbytes == 0:
        return torch.empty(place.spec.shape, dtype=place.dtype, device=flat.device)
    return flat.view(place.dtype).view(place.spec.shape)


def _travelling_dtype(tensor: torch.Tensor, dtype: torch.dtype | None) -> str:
    chosen = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return str(chosen).removeprefix("torch.")


def _form(spec: TensorSpec) -> str:
    return f"{spec.dtype} {list(spec.shape)}"
