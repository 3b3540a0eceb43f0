import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from semisfl import seeds
from semisfl.fleet.codec import codec_named, roundtrip_state, state_bytes, tensor_bytes
from semisfl.settings import catalog

FLOAT = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False)
CODECS = {name: codec_named(name) for name in catalog.CODECS}
NAMES = list(CODECS)


def draw(*shape: int, purpose: str = "tensor") -> torch.Tensor:
    values = seeds.generator(0, purpose).standard_normal(shape)
    return torch.from_numpy(np.asarray(values, dtype=np.float32))


def matrices() -> st.SearchStrategy[torch.Tensor]:
    sizes = st.tuples(st.integers(1, 5), st.integers(2, 7))
    return sizes.flatmap(
        lambda size: st.lists(FLOAT, min_size=size[0] * size[1], max_size=size[0] * size[1]).map(
            lambda values: torch.tensor(values, dtype=torch.float32).reshape(size)
        )
    )


def numpy_int8(tensor: np.ndarray) -> np.ndarray:
    """Row by row, value by value, from the definition."""
    out = np.zeros_like(tensor)
    for row in range(len(tensor)):
        maximum = np.abs(tensor[row]).max()
        if maximum == 0:
            continue
        for index in np.ndindex(tensor[row].shape):
            step = np.rint(tensor[row][index] / maximum * np.float32(127))
            out[row][index] = step / np.float32(127) * maximum
    return out


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("fp32", 0.0),
        ("fp16", 2**-11),
        ("bf16", 2**-8),
        ("int8", 0.5 / 127),
        ("int4", 0.5 / 7 + 2**-8),
    ],
)
def test_error_is_within_the_codecs_precision(name: str, limit: float) -> None:
    tensor = draw(16, 3, 5, 5)
    arrived = CODECS[name].roundtrip(tensor)
    largest = tensor.abs().amax((1, 2, 3), keepdim=True)
    assert arrived.dtype == torch.float32
    assert ((arrived - tensor).abs() <= largest * limit * 1.0001).all()
    assert (arrived != tensor).any() == (limit > 0)


def test_int8_equals_its_definition() -> None:
    tensor = draw(6, 2, 3)
    tensor[3] = 0
    assert torch.equal(
        CODECS["int8"].roundtrip(tensor), torch.from_numpy(numpy_int8(tensor.numpy()))
    )


def numpy_int4(tensor: np.ndarray) -> np.ndarray:
    """Row by row and 32 values at a time, from the definition."""
    out = np.zeros((len(tensor), tensor[0].size), np.float32)
    for row, values in enumerate(tensor.reshape(len(tensor), -1)):
        for first in range(0, len(values), 32):
            group = values[first : first + 32]
            scale = torch.tensor(np.abs(group).max()).bfloat16().float().numpy()
            for place, value in enumerate(group, first):
                out[row, place] = np.rint(value / scale * np.float32(7)) / np.float32(7) * scale
    return out.reshape(tensor.shape)


@pytest.mark.parametrize("shape", [(3, 64), (3, 77), (2, 3, 5, 5)])
def test_int4_equals_its_definition(shape: tuple[int, ...]) -> None:
    tensor = draw(*shape)
    expected = torch.from_numpy(numpy_int4(tensor.numpy()))
    assert torch.equal(CODECS["int4"].roundtrip(tensor), expected)


def test_two_values_of_int4_share_a_byte() -> None:
    packed, scale = CODECS["int4"].encode(torch.tensor([[7.0, -7.0, 1.0]]))
    assert packed.tolist() == [[15 | 1 << 4, 9 | 8 << 4]] and scale.tolist() == [[7.0]]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(), (5,), (4, 1), (4, 6), (2, 3, 4, 5), (0, 3), (3, 0)])
def test_size_is_the_bytes_of_the_parts(name: str, shape: tuple[int, ...]) -> None:
    codec, tensor = CODECS[name], draw(*shape)
    parts = codec.encode(tensor)
    assert codec.size(shape) == sum(part.numel() * part.element_size() for part in parts)
    assert codec.layout(shape) == tuple((tuple(part.shape), part.dtype) for part in parts)
    assert tensor_bytes(tensor, name) == tensor_bytes((shape, torch.float32), name)
    assert codec.size(shape) <= 4 * tensor.numel(), "a codec must never cost more than fp32"
    assert codec.decode(parts, shape).shape == shape


def test_known_sizes() -> None:
    sizes = {name: CODECS[name].size((32, 100)) for name in NAMES}
    assert sizes == {
        "fp32": 12800,
        "fp16": 6400,
        "bf16": 6400,
        "int8": 3200 + 32 * 4,
        "int4": 32 * (50 + 4 * 2),
    }


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_values_arrive_non_finite_in_their_own_row_only(name: str, bad: float) -> None:
    tensor = draw(4, 3, 2)
    tensor[1, 2, 0] = bad
    arrived = CODECS[name].roundtrip(tensor)
    assert not arrived[1].isfinite().all()
    assert arrived[[0, 2, 3]].isfinite().all()


