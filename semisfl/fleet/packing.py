"""Pack states to send or save them, and unpack them.

There are three forms: flat tensors, one per dtype, between ranks; one dict ``state/tensor`` in a frame; any
nested state as named tensors and plain values in a checkpoint.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from semisfl.engine.weights import State

Outline = list[list[Any]]
"""For each tensor of a state: name, shape, dtype and whether it lies channels-last."""

Place = tuple[Any, ...]
"""A tensor's memory, and how it is read."""

# --- flat tensors -----------------------------------------------------------------------------------


def outline(state: State) -> Outline:
    """Return the description of a state that `unpack` needs besides the values; it is plain JSON."""
    return [
        [name, list(tensor.shape), _name(tensor.dtype), _channels_last(tensor)]
        for name, tensor in state.items()
    ]


def pack(states: Sequence[State]) -> list[Tensor]:
    """Return flat tensors with all values of ``states``, one per dtype."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for state in states:
        for tensor in state.values():
            # In memory order: some kernels round the last bit differently on other layouts.
            lying = tensor.permute(0, 2, 3, 1) if _channels_last(tensor) else tensor
            by_dtype.setdefault(tensor.dtype, []).append(lying.detach().reshape(-1))
    return [torch.cat(tensors) for tensors in by_dtype.values()]


def room_for(outlines: Iterable[Outline], device: torch.device) -> list[Tensor]:
    """Return empty tensors that `pack` of such states fits into."""
    sizes: dict[str, int] = {}
    for _, shape, dtype, _ in (entry for entries in outlines for entry in entries):
        sizes[dtype] = sizes.get(dtype, 0) + prod(shape)
    return [
        torch.empty(size, dtype=getattr(torch, dtype), device=device)
        for dtype, size in sizes.items()
    ]


def unpack(outlines: Iterable[Outline], packed: Sequence[Tensor]) -> list[State]:
    """Return the states as views of ``packed``, which `pack` made of states with these ``outlines``."""
    of_dtype = {_name(flat.dtype): flat for flat in packed}
    used: dict[str, int] = {}
    states = []
    for entries in outlines:
        state: State = {}
        for name, shape, dtype, channels_last in entries:
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


# --- one dict of named states -----------------------------------------------------------------------


def tensor_names(states: Mapping[str, State]) -> dict[str, list[str]]:
    """Return the names of each state's tensors, sorted."""
    return {name: sorted(state) for name, state in states.items()}


def join_states(states: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return named states as one dict of tensors ``state/tensor``."""
    return {
        f"{name}/{key}": tensor for name, state in states.items() for key, tensor in state.items()
    }


def split_states(tensors: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, State]:
    """Return the states that `join_states` put together; ``names`` also lists empty ones."""
    states: dict[str, State] = {name: {} for name in names}
    for path, tensor in tensors.items():
        name, _, key = path.partition("/")
        states[name][key] = tensor
    return states


# --- nested states ----------------------------------------------------------------------------------


def flatten(
    state: Any, prefix: str, tensors: dict[str, Tensor], once: dict[Place, str] | None = None
) -> Any:
    """Return ``state`` with each tensor moved to ``tensors`` and replaced by a reference.

    With ``once``, a tensor that the state has in several places is moved once.
    """
    if isinstance(state, Tensor):
        name = prefix if once is None else once.setdefault(place_of(state), prefix)
        tensors.setdefault(name, state)
        return {"__tensor__": name}
    if isinstance(state, dict):
        return {k: flatten(value, f"{prefix}/{k}", tensors, once) for k, value in state.items()}
    if isinstance(state, list | tuple):
        return [flatten(value, f"{prefix}/{k}", tensors, once) for k, value in enumerate(state)]
    return state


def place_of(tensor: Tensor) -> Place:
    """Return the same for two tensors that share memory, shape and strides."""
    return (
        str(tensor.device),
        tensor.data_ptr(),
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
    )


def unflatten(plain: Any, tensors: dict[str, Tensor]) -> Any:
    """Return the nested state that `flatten` was given."""
    if isinstance(plain, dict):
        if "__tensor__" in plain:
            return tensors[plain["__tensor__"]]
        return {key: unflatten(value, tensors) for key, value in plain.items()}
    if isinstance(plain, list):
        return [unflatten(value, tensors) for value in plain]
    return plain
