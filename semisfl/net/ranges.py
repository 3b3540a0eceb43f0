"""Bound every number that a server sends to a device. The device checks them before it uses any.

They hold for every run. `semisfl.net.client.agreement` also holds a round to the terms of its run.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from semisfl.net.frames import WireError
from semisfl.settings.config import Config


class Range(NamedTuple):
    """The least and the greatest value allowed, both included."""

    least: float
    greatest: float

    def allows(self, value: float) -> bool:
        """Return whether ``value`` lies in the range; NaN lies in none."""
        return self.least <= value <= self.greatest

    def __str__(self) -> str:
        return f"{self.least:g} to {self.greatest:g}"


TERMS: Mapping[str, Range] = {
    "channels": Range(1, 64),
    "height": Range(1, 4096),
    "width": Range(1, 4096),
    "classes": Range(1, 65_536),
    "mean": Range(-10, 10),
    "std": Range(1e-3, 1e3),
    "rounds": Range(1, 1_000_000),
    "seed": Range(0, 2**63 - 1),
    "clients.batch": Range(1, 65_536),
    "clients.steps": Range(1, 1_000_000),
    "clients.epochs": Range(1, 1_000_000),
    "clients.weak_views": Range(1, 64),
    "clients.strong_views": Range(1, 64),
    "optimizer.lr": Range(0, 100),
    "optimizer.lr_min": Range(0, 100),
    "optimizer.lr_pretrained": Range(0, 100),
    "optimizer.momentum": Range(0, 1),
    "optimizer.weight_decay": Range(0, 1),
    "teacher.ema_decay": Range(0, 1),
    "data.augment.cutout": Range(0, 4096),
}
"""Each number of a run's terms with its range."""
CLIENTS = Range(0, 999_999)
"""Index of a client in its run."""


def check(name: str, value: float, allowed: Range) -> None:
    """Raise `WireError` if ``value`` is outside the range."""
    if not allowed.allows(value):
        raise WireError(f"the server sends {name} = {value:g}; this device allows {allowed}")


def check_settings(config: Config) -> None:
    """Raise `WireError` for the first setting of a run's terms that is outside its range.

    Settings that the run's method does not have are skipped.
    """
    for name, allowed in TERMS.items():
        value: Any = config
        for part in name.split("."):
            value = getattr(value, part, None)
        if value is not None:
            check(name, value, allowed)


def check_images(
    shape: tuple[int, int, int], classes: int, mean: tuple[float, ...], std: tuple[float, ...]
) -> None:
    """Raise `WireError` for the first number about images that is outside its range.

    ``shape`` is channels, height and width in pixels; ``mean`` and ``std`` have one value per channel.
    """
    numbers: list[tuple[str, float]] = [
        *zip(("channels", "height", "width"), shape, strict=True),
        ("classes", classes),
    ]
    numbers += [*(("mean", value) for value in mean), *(("std", value) for value in std)]
    for name, value in numbers:
        check(name, value, TERMS[name])
    if not len(mean) == len(std) == shape[0]:
        raise WireError(
            f"the server sends {len(mean)} means and {len(std)} stds for {shape[0]} channels"
        )
