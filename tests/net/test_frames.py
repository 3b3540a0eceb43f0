import math
import struct
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from semisfl import seeds
from semisfl.fleet.codec import codec_named, state_bytes
from semisfl.net.frames import PROTOCOL, Frame, Schema, TensorSpec, decode, encode, payload_bytes
from semisfl.net.headers import MAX_DEPTH, MAX_HEADER, MAX_ITEMS, WireError
from semisfl.settings import catalog


def joined(
    kind: str,
    fields: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    codecs: dict[str, str] | str = "fp32",
) -> bytes:
    return b"".join(encode(kind, fields, tensors, codecs))


def sealed(body: bytes, length: int) -> bytes:
    """A prefix that fits, written here from the format's description."""
    return struct.pack("<4sIII", b"SSFL", 3, length, 0) + body


def with_header(header: bytes, buffers: bytes = b"") -> bytes:
    return sealed(header + bytes(-len(header) % 16) + buffers, len(header))


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


def test_known_bytes() -> None:
    """The format, spelled out once, so that a change of it cannot pass unnoticed."""
    frame = joined("go", {"b": 1, "a": "x"}, {"w": torch.tensor([1.0, -2.0])}, "fp16")
    header = b"\x93\xa2go\x82\xa1a\xa1x\xa1b\x01\x91\x94\xa1w\xa7float32\x91\x02\xa4fp16"
    body = header + bytes(-len(header) % 16) + b"\x00\x3c\x00\xc0" + bytes(12)
    assert PROTOCOL == 3
    assert frame == sealed(body, len(header))


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


def test_order_of_arguments_does_not_show() -> None:
    fields = dict(reversed(FEATURE_FIELDS.items()))
    tensors = dict(reversed(TENSORS.items()))
    assert joined("features", fields, tensors, FEATURE_CODECS) == FEATURE_BYTES


def test_decoded_tensors_own_their_memory() -> None:
    buffer = bytearray(FEATURE_BYTES)
    frame = decode(buffer, EXPECTED)
    buffer[:] = bytes(len(buffer))
    assert torch.equal(frame.tensors["student"], TENSORS["student"])
    frame.tensors["student"].zero_()
    assert torch.equal(
        decode(memoryview(FEATURE_BYTES), EXPECTED).tensors["student"], TENSORS["student"]
    )


def test_decoded_views_hold_what_copies_do() -> None:
    """Without a copy, what crosses as it is shares the frame's memory; the rest never does."""
    buffer = bytearray(FEATURE_BYTES)
    frame = decode(buffer, EXPECTED, copy=False)
    for name, tensor in decode(FEATURE_BYTES, EXPECTED).tensors.items():
        assert torch.equal(frame.tensors[name], tensor), name
    kept = frame.tensors["teacher"].clone()
    buffer[-len(BUFFERS) :] = bytes(len(BUFFERS))
    assert not frame.tensors["student"].any()
    assert torch.equal(frame.tensors["teacher"], kept)


def test_encode_does_not_copy_what_crosses_as_it_is() -> None:
    tensor = torch.zeros(64, 64)
    pieces = encode("w", {}, {"w": tensor})
    tensor[0, 0] = 1.0
    assert bytes(pieces[-1][:4]) == struct.pack("<f", 1.0)


def test_strided_and_tracked_tensors_cross_by_value() -> None:
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


