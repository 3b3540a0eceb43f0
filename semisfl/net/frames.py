"""Encode and decode messages: a fixed prefix, a msgpack header, then raw padded buffers. No pickle.

    magic "SSFL" | protocol u32 | header length u32 | 0 u32               little-endian
    msgpack [kind, {field: value}, [[tensor, dtype, shape, codec], ...]]  tensors sorted by name
    every part of every tensor, little-endian

Header and parts are each padded with zeros to 16 bytes. The receiver knows beforehand what may come: a frame must have
exactly the fields, tensors, shapes and codecs of a `Schema`, and so the number of bytes that follows from it.

There is no checksum: TLS authenticates every record, so the bytes that arrive are the bytes that were sent. Every
receiver checks the values themselves (`semisfl.net.server.value_checks`, `semisfl.net.client.agreement`).
"""

import math
import reprlib
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest
from typing import Any

import msgpack
import numpy as np
import torch
from torch import Tensor

from semisfl.fleet.codec import Codec, codec_for

if sys.byteorder != "little":
    raise ImportError(
        "semisfl.net.frames needs a little-endian machine: buffers are sent as they are"
    )

PROTOCOL = 4
MAGIC = b"SSFL"
PREFIX = struct.Struct("<4sIII")
ALIGNMENT = 16
MAX_HEADER = 256 * 1024
"""Most bytes of a header: about 4,000 tensors."""
MAX_ITEMS = 4096
"""Most items of a list or map in a header: msgpack reserves room for a list before it reads the items."""

DTYPES = {
    dtype: str(dtype).removeprefix("torch.")
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}
"""The dtypes that a tensor in a frame may have, with their names in the header."""

Entry = list[Any]
"""A tensor in the header: name, dtype, shape, codec."""


class WireError(ValueError):
    """Raised for bytes that break the protocol; the message is one line."""


@dataclass(frozen=True)
class TensorSpec:
    """Describe a tensor as the receiver will hold it, and the name of the codec that it is sent in."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    codec: str = "fp32"

    @cached_property
    def how(self) -> Codec:
        """Return the codec in use: integers are sent raw, whatever ``codec`` names."""
        return codec_for(self.codec, self.dtype)

    def entry(self, name: str) -> Entry:
        """Return the entry of the tensor ``name`` in the header."""
        return [name, DTYPES[self.dtype], list(self.shape), self.how.name]


@dataclass(frozen=True)
class Schema:
    """Describe one kind of frame: exactly these fields (name -> type) and exactly these tensors."""

    fields: Mapping[str, type] = field(default_factory=dict)
    tensors: Mapping[str, TensorSpec] = field(default_factory=dict)

    @cached_property
    def specs(self) -> dict[str, TensorSpec]:
        """Return the tensors in the order in which they are sent."""
        return dict(sorted(self.tensors.items()))

    @cached_property
    def table(self) -> list[Entry]:
        """Return the header's entries of all tensors."""
        return [spec.entry(name) for name, spec in self.specs.items()]

    @cached_property
    def buffers(self) -> int:
        """Return the bytes of all buffers with their padding."""
        return sum(
            _padded(math.prod(shape) * dtype.itemsize)
            for spec in self.specs.values()
            for shape, dtype in spec.how.layout(spec.shape)
        )

    @property
    def limit(self) -> int:
        """Return the most bytes that a frame of this kind may have."""
        return PREFIX.size + MAX_HEADER + self.buffers


@dataclass(frozen=True, eq=False)
class Frame:
    """A message that was checked against its schema; its tensors are on the CPU."""

    kind: str
    fields: dict[str, Any]
    tensors: dict[str, Tensor]


def payload_bytes(schema: Schema) -> int:
    """Return the bytes of a frame's tensors, as traffic counts them: no header, no padding."""
    return sum(spec.how.size(spec.shape) for spec in schema.specs.values())


