"""What need not cross the wire: features that crossed before, gradients that are zero, weights that hardly moved.

Each is a setting of ``wire``. Both sides of a network, and a simulation of them, use what is here.
"""

from collections.abc import Mapping, Sequence
from math import ceil

import numpy as np
import torch
from torch import Tensor

from semisfl.data.batches import draw_positions
from semisfl.engine.weights import State
from semisfl.fleet.codec import codec_named, roundtrip_state, state_bytes
from semisfl.settings.run import WireConfig
from semisfl.settings.sections import ConfigError


def check(wire: WireConfig) -> None:
    """Rows can only be left out of what a codec makes of each row by itself."""
    named = {"gradients": wire.gradient_rows == "used", "teacher_features": wire.teacher_once}
    for what in (name for name, used in named.items() if used):
        codec = codec_named(getattr(wire, what))
        if codec.size((2, 64)) != 2 * codec.size((1, 64)):
            raise ConfigError(
                f"wire.{what} = {codec.name!r} does not encode rows one by one, so that none can be left out; "
                "use another codec, or wire.gradient_rows = 'all' and wire.teacher_once = false"
            )


# --- teacher features, once per image and round --------------------------------------------------------


def first_uses(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of the images of each step and row, numbered 0, 1, ...: which number, and whether it is new."""
    _, first, number = np.unique(images.ravel(), return_index=True, return_inverse=True)
    new = np.zeros(images.size, dtype=bool)
    new[first] = True
    return number.reshape(images.shape), new.reshape(images.shape)


def places(images: Sequence[np.ndarray]) -> dict[str, Tensor]:
    """For `KeptRows`, of clients side by side: where each row is kept, and whether it is new."""
    numbered = [first_uses(of_client) for of_client in images]
    place = [number + slot * number.size for slot, (number, _) in enumerate(numbered)]
    new = [fresh for _, fresh in numbered]
    return {
        "place": torch.from_numpy(np.concatenate(place, 1)),
        "new": torch.from_numpy(np.concatenate(new, 1)),
    }


class KeptRows:
    """All clients' teacher features of a round, in a simulation: in fixed shapes and one place, since
    captured steps know its address. The last row is for what is not kept."""

    def __init__(self, count: int, width: int, device: torch.device) -> None:
        self._rows = torch.zeros(count + 1, width, device=device)

    def whole(self, place: Tensor, new: Tensor, rows: Tensor) -> Tensor:
        """Rows of images that were shown before become what crossed for them then."""
        self._rows.index_copy_(0, torch.where(new, place, len(self._rows) - 1), rows)
        return self._rows.index_select(0, place)


class TeacherRows:
    """A client's teacher features of a round as the server holds them: what comes, and what came before."""

    def __init__(
        self, seed: int, index: int, client: int, images: int, steps: int, batch: int
    ) -> None:
        """The draws follow from the run's seed, so that no list of images has to cross."""
        drawn = draw_positions(seed, index, client, images, steps, batch)
        self._numbers, self._new = (torch.from_numpy(one) for one in first_uses(drawn))
        self._kept: Tensor | None = None

    def new(self, step: int) -> int:
        """Rows that come in this step."""
        return int(self._new[step].sum())

    def whole(self, step: int, came: Tensor) -> Tensor:
        """All rows of the step."""
        if self._kept is None:
            self._kept = came.new_zeros(int(self._numbers.max()) + 1, came.shape[1])
        self._kept[self._numbers[step][self._new[step]]] = came
        return self._kept[self._numbers[step]]


# --- gradients, without rows of zeros ------------------------------------------------------------------


def carry_something(gradients: Tensor) -> Tensor:
    """bool [rows]"""
    return (gradients != 0).any(1)


def bitmap_bytes(rows: int) -> int:
    return ceil(rows / 8)


def as_bits(used: Tensor) -> Tensor:
    return torch.from_numpy(np.packbits(used.cpu().numpy()))


def spread(rows: Tensor, bits: Tensor, count: int) -> Tensor:
    """The ``count`` rows that these ones and zeros stand for."""
    used = torch.from_numpy(np.unpackbits(bits.numpy())).bool()
    if int(used.sum()) != len(rows) or bool(used[count:].any()):
        raise ValueError(f"{len(rows)} rows of gradients, but their bitmap has {int(used.sum())}")
    whole = rows.new_zeros(count, rows.shape[1])
    whole[used[:count]] = rows
    return whole


# --- weights, as differences ---------------------------------------------------------------------------


def update_bytes(state: Mapping[str, Tensor], wire: WireConfig) -> int:
    """Of a bottom that crosses after another one that both sides hold."""
    return state_bytes(state, wire.updates or wire.models)


def difference(known: State, state: State) -> State:
    return {
        name: tensor.float() - known[name].to(tensor.device).float()
        if tensor.is_floating_point()
        else tensor - known[name].to(tensor.device)
        for name, tensor in state.items()
    }


def restored(known: State, moved: State) -> State:
    """What the receiver of a difference holds."""
    return {
        name: (tensor.float() + moved[name].to(tensor.device)).to(tensor.dtype)
        if tensor.is_floating_point()
        else tensor + moved[name].to(tensor.device)
        for name, tensor in known.items()
    }


def crossing(known: State, state: State, wire: WireConfig) -> State:
    """What crosses, as its codec leaves it: the bottom, or its difference to the ``known`` one."""
    if wire.updates is None:
        return roundtrip_state(state, wire.models)
    return roundtrip_state(difference(known, state), wire.updates)


def arrived(known: State, crossed: State, wire: WireConfig) -> State:
    """The bottom that the other side makes of it."""
    return crossed if wire.updates is None else restored(known, crossed)