FIELD_VALUES = st.recursive(
    st.one_of(
        *(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.text(), st.binary()),
        st.floats(allow_nan=False, allow_infinity=False, allow_subnormal=False),
    ),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@settings(max_examples=40)
@given(
    fields=st.dictionaries(st.text(), FIELD_VALUES.filter(lambda value: value is not None)),
    shape=st.lists(st.integers(0, 4), max_size=4),
    codec=st.sampled_from(list(CODECS)),
    seed=st.integers(0, 2**32),
)
def test_any_frame_comes_back(
    fields: dict[str, Any], shape: list[int], codec: str, seed: int
) -> None:
    values = seeds.generator(seed, "wire").standard_normal(shape).astype(np.float32)
    tensor = torch.from_numpy(np.asarray(values))
    schema = Schema(
        {name: type(value) for name, value in fields.items()},
        {"t": TensorSpec(tuple(shape), torch.float32, codec)},
    )
    try:
        data = joined("k", fields, {"t": tensor}, codec)
    except WireError:
        reject()  # nested too deep; hypothesis complains if that is common
    frame = decode(data, {"k": schema})
    assert frame.fields == fields
    assert torch.equal(frame.tensors["t"], CODECS[codec].roundtrip(tensor))
    assert joined("k", frame.fields, frame.tensors, codec) == data


def features_with(**changes: object) -> bytes:
    """The good frame with other schema-relevant content, honestly encoded."""
    fields = FEATURE_FIELDS | changes.get("fields", {})  # type: ignore[operator]
    tensors = TENSORS | changes.get("tensors", {})  # type: ignore[operator]
    codecs = FEATURE_CODECS | changes.get("codecs", {})  # type: ignore[operator]
    for name in changes.get("without", ()):  # type: ignore[attr-defined]
        fields.pop(name, None)
        tensors.pop(name, None)
    return joined(str(changes.get("kind", "features")), fields, tensors, codecs)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "shorter than its prefix"),
        (b"GET / HTTP/1.1\r\n", "not semisfl"),
        (FEATURE_BYTES[:4] + struct.pack("<I", 1) + FEATURE_BYTES[8:], "protocol 1, but 3 here"),
        (FEATURE_BYTES[:12] + b"\1" + FEATURE_BYTES[13:], "must be zero"),
        (FEATURE_BYTES[:-1], "needs"),
        (FEATURE_BYTES + bytes(16), "needs"),
        (FEATURE_BYTES * 2, "needs"),
        (FEATURE_BYTES + bytes(MAX_HEADER), "exceeds the"),
        (features_with(kind="gradients"), "'gradients' is not expected.*'hello', 'features'"),
        (features_with(fields={"step": True}), "'step' is bool, but int is expected"),
        (features_with(fields={"loss": 1}), "'loss' is int, but float is expected"),
        (features_with(fields={"extra": 1}), "'extra'"),
        (features_with(without=["step"]), "fields are"),
        (features_with(without=["count"]), "tensor .* where .*'count'"),
        (features_with(tensors={"zzz": torch.zeros(1)}, codecs={"zzz": "fp32"}), "'zzz'"),
        (features_with(tensors={"student": torch.zeros(5, 3)}), r"\[5, 3\]"),
        (features_with(tensors={"student": torch.zeros(3, 5).double()}), "float64"),
        (features_with(codecs={"student": "bf16"}), "bf16"),
    ],
)
def test_refusals_say_why_in_one_line(data: bytes, message: str) -> None:
    with pytest.raises(WireError, match=message) as caught:
        decode(data, EXPECTED)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_hostile_text_cannot_break_the_audit_line() -> None:
    evil = "x\ny\r\x1b[2J" * 1000
    for data in (
        joined(evil, {}, {}),
        joined("hello", {evil: 1}, {}),
        joined("features", FEATURE_FIELDS, {evil: torch.zeros(1)}),
        with_header(msgpack.packb([evil, [evil], {evil: 1}])),
    ):
        with pytest.raises(WireError) as caught:
            decode(data, EXPECTED)
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 400


HEADER, BUFFERS = parts_of(FEATURE_BYTES)
KIND, FIELDS, TABLE = HEADER


def _pairs(*pairs: bytes) -> bytes:
    return bytes([0x80 | len(pairs)]) + b"".join(pairs)


def _field(name: str, value: bytes | None = None) -> bytes:
    packed = msgpack.packb(FEATURE_FIELDS[name]) if value is None else value
    return msgpack.packb(name) + packed


def header_of(fields: bytes) -> bytes:
    return b"\x93" + msgpack.packb(KIND) + fields + msgpack.packb(TABLE)


