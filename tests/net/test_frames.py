"""Test the format of frames: what goes in comes out, and only what a schema allows."""

import struct
import tracemalloc
from typing import Any

import msgpack
import numpy as np
import pytest
import torch

from semisfl import seeds
from semisfl.fleet.codec import codec_named, state_bytes
from semisfl.net.frames import (
    MAX_HEADER,
    PROTOCOL,
    Schema,
    TensorSpec,
    WireError,
    decode,
    encode,
    payload_bytes,
)
from semisfl.settings import catalog


def joined(
    kind: str,
    fields: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    codecs: dict[str, str] | str = "fp32",
) -> bytes:
    return b"".join(encode(kind, fields, tensors, codecs))


def with_header(header: bytes, buffers: bytes = b"") -> bytes:
    """A frame with a prefix that fits, written here from the format's description."""
    padded = header + bytes(-len(header) % 16)
    return struct.pack("<4sIII", b"SSFL", PROTOCOL, len(header), 0) + padded + buffers


def parts_of(frame: bytes) -> tuple[list[Any], bytes]:
    length = struct.unpack_from("<I", frame, 8)[0]
    start = 16 + length + -length % 16
    return msgpack.unpackb(frame[16 : 16 + length]), frame[start:]


RNG = seeds.generator(0, "wire")
TENSORS = {
    "student": torch.from_numpy(RNG.standard_normal((3, 5)).astype(np.float32)),
    "teacher": torch.from_numpy(RNG.standard_normal((3, 5)).astype(np.float32)),
    "half": torch.from_numpy(RNG.standard_normal((2, 2)).astype(np.float32)),
    "brain": torch.from_numpy(RNG.standard_normal((2, 3)).astype(np.float32)),
    "mask": torch.tensor([True, False, True]),
    "count": torch.tensor(7),
    "none": torch.zeros(0, 4),
}
CODECS = {name: codec_named(name) for name in catalog.CODECS}
FEATURE_CODECS = {
    **{"student": "fp32", "teacher": "int8", "half": "fp16", "brain": "bf16"},
    **{"mask": "fp16", "count": "int8", "none": "int8"},
}
FEATURE_FIELDS = {"step": 3, "round": 2**40, "loss": 0.25}
HELLO_FIELDS = {
    **{"name": "dévice\n1", "images": 120, "rate": -0.5, "resume": True, "token": b"\x00\xff"},
    **{"codecs": ["fp32", "int8"], "model": {"cut": 2, "layers": [[1, 2], None]}},
}
HELLO = Schema({name: type(value) for name, value in HELLO_FIELDS.items()})
FEATURES = Schema(
    {"step": int, "round": int, "loss": float},
    {
        name: TensorSpec(tuple(tensor.shape), tensor.dtype, FEATURE_CODECS[name])
        for name, tensor in TENSORS.items()
    },
)
EXPECTED = {"hello": HELLO, "features": FEATURES}
HELLO_BYTES = joined("hello", HELLO_FIELDS, {})
FEATURE_BYTES = joined("features", FEATURE_FIELDS, TENSORS, FEATURE_CODECS)
(KIND, FIELDS, TABLE), BUFFERS = parts_of(FEATURE_BYTES)


def test_known_bytes() -> None:
    """The format, spelled out once, so that a change of it cannot pass unnoticed."""
    frame = joined("go", {"a": "x", "b": 1}, {"w": torch.tensor([1.0, -2.0])}, "fp16")
    header = b"\x93\xa2go\x82\xa1a\xa1x\xa1b\x01\x91\x94\xa1w\xa7float32\x91\x02\xa4fp16"
    assert PROTOCOL == 4
    assert frame == with_header(header, b"\x00\x3c\x00\xc0" + bytes(12))


def test_round_trip_of_every_type_dtype_and_codec() -> None:
    hello = decode(HELLO_BYTES, EXPECTED)
    assert (hello.kind, hello.fields, hello.tensors) == ("hello", HELLO_FIELDS, {})
    frame = decode(FEATURE_BYTES, EXPECTED)
    assert (frame.kind, frame.fields) == ("features", FEATURE_FIELDS)
    assert list(frame.tensors) == list(TENSORS)
    for name, tensor in TENSORS.items():
        codec = CODECS[FEATURE_CODECS[name]]
        wanted = codec.roundtrip(tensor) if tensor.is_floating_point() else tensor
        assert frame.tensors[name].dtype == tensor.dtype
        assert torch.equal(frame.tensors[name], wanted), name
    assert joined("features", frame.fields, frame.tensors, FEATURE_CODECS) == FEATURE_BYTES