@pytest.mark.parametrize("sign", [1, -1])
def test_a_nan_of_either_sign_crosses_in_one_form(sign: int) -> None:
    """Processors differ in the sign of the NaN that they make; the server takes one only."""
    tensor = draw(2, 64).copysign(torch.tensor(float(sign)))
    tensor[0, 5] = torch.tensor(float("nan")).copysign(torch.tensor(float(sign)))
    for name in ("int8", "int4"):
        scale = CODECS[name].encode(tensor)[1].flatten()
        assert scale.isnan()[0] and not scale.signbit().any()


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_zero_and_tiny_rows_are_zero(name: str) -> None:
    tensor = torch.tensor([[0.0, -0.0], [1e-40, -1e-45], [2.0**-98, 0.0]])
    arrived = CODECS[name].roundtrip(tensor)
    assert arrived.isfinite().all()
    assert torch.equal(arrived, torch.tensor([[0.0, 0.0], [0.0, 0.0], [2.0**-98, 0.0]]))


@pytest.mark.parametrize("name", NAMES)
@given(tensor=matrices())
def test_a_second_crossing_changes_nothing(name: str, tensor: torch.Tensor) -> None:
    codec = CODECS[name]
    parts = codec.encode(tensor)
    again = codec.encode(codec.decode(parts, tensor.shape))
    assert all(torch.equal(left, right) for left, right in zip(parts, again, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_rows_cross_alike_alone_and_together(name: str) -> None:
    """The in-process fleet crosses all clients' rows at once, the network each client's own."""
    codec, tensor = CODECS[name], draw(12, 7)
    apart = torch.cat([codec.roundtrip(rows) for rows in tensor.chunk(3)])
    assert torch.equal(codec.roundtrip(tensor), apart)


@pytest.mark.parametrize("name", NAMES)
def test_stacked_clients_cross_under_vmap(name: str) -> None:
    codec = CODECS[name]
    for stacked in (draw(3, 4, 5), draw(3, 4)):
        apart = torch.stack([codec.roundtrip(one) for one in stacked])
        assert torch.equal(torch.vmap(codec.roundtrip)(stacked), apart)


@pytest.mark.parametrize("name", NAMES)
def test_memory_format_and_history(name: str) -> None:
    tensor = draw(4, 3, 5, 5)
    last = tensor.to(memory_format=torch.channels_last).requires_grad_()
    arrived = CODECS[name].roundtrip(last)
    assert torch.equal(arrived, CODECS[name].roundtrip(tensor))
    assert arrived.is_contiguous(memory_format=torch.channels_last)
    assert not arrived.requires_grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_float_dtypes_come_back_as_they_went(dtype: torch.dtype) -> None:
    for codec in CODECS.values():
        assert codec.roundtrip(draw(3, 4).to(dtype)).dtype == dtype


@pytest.mark.parametrize("name", NAMES)
def test_integers_and_bools_of_a_state_cross_raw(name: str) -> None:
    state = {
        **torch.nn.BatchNorm2d(4).state_dict(),
        "weight": draw(4, 9),
        "mask": torch.tensor([True, False]),
        "count": torch.tensor(2**40 + 1),
    }
    arrived = roundtrip_state(state, name)
    assert list(arrived) == list(state)
    for key in ("mask", "count", "num_batches_tracked"):
        assert torch.equal(arrived[key], state[key])
        assert arrived[key].dtype == state[key].dtype
    each = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 4, "int4": 4}[name]  # vectors stay fp32
    floats = 3 * 4 * each + CODECS[name].size((4, 9))
    assert state_bytes(state, name) == floats + 2 + 8 + 8


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_captured_graph_equals_the_cpu(name: str) -> None:
    codec, tensor = CODECS[name], draw(8, 33)
    tensor[2], tensor[5, 1] = 0, float("nan")
    static = torch.zeros_like(tensor, device="cuda")
    stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        codec.roundtrip(static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        arrived = codec.roundtrip(static)
    static.copy_(tensor)
    graph.replay()
    torch.testing.assert_close(
        arrived.cpu(), codec.roundtrip(tensor), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("shape", [(3, 64), (2, 5, 7), (4, 33), (6,), (3, 1), (2, 3, 4, 5)])
def test_int4_without_packing_is_what_packing_gives(shape: tuple[int, ...]) -> None:
    """To the last bit, signs of zeros and what is not finite included."""
    codec = CODECS["int4"]
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    tensor.view(-1)[::5] = -1e-9
    for value in (0.0, float("inf"), float("nan"), 3e38, 1e-33):
        tensor.view(-1)[0] = value
        packed = codec.decode(codec.encode(tensor), tensor.shape, tensor.dtype)
        assert torch.equal(codec.roundtrip(tensor).view(torch.int32), packed.view(torch.int32))