SORTED = [_field("loss"), _field("round"), _field("step")]
SWAPPED_ROWS = [[TABLE[-1][0], *TABLE[-2][1:]], [TABLE[-2][0], *TABLE[-1][1:]]]


@pytest.mark.parametrize(
    "header",
    [
        pytest.param(header_of(_pairs(*SORTED, _field("step"))), id="duplicate key, same value"),
        pytest.param(header_of(_pairs(*SORTED, _field("step", b"\x04"))), id="duplicate key"),
        pytest.param(header_of(_pairs(*reversed(SORTED))), id="unsorted keys"),
        pytest.param(
            header_of(_pairs(*SORTED[:2], _field("step", b"\xd1\x00\x03"))), id="long-form integer"
        ),
        pytest.param(
            header_of(_pairs(_field("loss", b"\xca\x3e\x80\x00\x00"), *SORTED[1:])), id="float32"
        ),
        pytest.param(
            header_of(_pairs(_field("loss", struct.pack(">Bd", 0xCB, math.nan)), *SORTED[1:])),
            id="NaN",
        ),
        pytest.param(
            header_of(_pairs(_field("loss", struct.pack(">Bd", 0xCB, math.inf)), *SORTED[1:])),
            id="Inf",
        ),
        pytest.param(header_of(_pairs(*SORTED)) + b"\xc0", id="second object"),
        pytest.param(b"\xdc\x00\x03" + header_of(_pairs(*SORTED))[1:], id="long-form array"),
        pytest.param(msgpack.packb([KIND, FIELDS, TABLE[:-2] + SWAPPED_ROWS]), id="names swapped"),
        pytest.param(msgpack.packb([KIND, FIELDS, TABLE[::-1]]), id="rows reversed"),
        pytest.param(msgpack.packb([KIND, FIELDS, TABLE + TABLE[-1:]]), id="row twice"),
        pytest.param(msgpack.packb([KIND, FIELDS, TABLE, 1]), id="fourth element"),
        pytest.param(msgpack.packb([KIND, FIELDS]), id="no table"),
        pytest.param(msgpack.packb({0: KIND, 1: FIELDS, 2: TABLE}), id="integer keys"),
        pytest.param(msgpack.packb([[], FIELDS, TABLE]), id="kind unhashable"),
        pytest.param(
            msgpack.packb([KIND, FIELDS | {"step": msgpack.Timestamp(1)}, TABLE]), id="timestamp"
        ),
        pytest.param(
            msgpack.packb([KIND, FIELDS | {"step": msgpack.ExtType(5, b"x")}, TABLE]),
            id="extension",
        ),
        pytest.param(
            msgpack.packb(
                [KIND, FIELDS, [[n, d, [x == 3 or x for x in s], c] for n, d, s, c in TABLE]]
            ),
            id="True for a dimension",
        ),
        pytest.param(b"", id="empty"),
        pytest.param(b"\xc1", id="reserved byte"),
        pytest.param(b"\xa4\xff\xfe\xfd\xfc", id="not UTF-8"),
    ],
)
def test_headers_in_any_other_form_are_refused(header: bytes) -> None:
    assert decode(with_header(header_of(_pairs(*SORTED)), BUFFERS), EXPECTED).fields["step"] == 3
    with pytest.raises(WireError):
        decode(with_header(header, BUFFERS), EXPECTED)


