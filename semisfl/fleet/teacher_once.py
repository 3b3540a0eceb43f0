"""Teacher features of an image cross once per round (``wire.teacher_once``).

Both sides of a network and a simulation of them use what is here. Which rows are new follows from
the run's seed, so that no list of images has to cross.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from semisfl.data.positions import draw_positions
from semisfl.fleet.codec import codec_named
from semisfl.settings.run import WireConfig
from semisfl.settings.sections import ConfigError


def check(wire: WireConfig) -> None:
    """Raise `ConfigError` if rows cannot be left out of what the codec encodes."""
    if not wire.teacher_once:
        return
    codec = codec_named(wire.teacher_features)
    if codec.size((2, 64)) != 2 * codec.size((1, 64)):
        raise ConfigError(
            f"wire.teacher_features = {codec.name!r} does not encode rows one by one, so that none can "
            "be left out; use another codec, or wire.teacher_once = false"
        )


def first_uses(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Number the images 0, 1, ...; return the number of each step and row, and whether it is new."""
    _, first, number = np.unique(images.ravel(), return_index=True, return_inverse=True)
    new = np.zeros(images.size, dtype=bool)
    new[first] = True
    return number.reshape(images.shape), new.reshape(images.shape)


def places(images: Sequence[np.ndarray]) -> dict[str, Tensor]:
    """Return for `KeptRows`, clients side by side, where each row is kept and whether it is new."""
    numbered = [first_uses(of_client) for of_client in images]
    place = [number + slot * number.size for slot, (number, _) in enumerate(numbered)]
    new = [fresh for _, fresh in numbered]
    return {
        "place": torch.from_numpy(np.concatenate(place, 1)),
        "new": torch.from_numpy(np.concatenate(new, 1)),
    }


class KeptRows:
    """All clients' teacher features of a round, in a simulation.

    Shapes and address are fixed, because a captured step uses them again. The last row takes what is not kept.
    """

    def __init__(self, count: int, width: int, device: torch.device) -> None:
        self._rows = torch.zeros(count + 1, width, device=device)

    def all_rows(self, place: Tensor, new: Tensor, rows: Tensor) -> Tensor:
        """Return all rows; an image that was shown before has the row that crossed for it then."""
        self._rows.index_copy_(0, torch.where(new, place, len(self._rows) - 1), rows)
        return self._rows.index_select(0, place)


class TeacherRows:
    """A client's teacher features of a round on the server: those that arrive, and those that came before."""

    def __init__(
        self, seed: int, index: int, client: int, images: int, steps: int, batch: int
    ) -> None:
        """Draw from the run's seed, so that no list of images has to cross."""
        if images >= steps * batch:
            # No image is shown twice, whichever are drawn: a large claim of images costs nothing.
            drawn = np.arange(steps * batch).reshape(steps, batch)
        else:
            drawn = draw_positions(seed, index, client, images, steps, batch)
        self._numbers, self._new = (torch.from_numpy(one) for one in first_uses(drawn))
        self._kept: Tensor | None = None

    def new(self, step: int) -> int:
        """Return how many rows come in this step."""
        return int(self._new[step].sum())

    def all_rows(self, step: int, received: Tensor) -> Tensor:
        """Return all rows of the step."""
        if self._kept is None:
            self._kept = received.new_zeros(int(self._numbers.max()) + 1, received.shape[1])
        self._kept[self._numbers[step][self._new[step]]] = received
        return self._kept[self._numbers[step]]
