"""Encode values in four bits, two per byte, with a scale for each group of values in a row."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod

import torch
from torch import Tensor
from torch.nn import functional as F

from semisfl.fleet.codec import (
    SMALLEST_SCALE,
    Codec,
    Dimensions,
    Layout,
    has_rows,
    quantised,
    restored,
    scale_of,
)

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
        if not has_rows(shape):
            return ((tuple(shape), torch.float32),)
        rows, length = shape[0], prod(shape[1:])
        return (
            ((rows, ceil(length / 2)), torch.uint8),
            ((rows, ceil(length / self.group)), torch.bfloat16),
        )

    def encode(self, tensor: Tensor) -> tuple[Tensor, ...]:
        values = tensor.detach().to(torch.float32)
        if not has_rows(values.shape):
            return (values,)
        integers, scale = self._quantised(values.flatten(1))
        return self._packed(integers.flatten(1)[:, : prod(values.shape[1:])]), scale.squeeze(2)

    def _quantised(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return integers [row, group, value] as floats, and the groups' scales in bf16."""
        grouped = self._grouped(rows)
        maximum = grouped.abs().amax(dim=2, keepdim=True)
        scale = scale_of(maximum).clamp(max=LARGEST_SCALE).to(torch.bfloat16)
        # Some processors make a negative NaN of one here, which `canonical` refuses.
        scale = scale.masked_fill(scale.isnan(), torch.nan)
        # bf16 may round the maximum down: up to 7.03 sevenths of it, which are 7 all the same.
        return quantised(grouped, scale.to(torch.float32), 7), scale

    def decode(
        self, parts: Sequence[Tensor], shape: Dimensions, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        if len(parts) == 1:
            return parts[0].to(dtype)
        packed, scale = parts
        length = prod(shape[1:])
        grouped = self._grouped(self._unpacked(packed)[:, :length].to(torch.float32))
        values = restored(grouped, scale.to(torch.float32).unsqueeze(2), 7)
        return values.flatten(1)[:, :length].reshape(tuple(shape)).to(dtype)

    def canonical(self, parts: Sequence[Tensor], shape: Dimensions) -> bool:
        if len(parts) == 1:
            return True
        packed, scale = parts
        integers, length = self._unpacked(packed), prod(shape[1:])
        extreme = self._grouped(integers[:, :length]).abs().amax(dim=2)
        holds = (extreme == 7) & (scale >= SMALLEST_SCALE) & scale.isfinite()
        empty = (extreme == 0) & ((scale == 0) | scale.isnan()) & ~scale.signbit()
        return bool((holds | empty).all()) and not bool(integers[:, length:].any())

    def roundtrip(self, tensor: Tensor) -> Tensor:
        """Return the result of `encode` and `decode`, without packing the bits."""
        if not has_rows(tensor.shape):
            return super().roundtrip(tensor)
        rows = tensor.detach().to(torch.float32).flatten(1)
        integers, scale = self._quantised(rows)
        # Four bits have a single zero: adding 0.0 turns -0.0 into it.
        values = restored(integers.add_(0.0), scale.to(torch.float32), 7).flatten(1)
        # What arrives keeps the memory format, as with the other codecs.
        return torch.empty_like(tensor).copy_(values[:, : rows.shape[1]].reshape(tensor.shape))

    def _grouped(self, rows: Tensor) -> Tensor:
        """Return [row, group, value]; zeros fill up the last group."""
        missing = -rows.shape[1] % self.group
        return F.pad(rows, (0, missing)).unflatten(1, (-1, self.group))

    @staticmethod
    def _packed(integers: Tensor) -> Tensor:
        four_bits = (F.pad(integers, (0, integers.shape[1] % 2)) + ZERO).to(torch.uint8)
        return four_bits[:, 0::2] | (four_bits[:, 1::2] << 4)

    @staticmethod
    def _unpacked(packed: Tensor) -> Tensor:
        pairs = torch.stack((packed & 15, packed >> 4), dim=2)
        return pairs.flatten(1).to(torch.int8) - ZERO


INT4 = GroupScaled("int4")