def test_padding_must_be_zero_and_bools_must_be_bools() -> None:
    length = struct.unpack_from("<I", FEATURE_BYTES, 8)[0]
    values, offset = [(0, length)], length + -length % 16  # of the body: header, then every part
    for name in sorted(TENSORS):
        codec = CODECS[FEATURE_CODECS[name]]
        tensor = TENSORS[name]
        for part in codec.encode(tensor) if tensor.is_floating_point() else (tensor,):
            size = part.numel() * part.element_size()
            values.append((offset, offset + size))
            offset += size + -size % 16
    inside = {position for begin, end in values for position in range(begin, end)}
    padding = set(range(len(FEATURE_BYTES) - 16)) - inside
    assert len(padding) == sum(-(end - begin) % 16 for begin, end in values) > 50

    def poked(position: int, value: int) -> str:
        body = bytearray(FEATURE_BYTES[16:])
        body[position] = value
        return refused(sealed(bytes(body), length))[0]

    for position in padding:
        assert "padding after" in poked(position, 1)
    mask = FEATURE_BYTES.index(b"\1\0\1" + bytes(13)) - 16
    assert poked(mask, 0) == ""
    assert "'mask' holds bytes that its codec raw never makes" in poked(mask, 2)


def refused(data: bytes) -> tuple[str, Frame | None]:
    try:
        return "", decode(data, EXPECTED)
    except WireError as error:
        return str(error), None


BOMBS = {
    "nested arrays": b"\x91" * 100_000,
    "nested maps": b"\x81\xa1a" * 50_000,
    "nested wide arrays": (b"\xdc" + struct.pack(">H", MAX_ITEMS)) * 50_000,
    "nested long arrays": (b"\xdd" + struct.pack(">I", 200_000)) * 50_000,
    "nested huge arrays": b"\xdd\xff\xff\xff\xff" * 50_000,
    "huge map": b"\xdf\xff\xff\xff\xff",
    "huge string": b"\xdb\xff\xff\xff\xff",
    "huge bytes": b"\xc6\xff\xff\xff\xff",
    "huge extension": b"\xc9\xff\xff\xff\xff\x01",
    "many empty maps": msgpack.packb([[{}] * 4000] * 60),
    "wide list": msgpack.packb([0] * (MAX_ITEMS + 1)),
}


