"""Encode and decode messages: a fixed prefix, a msgpack header, then raw padded buffers. No pickle.

    magic "SSFL" | protocol u32 | header length u32 | 0 u32               little-endian
    msgpack [kind, {field: value}, [[tensor, dtype, shape, codec], ...]]  names sorted
    every part of every tensor, little-endian

Header and parts are each padded with zeros to 16 bytes. A frame has one encoding: `decode` packs
what it understood of the header again and refuses any other bytes, so duplicate keys, long-form
integers, padding and trailing bytes cannot hide anything. The receiver says beforehand what it
expects; nothing about a tensor is believed from the frame.

There is no checksum. TLS authenticates every record, so bytes that arrive are the bytes that were
sent. A sender who lies would send a checksum that fits. A CRC over the buffers was nearly half of what
a frame cost the server. Values that broken memory makes absurd are refused where every value is
checked (`semisfl.net.server.value_checks`).
"""

import math
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor

from semisfl.fleet.codec import Codec, codec_for
from semisfl.net.headers import MAX_HEADER, MAX_ITEMS, Entry, WireError, listed, pack, short, unpack
from semisfl.settings.catalog import CODECS

if sys.byteorder != "little":
    raise ImportError("semisfl.net.frames needs a little-endian machine: buffers cross as they are")

PROTOCOL = 3
MAGIC = b"SSFL"
PREFIX = struct.Struct("<4sIII")
ALIGNMENT = 16

DTYPES = {
    dtype: str(dtype).removeprefix("torch.")
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


@dataclass(frozen=True)
class TensorSpec:
    """Describe a tensor as the receiver will hold it, and the codec it crosses in."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    codec: str = "fp32"

    @cached_property
    def how(self) -> Codec:
        """Return the codec in use: integers cross raw, whatever ``codec`` names."""
        return codec_for(self.codec, self.dtype)

    def described(self, name: str) -> Entry:
        """Return the tensor's entry in the header."""
        return [name, DTYPES[self.dtype], list(self.shape), self.how.name]


@dataclass(frozen=True)
class Schema:
    """Describe one kind of frame: exactly these fields and exactly these tensors."""

    fields: Mapping[str, type] = field(default_factory=dict)
    tensors: Mapping[str, TensorSpec] | None = None
    max_bytes: int | None = None  # of the whole frame, if less than its tensors and any header

    @cached_property
    def specs(self) -> dict[str, TensorSpec]:
        """Return the tensors in the order in which they cross."""
        return dict(sorted((self.tensors or {}).items()))

    @cached_property
    def table(self) -> list[Entry]:
        return [spec.described(name) for name, spec in self.specs.items()]

    @cached_property
    def buffers(self) -> int:
        """Return the bytes of all buffers with their padding."""
        return sum(
            _padded(math.prod(shape) * dtype.itemsize)
            for spec in self.specs.values()
            for shape, dtype in spec.how.layout(spec.shape)
        )

    @cached_property
    def limit(self) -> int:
        """Return the most bytes a frame of this kind may have, which bounds the receiver's memory."""
        most = PREFIX.size + MAX_HEADER + self.buffers
        return most if self.max_bytes is None else min(most, self.max_bytes)

    def size(self, kind: str) -> int:
        """Return the bytes of a frame of this kind, which has no fields."""
        return PREFIX.size + _padded(len(pack(kind, {}, self.table))) + self.buffers

    @cached_property
    def held(self) -> int:
        """Return the most bytes that a receiver holds of a frame: as it arrives, or its tensors decoded."""
        specs = self.specs.values()
        decoded = sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs)
        return max(self.limit, decoded)


@dataclass(frozen=True, eq=False)
class Frame:
    """Hold a message that was checked against its schema; its tensors are on the CPU."""

    kind: str
    fields: dict[str, Any]
    tensors: dict[str, Tensor]


def payload_bytes(schema: Schema) -> int:
    """Return the bytes of tensors that cross, as traffic counts them: no header, no padding."""
    return sum(spec.how.size(spec.shape) for spec in schema.specs.values())


def encode(
    kind: str,
    fields: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    codecs: Mapping[str, str] | str = "fp32",
) -> list[bytes | memoryview]:
    """Return the frame in pieces, to be joined or sent one by one.

    Pieces are views of the tensors where nothing had to be converted: send or join them before
    the tensors change.
    """
    if len(tensors) > MAX_ITEMS:
        raise WireError(
            f"{len(tensors)} tensors exceed {MAX_ITEMS} in a frame: send several frames"
        )
    table: list[Entry] = []
    buffers: list[bytes | memoryview] = []
    for name, tensor in sorted(tensors.items()):
        if tensor.dtype not in DTYPES:
            raise WireError(f"tensor {name!r} is {tensor.dtype}: only {listed(DTYPES)} can cross")
        if not isinstance(codecs, str) and name not in codecs:
            raise WireError(f"tensor {name!r} has no codec: name one of {listed(CODECS)}")
        codec = codecs if isinstance(codecs, str) else codecs[name]
        spec = TensorSpec(tuple(tensor.shape), tensor.dtype, codec)
        table.append(spec.described(name))
        for part in spec.how.encode(tensor):
            raw = _bytes_of(part.cpu().contiguous())
            buffers += [raw.data, _padding(raw.nbytes)]
    header = pack(kind, fields, table)
    if len(header) > MAX_HEADER:
        raise WireError(
            f"header of {len(header)} bytes exceeds {MAX_HEADER}: send a tensor instead"
        )
    body = [piece for piece in (header, _padding(len(header)), *buffers) if len(piece)]
    return [PREFIX.pack(MAGIC, PROTOCOL, len(header), 0), *body]


