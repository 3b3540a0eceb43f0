"""Sums over the steps of a round, such as losses and counts of labels.

A method adds to them in every step and reads them once per round, because reading waits for the device.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from semisfl.engine.streams import Streams


class Meter:
    """Sums on the device, read once per round. On a GPU they are computed on the side stream."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._sums: dict[tuple[str, ...], Tensor] = {}
        self._shapes: dict[str, torch.Size] = {}

    def add(
        self, counts: Callable[[], Mapping[str, Tensor]] | None = None, **values: Tensor | None
    ) -> None:
        """Add a step's ``values``, and those that ``counts`` returns, to the sums of the same names.

        Statistics that only the meter needs belong into ``counts``: nothing else waits for them. A
        value of None is left out.
        """
        there = {name: value for name, value in values.items() if value is not None}
        with self._streams.side(counts, *there.values()):
            self._add({**there, **(counts() if counts is not None else {})})

    def _add(self, values: Mapping[str, Tensor]) -> None:
        """Keep values that come together as one sum: one addition per step instead of several."""
        names = tuple(values)
        joined = torch.cat([value.detach().reshape(-1).float() for value in values.values()])
        # A round with fewer clients than the last has shorter sums by client.
        if names not in self._sums or self._sums[names].shape != joined.shape:
            self._sums[names] = torch.zeros_like(joined)
            self._shapes |= {name: value.shape for name, value in values.items()}
        self._sums[names].add_(joined)

    def read(self) -> dict[str, Any]:
        """Return the sums as plain numbers or nested lists, and start again from zero."""
        self._streams.before_waiting()
        read = {}
        for names, total in self._sums.items():
            shapes = [self._shapes[name] for name in names]
            parts = total.cpu().split([shape.numel() for shape in shapes])
            for name, part, shape in zip(names, parts, shapes, strict=True):
                read[name] = part.view(shape).tolist()
        self.clear()
        return read

    def clear(self) -> None:
        """Start again from zero, without waiting for the device."""
        for total in self._sums.values():
            total.zero_()