@pytest.mark.parametrize("name", BOMBS)
@pytest.mark.parametrize("as_field", [False, True])
def test_bombs_are_refused_in_little_memory(name: str, as_field: bool) -> None:
    header = BOMBS[name]
    if as_field:
        header = b"\x93" + msgpack.packb(KIND) + b"\x81" + msgpack.packb("step") + header
    data = with_header(header[:MAX_HEADER], BUFFERS)
    tracemalloc.start()
    try:
        message, _ = refused(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert message
    assert peak < 160 * MAX_HEADER, f"{peak} bytes for {len(data)}"


def test_lengths_are_checked_before_anything_is_allocated() -> None:
    schema = {"features": Schema({}, {"x": TensorSpec((2**20, 2**10))})}  # 4 GiB
    header = msgpack.packb(["features", {}, [["x", "float32", [2**20, 2**10], "fp32"]]])
    tracemalloc.start()
    try:
        with pytest.raises(WireError, match="needs"):
            decode(with_header(header), schema)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    header = msgpack.packb(["features", {"note": "x" * MAX_HEADER}, []])
    with pytest.raises(WireError, match=f"header of {len(header)} bytes exceeds {MAX_HEADER}"):
        decode(with_header(header), schema)
    with pytest.raises(WireError, match="exceeds the 64"):
        decode(bytes(65), {"hello": Schema({}, max_bytes=64)})
    with pytest.raises(WireError, match="at most 64"):
        decode(HELLO_BYTES, {"big": FEATURES, "hello": Schema(HELLO.fields, max_bytes=64)})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"x": math.nan}, "finite"),
        ({"x": [1.0, -math.inf]}, "finite"),
        ({"x": 2**64}, "cannot be packed"),
        ({"x": "\ud800"}, "cannot be packed"),
        ({"x": object()}, "holds a object"),
        ({"x": np.float32(1)}, "holds a float32"),
        ({"x": {1: 2}}, "not strings"),
        ({"x": [[[[[[[[[[1]]]]]]]]]]}, f"deeper than {MAX_DEPTH}"),
        ({"x": [0] * (MAX_ITEMS + 1)}, "more than 4096"),
        ({"x": b"0" * MAX_HEADER}, "header of"),
    ],
)
def test_encode_refuses_what_decode_would(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(WireError, match=message):
        encode("k", fields, {})


def test_encode_refuses_tensors_it_cannot_name() -> None:
    with pytest.raises(WireError, match="complex64"):
        encode("k", {}, {"x": torch.zeros(1, dtype=torch.complex64)})
    with pytest.raises(WireError, match="'x' has no codec"):
        encode("k", {}, {"x": torch.zeros(1)}, {"y": "fp32"})
    with pytest.raises(ValueError, match=r"'zip'.*fp32"):
        encode("k", {}, {"x": torch.zeros(1)}, "zip")
    with pytest.raises(WireError, match="4097 tensors"):
        encode("k", {}, {str(index): torch.zeros(1) for index in range(MAX_ITEMS + 1)})


# Mutants. One may only be accepted if it is an honest frame in its own right, which re-encoding
# shows: other values in its fields and buffers, and nothing that encode would not have written.

Mutation = Callable[[bytes, np.random.Generator], bytes]
SPLICES = [
    *(b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc1", b"\xc0"),
    *(struct.pack(">Bd", 0xCB, math.nan), b"\xca\x7f\xc0\x00\x00", b"\x91" * 40, b"\x81\xa1a" * 40),
    *(b"\xcd\x00\x03", b"\xd3" + bytes(8), b"\xc4\x00", b"\xd9\x00", b"\xd6\xff\0\0\0\1", b"\xc3"),
]


def flip_bits(frame: bytes, rng: np.random.Generator) -> bytes:
    data = bytearray(frame)
    for bit in rng.integers(0, 8 * len(data), rng.integers(1, 9)).tolist():
        data[bit // 8] ^= 1 << bit % 8
    return bytes(data)


def truncate(frame: bytes, rng: np.random.Generator) -> bytes:
    return frame[: rng.integers(0, len(frame))]


def extend(frame: bytes, rng: np.random.Generator) -> bytes:
    return frame + rng.bytes(int(rng.integers(1, 40)))


def edit_prefix(frame: bytes, rng: np.random.Generator) -> bytes:
    data = bytearray(frame)
    value = int(rng.integers(0, 2 ** int(rng.integers(1, 33))))
    struct.pack_into("<I", data, 4 * int(rng.integers(0, 4)), value)
    return bytes(data)


def edit_length(frame: bytes, rng: np.random.Generator) -> bytes:
    length = struct.unpack_from("<I", frame, 8)[0] + int(rng.integers(-40, 41))
    return sealed(frame[16:], max(0, length))


def splice_header(frame: bytes, rng: np.random.Generator) -> bytes:
    """Insert, delete, repeat or replace a stretch of the header's bytes."""
    length = struct.unpack_from("<I", frame, 8)[0]
    header, (begin, end) = frame[16 : 16 + length], sorted(rng.integers(0, length, 2).tolist())
    new = (SPLICES[rng.integers(len(SPLICES))], b"", header[begin:end] * 2)[rng.integers(3)]
    header = header[:begin] + new + header[min(end, begin + int(rng.integers(0, 12))) :]
    return with_header(header, frame[16 + length + -length % 16 :])


def edit_header(frame: bytes, rng: np.random.Generator) -> bytes:
    """Well-formed msgpack with one value somewhere replaced, removed or exchanged."""
    header, buffers = parts_of(frame)
    node = header
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = keys[rng.integers(len(keys))]
        if not (isinstance(node[key], dict | list) and node[key]) or rng.random() < 0.2:
            break
        node = node[key]
    other = keys[rng.integers(len(keys))]
    choice = int(rng.integers(6))
    if choice == 0:
        del node[key]
    elif choice == 1:
        node[key], node[other] = node[other], node[key]
    elif choice == 2 and isinstance(node, dict):
        node[f"{key}x"] = node.pop(key)
    else:
        values: list[Any] = [
            0,
            1,
            3,
            5,
            -1,
            2**63,
            0.5,
            math.nan,
            math.inf,
            True,
            None,
            "",
            "fp32",
            "int8",
        ]
        values += ["float32", b"", b"x", [], {}, [3, 5], {"a": 1}, "hello", "features"]
        node[key] = values[rng.integers(len(values))]
    return with_header(msgpack.packb(header), buffers)


def swap_buffers(frame: bytes, rng: np.random.Generator) -> bytes:
    header, buffers = parts_of(frame)
    blocks = [buffers[start : start + 16] for start in range(0, len(buffers), 16)]
    mixed = b"".join(blocks[position] for position in rng.permutation(len(blocks)).tolist())
    return with_header(msgpack.packb(header), mixed)


def random_bytes(frame: bytes, rng: np.random.Generator) -> bytes:
    data = rng.bytes(int(rng.integers(0, 200)))
    return frame[:16] + data if rng.random() < 0.5 else data


MUTATIONS: list[Mutation] = [
    *(flip_bits, truncate, extend, edit_prefix, edit_length),
    *(splice_header, edit_header, swap_buffers, random_bytes),
]


def mutants(count: int, purpose: str) -> Iterator[tuple[str, bytes]]:
    rng = seeds.generator(0, "mutants", purpose)
    frames = {FEATURE_BYTES: 0.7, HELLO_BYTES: 0.3}
    for chosen in rng.integers(0, len(MUTATIONS), count).tolist():
        frame = FEATURE_BYTES if rng.random() < frames[FEATURE_BYTES] else HELLO_BYTES
        data = MUTATIONS[chosen](frame, rng)
        if data != frame:
            yield MUTATIONS[chosen].__name__, data


def means_what_it_says(data: bytes, frame: Frame) -> bool:
    """Whether the accepted bytes are the one encoding of what was understood."""
    codecs = FEATURE_CODECS if frame.kind == "features" else "fp32"
    again = joined(frame.kind, frame.fields, frame.tensors, codecs)
    if again == data:
        return True
    # A NaN has many bit patterns and one meaning; everything else must agree to the bit.
    twin = decode(again, EXPECTED)
    return parts_of(again)[0] == parts_of(data)[0] and all(
        tensor.isnan().any() and torch.equal(tensor.nan_to_num(), twin.tensors[name].nan_to_num())
        for name, tensor in frame.tensors.items()
        if not torch.equal(tensor, twin.tensors[name])
    )


def check_mutants(count: int, purpose: str) -> None:
    reasons: Counter[str] = Counter()
    accepted: Counter[str] = Counter()
    for name, data in mutants(count, purpose):
        message, frame = refused(data)  # anything but a WireError fails the test here
        if frame is None:
            reasons[" ".join(message.split()[:2])] += 1
            assert "\n" not in message
            assert len(message) < 500
            continue
        accepted[name] += 1
        assert means_what_it_says(data, frame), f"{name} means something else: {data!r}"
    assert accepted.total() > count // 1000, "no mutant was near enough to a frame to be a trial"
    assert accepted.total() < count // 4
    assert not accepted.keys() & {
        "truncate",
        "extend",
        "edit_prefix",
        "edit_length",
        "random_bytes",
    }
    for start in ("prefix ends", "padding after", "tensor [", "header is", "kind ", "protocol"):
        assert any(reason.startswith(start) for reason in reasons), f"{start!r} not in {reasons}"


def test_mutants() -> None:
    check_mutants(20_000, "ordinary")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_million_mutants() -> None:
    check_mutants(1_000_000, "million")


def test_mutants_take_little_memory() -> None:
    cases = [data for _, data in mutants(2000, "memory")]
    refused(FEATURE_BYTES)
    tracemalloc.start()
    try:
        for data in cases:
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            refused(data)
            assert tracemalloc.get_traced_memory()[1] - before < 64 * MAX_ITEMS + 100 * len(data)
        assert tracemalloc.get_traced_memory()[0] < 2**20, (
            "refused frames must leave nothing behind"
        )
    finally:
        tracemalloc.stop()
