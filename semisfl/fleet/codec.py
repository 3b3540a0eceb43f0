"""Encode tensors for the wire: fp32, fp16, bf16, int8 with a scale per row, or int4 with a scale
per group.

Everything here is fixed-shape elementwise torch without host synchronisation, so the in-process
fleet may run a round trip inside a captured graph and lose exactly what the network would lose.
What crosses has no autograd history. Results may share memory with their input.

Integer and bool tensors (BatchNorm's ``num_batches_tracked``) cross raw, whatever the codec.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil, prod

import torch
from torch import Tensor
from torch.nn import functional as F

from semisfl.settings import lookup
from semisfl.settings.sections import ConfigError

Dimensions = Sequence[int]
Layout = tuple[tuple[tuple[int, ...], torch.dtype], ...]

SMALLEST_SCALE = 2.0**-100
"""Below this, parts would be subnormal, which devices round differently."""


def has_rows(shape: Dimensions) -> bool:
    """Return whether a tensor has rows of several values, so that a scale per row saves bytes."""
    return len(shape) > 1 and prod(shape[1:]) > 1


def scale_of(maximum: Tensor) -> Tensor:
    """Return the scale for values up to ``maximum``; 0 if negligible, NaN if not finite."""
    scale = torch.where(maximum < SMALLEST_SCALE, 0.0, maximum)
    return torch.where(scale.isfinite(), scale, torch.nan)


def quantise(values: Tensor, scale: Tensor, most: int) -> Tensor:
    """Return whole numbers from -``most`` to ``most``, as floats: ``values`` / ``scale`` x ``most``, rounded."""
    integers = (values / torch.where(scale > 0, scale, torch.inf)).mul_(most).round_()
    # Inf / Inf is NaN, which no integer can hold; the NaN scale marks the row instead.
    return integers.nan_to_num_(nan=0.0)


def dequantise(integers: Tensor, scale: Tensor, most: int) -> Tensor:
    """Return the values that `quantise` rounded. Overwrites ``integers``, which holds floats.

    The divisor is a tensor: a GPU replaces division by a number with a product by its reciprocal.
    That differs from a CPU in the last bit and does not give the maximum back.
    """
    return integers.div_(scale.new_full((), most)).mul_(scale)


class Codec(ABC):
    """Turn a tensor into the parts that are sent, and back.

    ``layout`` says how many bytes a tensor of a shape takes, without a tensor: byte counts use it. A codec
    is idempotent: encoding what arrived gives the same parts again. So a value may pass any number of hops.
    """

    name: str

    @abstractmethod
    def layout(self, shape: Dimensions) -> Layout:
        """Return dimensions and dtype of every part that crosses for a tensor of this shape."""

    @abstractmethod
    def encode(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the parts that cross."""

    @abstractmethod
    def decode(
        self, parts: Sequence[Tensor], shape: Dimensions, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Return the tensor of this shape that arrives."""

    def roundtrip(self, tensor: Tensor) -> Tensor:
        """Return what the other side will hold."""
        return self.decode(self.encode(tensor), tensor.shape, tensor.dtype)

    def size(self, shape: Dimensions) -> int:
        """Return the bytes that cross for a tensor of this shape."""
        return sum(prod(part) * dtype.itemsize for part, dtype in self.layout(shape))


@dataclass(frozen=True)
class Cast(Codec):
    """Send every value in one dtype. A value too large for fp16 becomes Inf, which the receiver sees."""

    name: str
    dtype: torch.dtype

    def layout(self, shape: Dimensions) -> Layout:
        """Return one part of the tensor's own shape."""
        return ((tuple(shape), self.dtype),)

    def encode(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the tensor in ``dtype``."""
        return (tensor.detach().to(self.dtype),)

    def decode(
        self, parts: Sequence[Tensor], shape: Dimensions, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Return the part in the asked ``dtype``."""
        return parts[0].to(dtype)


@dataclass(frozen=True)
class RowScaled(Codec):
    """Send int8 values and, for every row (first dimension; the rest flattened), max|row| as fp32.

    The row's maximum crosses rather than maximum / 127: value / 127 · maximum gives the maximum
    back exactly, so a second round trip changes nothing. A row with NaN or Inf gets a NaN scale
    and arrives as NaN throughout. Rows of one value cross as fp32, since a scale each would cost
    more than it saves; these are biases and BatchNorm statistics, which int8 would ruin anyway.
    """

    name: str

    def layout(self, shape: Dimensions) -> Layout:
        """Return int8 values and one float per row; fp32 values for rows of one value."""
        if not has_rows(shape):
            return ((tuple(shape), torch.float32),)
        return ((tuple(shape), torch.int8), ((shape[0],), torch.float32))

    def encode(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the rounded integers [shape] and the rows' maxima [rows]."""
        values = tensor.detach().to(torch.float32)
        if not has_rows(values.shape):
            return (values,)
        maximum = values.abs().amax(dim=tuple(range(1, values.ndim)), keepdim=True)
        scale = scale_of(maximum)
        return quantise(values, scale, 127).to(torch.int8), scale.flatten()

    def decode(
        self, parts: Sequence[Tensor], shape: Dimensions, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Return integer / 127 x maximum for every value."""
        if len(parts) == 1:
            return parts[0].to(dtype)
        integers, scale = parts
        scale = scale.reshape(-1, *(1 for _ in integers.shape[1:]))
        return dequantise(integers.to(torch.float32), scale, 127).to(dtype)


LARGEST_SCALE = torch.finfo(torch.bfloat16).max
"""A larger float would be rounded to Inf."""
ZERO = 8
"""Code of zero in four bits: -7 to 7 become 1 to 15."""


@dataclass(frozen=True)
class GroupScaled(Codec):
    """Send integers from -7 to 7 and, for every ``group`` values of a row, max|group| as bf16.

    As with int8 the maximum itself crosses, so a second round trip changes nothing; a group with
    NaN or Inf arrives as NaN; rows of one value cross as fp32.
    """

    name: str
    group: int = 32

    def layout(self, shape: Dimensions) -> Layout:
        """Return bytes of two values each and one bf16 per group; fp32 values for rows of one value."""
        if not has_rows(shape):
            return ((tuple(shape), torch.float32),)
        rows, length = shape[0], prod(shape[1:])
        return (
            ((rows, ceil(length / 2)), torch.uint8),
            ((rows, ceil(length / self.group)), torch.bfloat16),
        )

    def encode(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the packed integers [rows, ceil(length / 2)] and the groups' maxima [rows, groups]."""
        values = tensor.detach().to(torch.float32)
        if not has_rows(values.shape):
            return (values,)
        integers, scale = self._quantise(values.flatten(1))
        return self._pack(integers.flatten(1)[:, : prod(values.shape[1:])]), scale.squeeze(2)

    def _quantise(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return integers [row, group, value] as floats, and the groups' scales in bf16."""
        grouped = self._group(rows)
        maximum = grouped.abs().amax(dim=2, keepdim=True)
        scale = scale_of(maximum).clamp(max=LARGEST_SCALE).to(torch.bfloat16)
        # Some processors make a negative NaN of one here; all machines are to send the same bytes.
        scale = scale.masked_fill(scale.isnan(), torch.nan)
        # bf16 may round the maximum down: up to 7.03 sevenths of it, which are 7 all the same.
        return quantise(grouped, scale.to(torch.float32), 7), scale

    def decode(
        self, parts: Sequence[Tensor], shape: Dimensions, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Return integer / 7 x maximum for every value."""
        if len(parts) == 1:
            return parts[0].to(dtype)
        packed, scale = parts
        length = prod(shape[1:])
        grouped = self._group(self._unpack(packed)[:, :length].to(torch.float32))
        values = dequantise(grouped, scale.to(torch.float32).unsqueeze(2), 7)
        return values.flatten(1)[:, :length].reshape(tuple(shape)).to(dtype)

    def roundtrip(self, tensor: Tensor) -> Tensor:
        """Return the result of `encode` and `decode`, without packing the bits."""
        if not has_rows(tensor.shape):
            return super().roundtrip(tensor)
        rows = tensor.detach().to(torch.float32).flatten(1)
        integers, scale = self._quantise(rows)
        # Four bits have a single zero: adding 0.0 turns -0.0 into it.
        values = dequantise(integers.add_(0.0), scale.to(torch.float32), 7).flatten(1)
        # What arrives keeps the memory format, as with the other codecs.
        return torch.empty_like(tensor).copy_(values[:, : rows.shape[1]].reshape(tensor.shape))

    def _group(self, rows: Tensor) -> Tensor:
        """Return [row, group, value]; zeros fill up the last group."""
        missing = -rows.shape[1] % self.group
        return F.pad(rows, (0, missing)).unflatten(1, (-1, self.group))

    @staticmethod
    def _pack(integers: Tensor) -> Tensor:
        four_bits = (F.pad(integers, (0, integers.shape[1] % 2)) + ZERO).to(torch.uint8)
        return four_bits[:, 0::2] | (four_bits[:, 1::2] << 4)

    @staticmethod
    def _unpack(packed: Tensor) -> Tensor:
        pairs = torch.stack((packed & 15, packed >> 4), dim=2)
        return pairs.flatten(1).to(torch.int8) - ZERO


FP32 = Cast("fp32", torch.float32)
FP16 = Cast("fp16", torch.float16)
BF16 = Cast("bf16", torch.bfloat16)
INT8 = RowScaled("int8")
INT4 = GroupScaled("int4")


@cache
def codec_named(name: str) -> Codec:
    """Return the codec of a catalog entry.

    Raises `ConfigError` if it is no `Codec`, or if its functions do not fit together.
    """
    codec = lookup.load(lookup.codec(name).code)
    if not isinstance(codec, Codec):
        raise ConfigError(
            f"codec {name!r} is {type(codec).__name__}, not a semisfl.fleet.codec.Codec"
        )
    for shape in ((3,), (3, 4), (2, 3, 2, 2)):
        _check(codec, f"codec {name!r}", shape)
    return codec


def _check(codec: Codec, called: str, shape: Dimensions) -> None:
    """Raise `ConfigError` if the functions of a codec do not fit together: bytes are counted by its layout."""
    parts = codec.encode(torch.zeros(*shape, dtype=torch.float32, device="cpu"))
    made = [(tuple(part.shape), part.dtype) for part in parts]
    if made != (listed := [(tuple(part), dtype) for part, dtype in codec.layout(shape)]):
        raise ConfigError(f"{called}: encode makes {made}, its layout is {listed}")
    back = codec.decode(parts, shape)
    if tuple(back.shape) != tuple(shape) or back.dtype != torch.float32:
        raise ConfigError(
            f"{called}: decode makes {back.dtype} {list(back.shape)} of torch.float32 {list(shape)}"
        )


def codec_for(codec: str, dtype: torch.dtype) -> Codec:
    """Return the codec by name, or a raw one for dtypes that must not lose anything."""
    named = codec_named(codec)
    return named if dtype.is_floating_point else Cast("raw", dtype)


def tensor_bytes(tensor: Tensor | tuple[Dimensions, torch.dtype], codec: str) -> int:
    """Return the bytes that cross for a tensor, or for a (shape, dtype)."""
    shape, dtype = (tensor.shape, tensor.dtype) if isinstance(tensor, Tensor) else tensor
    return codec_for(codec, dtype).size(shape)


def state_bytes(state: Mapping[str, Tensor], codec: str) -> int:
    """Return the bytes that cross for a state dict."""
    return sum(tensor_bytes(tensor, codec) for tensor in state.values())


def roundtrip_state(state: Mapping[str, Tensor], codec: str) -> dict[str, Tensor]:
    """Return a state dict as the other side will hold it; integer tensors are unchanged."""
    return {
        name: codec_for(codec, tensor.dtype).roundtrip(tensor) for name, tensor in state.items()
    }