def encode(
    kind: str,
    fields: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    codecs: Mapping[str, str] | str = "fp32",
) -> list[bytes | memoryview]:
    """Return the pieces of a frame, to be joined.

    ``codecs`` names the codec of each tensor, or one for all. Pieces are views of the tensors where nothing had to be
    converted: join them before the tensors change. Raise `WireError` if the header would be too long.
    """
    table: list[Entry] = []
    buffers: list[bytes | memoryview] = []
    for name, tensor in sorted(tensors.items()):
        codec = codecs if isinstance(codecs, str) else codecs[name]
        spec = TensorSpec(tuple(tensor.shape), tensor.dtype, codec)
        table.append(spec.entry(name))
        for part in spec.how.encode(tensor):
            raw = _bytes_of(part.cpu().contiguous())
            buffers += [raw.data, bytes(_padded(raw.nbytes) - raw.nbytes)]
    header = msgpack.packb([kind, dict(fields), table])
    if len(header) > MAX_HEADER:
        raise WireError(f"a header of {len(header)} bytes exceeds {MAX_HEADER}")
    padding = bytes(_padded(len(header)) - len(header))
    return [PREFIX.pack(MAGIC, PROTOCOL, len(header), 0), header, padding, *filter(len, buffers)]


def decode(data: bytes | bytearray | memoryview, expected: Mapping[str, Schema]) -> Frame:
    """Return the frame; raise `WireError` unless ``expected`` (kind -> schema) allows exactly this one.

    Tensors that are sent raw are views of ``data`` if it is writable: it must not change while they are used.
    """
    view = memoryview(data).cast("B")
    view = memoryview(bytearray(view)) if view.readonly else view
    largest = max(schema.limit for schema in expected.values())
    if not PREFIX.size <= len(view) <= largest:
        raise WireError(f"a frame of {len(view)} bytes; {PREFIX.size} to {largest} are expected")
    magic, protocol, length, _ = PREFIX.unpack_from(view)
    if magic != MAGIC:
        raise WireError(f"a frame starts with {magic!r}, not {MAGIC!r}: the sender is not semisfl")
    if protocol != PROTOCOL:
        raise WireError(f"protocol {protocol}, but {PROTOCOL} here: run one version on both sides")
    start = PREFIX.size + _padded(length)
    if length > MAX_HEADER or start > len(view):
        raise WireError(f"a header of {length} bytes in a frame of {len(view)}")
    kind, fields, table = unpack(view[PREFIX.size : PREFIX.size + length])
    if (schema := expected.get(kind)) is None:
        raise WireError(f"kind {short(kind)} is not expected, but {', '.join(expected)}")
    types = {name: type(value) for name, value in fields.items()}
    if types != dict(schema.fields):
        raise WireError(
            f"{kind} has fields {short(types)}; {short(dict(schema.fields))} are expected"
        )
    for want, got in zip_longest(schema.table, table):
        if want != got:
            raise WireError(f"tensor {short(got)} where {short(want)} is expected")
    if len(view) != start + schema.buffers:
        raise WireError(f"{kind} of {len(view)} bytes; {start + schema.buffers} are expected")
    tensors = {}
    for name, spec in schema.specs.items():
        parts = []
        for shape, dtype in spec.how.layout(spec.shape):
            size = math.prod(shape) * dtype.itemsize
            region = view[start : start + size]
            part = torch.frombuffer(region, dtype=dtype) if size else torch.empty(0, dtype=dtype)
            parts.append(part.view(shape))
            start += _padded(size)
        tensors[name] = spec.how.decode(parts, spec.shape, spec.dtype)
    return Frame(kind, fields, {name: tensors[name] for name in schema.tensors})


def unpack(header: memoryview) -> tuple[str, dict[str, Any], list[Any]]:
    """Return the kind, the fields and the table of tensors, checked for size and nothing else."""
    limits = {"max_array_len": MAX_ITEMS, "max_map_len": MAX_ITEMS, "max_ext_len": 0}
    try:
        content = msgpack.unpackb(header, strict_map_key=True, **limits)
    except (ValueError, msgpack.UnpackException) as error:
        raise WireError(f"the header is not msgpack within limits: {short(str(error))}") from None
    match content:
        case [str(kind), dict(fields), list(table)]:
            return kind, fields, table
    raise WireError("the header is not [kind, fields, tensors]")


def short(value: object) -> str:
    """Return about a hundred printable characters of what another machine sent."""
    return reprlib.repr(value)


def _bytes_of(tensor: Tensor) -> np.ndarray:
    """Return a contiguous CPU tensor's memory; torch itself refuses to view an empty one as bytes."""
    if not tensor.numel():
        return np.empty(0, dtype=np.uint8)
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