def decode(
    data: bytes | bytearray | memoryview, expected: Mapping[str, Schema], *, copy: bool = True
) -> Frame:
    """Return the frame; raise WireError unless ``expected`` (kind -> schema) allows exactly this one.

    With ``copy``, its tensors own their memory. Without, tensors that cross raw are views of
    ``data``, which must be writable and must not change while they are used.
    """
    view = memoryview(data).cast("B")
    largest = max((schema.limit for schema in expected.values()), default=0)
    if len(view) > largest:
        raise WireError(f"frame of {len(view)} bytes exceeds the {largest} this phase allows")
    if len(view) < PREFIX.size:
        raise WireError(f"frame of {len(view)} bytes is shorter than its prefix of {PREFIX.size}")
    magic, protocol, length, unused = PREFIX.unpack_from(view)
    if magic != MAGIC:
        raise WireError(f"frame starts with {magic!r}, not {MAGIC!r}: the sender is not semisfl")
    if protocol != PROTOCOL:
        raise WireError(f"protocol {protocol}, but {PROTOCOL} here: run one version on both sides")
    if unused:
        raise WireError(f"prefix ends with {unused:#x}, which must be zero")
    start = PREFIX.size + _padded(length)
    if length > MAX_HEADER or start > len(view):
        raise WireError(f"header of {length} bytes exceeds {min(MAX_HEADER, len(view))}")

    header = view[PREFIX.size : PREFIX.size + length]
    kind, fields, table = unpack(header)
    schema = expected.get(kind)
    if schema is None:
        raise WireError(f"kind {short(kind)} is not expected: this phase takes {listed(expected)}")
    _check_fields(fields, schema)
    if pack(kind, fields, schema.table) != header:
        raise WireError(_difference(schema.table, table))
    total = start + schema.buffers
    if len(view) != total or total > schema.limit:
        raise WireError(f"{kind!r} of {len(view)} bytes: needs {total}, at most {schema.limit}")
    if any(view[PREFIX.size + length : start]):
        raise WireError("padding after the header is not zero")

    regions = _Regions(view, start, copy)
    tensors = {name: regions.read(name, spec) for name, spec in schema.specs.items()}
    return Frame(kind, fields, {name: tensors[name] for name in schema.tensors or {}})


@dataclass
class _Regions:
    """Read the buffers of a frame one after another; its length was checked before."""

    view: memoryview
    offset: int
    copy: bool

    def read(self, name: str, spec: TensorSpec) -> Tensor:
        parts = [self._part(name, *part) for part in spec.how.layout(spec.shape)]
        if not spec.how.canonical(parts, spec.shape):
            raise WireError(
                f"tensor {name!r} holds bytes that its codec {spec.how.name} never makes"
            )
        return spec.how.decode(parts, spec.shape, spec.dtype)

    def _part(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        end = self.offset + size
        if any(self.view[end : self.offset + _padded(size)]):
            raise WireError(f"padding after tensor {name!r} is not zero")
        region = self.view[self.offset : end]
        self.offset += _padded(size)
        if size and not self.copy:
            return torch.frombuffer(region, dtype=dtype).view(shape)
        # A copy: the frame may be read-only, or the transport's buffer for the next one.
        tensor = torch.empty(shape, dtype=dtype)
        _bytes_of(tensor)[:] = region
        return tensor


def _check_fields(fields: dict[str, Any], schema: Schema) -> None:
    if fields.keys() != schema.fields.keys():
        raise WireError(f"fields are {listed(fields)}, but {listed(schema.fields)} are expected")
    for name, wanted in schema.fields.items():
        if type(fields[name]) is not wanted:
            is_type = type(fields[name]).__name__
            raise WireError(f"field {name!r} is {is_type}, but {wanted.__name__} is expected")


def _difference(wanted: list[Entry], received: list[Any]) -> str:
    for want, got in zip_longest(wanted, received):
        if want != got:
            return f"tensor {short(got)} where {short(want)} is expected"
    return "header is not in its one canonical form"


def _bytes_of(tensor: Tensor) -> np.ndarray:
    """Return a contiguous CPU tensor's memory; torch itself refuses to view an empty one as bytes."""
    if not tensor.numel():
        return np.empty(0, dtype=np.uint8)
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _padding(size: int) -> bytes:
    return bytes(_padded(size) - size)
