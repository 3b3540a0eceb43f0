"""Several states as few flat tensors, one per dtype, and back: what ranks send each other."""

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from semisfl.fleet.base import State

Outline = list[list[Any]]
"""Of a state: name, shape, dtype and whether it lies channels-last, for each of its tensors."""


def outline(state: State) -> Outline:
    return [
        [name, list(tensor.shape), _name(tensor.dtype), _channels_last(tensor)]
        for name, tensor in state.items()
    ]


def pack(states: Sequence[State]) -> list[Tensor]:
    """What crosses for ``states``."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for state in states:
        for tensor in state.values():
            # As it lies in memory: some kernels compute otherwise, by a last bit, on other layouts.
            lying = tensor.permute(0, 2, 3, 1) if _channels_last(tensor) else tensor
            by_dtype.setdefault(tensor.dtype, []).append(lying.detach().reshape(-1))
    return [torch.cat(tensors) for tensors in by_dtype.values()]


def room_for(outlines: Iterable[Outline], device: torch.device) -> list[Tensor]:
    """Tensors that `pack` of such states fits into."""
    sizes: dict[str, int] = {}
    for _, shape, dtype, _ in (row for rows in outlines for row in rows):
        sizes[dtype] = sizes.get(dtype, 0) + prod(shape)
    return [
        torch.empty(size, dtype=getattr(torch, dtype), device=device)
        for dtype, size in sizes.items()
    ]


def unpack(outlines: Iterable[Outline], packed: Sequence[Tensor]) -> list[State]:
    """The states, as views of ``packed``."""
    of_dtype = {_name(flat.dtype): flat for flat in packed}
    used: dict[str, int] = {}
    states = []
    for rows in outlines:
        state: State = {}
        for name, shape, dtype, channels_last in rows:
            first = used.get(dtype, 0)
            used[dtype] = last = first + prod(shape)
            flat = of_dtype[dtype][first:last]
            if channels_last:
                count, channels, height, width = shape
                state[name] = flat.view(count, height, width, channels).permute(0, 3, 1, 2)
            else:
                state[name] = flat.view(shape)
        states.append(state)
    return states


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _channels_last(tensor: Tensor) -> bool:
    return (
        tensor.dim() == 4
        and not tensor.is_contiguous()
        and tensor.is_contiguous(memory_format=torch.channels_last)
    )