def test_tensors_share_the_memory_of_a_writable_frame_alone() -> None:
    for data, shared in ((bytearray(FEATURE_BYTES), True), (bytes(FEATURE_BYTES), False)):
        frame = decode(data, EXPECTED)
        frame.tensors["student"].zero_()
        again = decode(data, EXPECTED).tensors["student"]
        assert bool(again.any()) is not shared


def test_strided_and_tracked_tensors_are_sent_by_value() -> None:
    tensor = TENSORS["student"].t().clone().requires_grad_().t()
    tensors = TENSORS | {"student": tensor}
    assert joined("features", FEATURE_FIELDS, tensors, FEATURE_CODECS) == FEATURE_BYTES


def test_payload_bytes_are_the_counted_ones_and_framing_is_small() -> None:
    state = torch.nn.Sequential(torch.nn.Conv2d(3, 64, 5), torch.nn.BatchNorm2d(64)).state_dict()
    for codec in CODECS:
        specs = {
            name: TensorSpec(tuple(tensor.shape), tensor.dtype, codec)
            for name, tensor in state.items()
        }
        schema = Schema({}, specs)
        assert payload_bytes(schema) == state_bytes(state, codec)
        assert len(joined("model", {}, state, codec)) <= schema.limit
    pair = {"student": torch.zeros(64, 512), "teacher": torch.zeros(64, 512)}
    assert len(joined("features", {"step": 1}, pair)) <= 1.01 * 2 * 64 * 512 * 4


def features_with(**changes: object) -> bytes:
    """The good frame with other schema-relevant content, honestly encoded."""
    fields = FEATURE_FIELDS | changes.get("fields", {})  # type: ignore[operator]
    tensors = TENSORS | changes.get("tensors", {})  # type: ignore[operator]
    codecs = FEATURE_CODECS | changes.get("codecs", {})  # type: ignore[operator]
    for name in changes.get("without", ()):  # type: ignore[attr-defined]
        fields.pop(name, None)
        tensors.pop(name, None)
    return joined(str(changes.get("kind", "features")), fields, tensors, codecs)


EVIL = "x\ny\r\x1b[2J" * 1000
REFUSED = {
    "empty": b"",
    "another program's": b"GET / HTTP/1.1\r\n",
    "another version": FEATURE_BYTES[:4] + struct.pack("<I", 1) + FEATURE_BYTES[8:],
    "too short": FEATURE_BYTES[:-1],
    "too long": FEATURE_BYTES + bytes(16),
    "far too long": FEATURE_BYTES + bytes(MAX_HEADER),
    "another kind": features_with(kind="gradients"),
    "a bool": features_with(fields={"step": True}),
    "an int": features_with(fields={"loss": 1}),
    "another field": features_with(fields={"extra": 1}),
    "no field": features_with(without=["step"]),
    "no tensor": features_with(without=["count"]),
    "another tensor": features_with(tensors={"zzz": torch.zeros(1)}, codecs={"zzz": "fp32"}),
    "another shape": features_with(tensors={"student": torch.zeros(5, 3)}),
    "another dtype": features_with(tensors={"student": torch.zeros(3, 5).double()}),
    "another codec": features_with(codecs={"student": "bf16"}),
    "evil kind": joined(EVIL, {}, {}),
    "evil field": joined("hello", {EVIL: 1}, {}),
    "evil tensor": joined("features", FEATURE_FIELDS, {EVIL: torch.zeros(1)}),
    "names swapped": with_header(
        msgpack.packb([KIND, FIELDS, [*TABLE[:-2], TABLE[-1], TABLE[-2]]]), BUFFERS
    ),
    "fourth element": with_header(msgpack.packb([KIND, FIELDS, TABLE, 1]), BUFFERS),
    "no table": with_header(msgpack.packb([KIND, FIELDS]), BUFFERS),
    "no list": with_header(msgpack.packb({0: KIND, 1: FIELDS, 2: TABLE}), BUFFERS),
    "kind is a list": with_header(msgpack.packb([[], FIELDS, TABLE]), BUFFERS),
    "no header": with_header(b"", BUFFERS),
    "not UTF-8": with_header(b"\xa4\xff\xfe\xfd\xfc", BUFFERS),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_in_one_short_line(name: str) -> None:
    with pytest.raises(WireError) as caught:
        decode(REFUSED[name], EXPECTED)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 600


def test_lengths_are_checked_before_anything_is_allocated() -> None:
    schema = {"features": Schema({}, {"x": TensorSpec((2**20, 2**10))})}  # 4 GiB
    header = msgpack.packb(["features", {}, [["x", "float32", [2**20, 2**10], "fp32"]]])
    tracemalloc.start()
    try:
        with pytest.raises(WireError, match="are expected"):
            decode(with_header(header), schema)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    with pytest.raises(WireError, match="a header of"):
        encode("features", {"note": "x" * MAX_HEADER}, {})
