"""The description of a model that a server of split inference sends: checked before a device allocates or sends anything."""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from semisfl.files import printable
from semisfl.models.shapes import MAX_OUTPUT, Placed, Shape
from semisfl.net.client.lines import plain
from semisfl.net.client.shown_terms import image_line, layer_lines
from semisfl.net.headers import WireError
from semisfl.net.ranges import Range, check, check_images
from semisfl.net.terms import placed_model
from semisfl.settings.counts import counted
from semisfl.settings.layer_kinds import Layer, named, parse_layers
from semisfl.settings.run import ModelConfig

LONGEST_NAME = 200
"""Characters of a class's name or an identity."""


@dataclass(frozen=True)
class ServedModel:
    """The terms of `classify`: what the device would compute and send."""

    classes: tuple[str, ...]
    shape: Shape
    mean: tuple[float, ...]
    std: tuple[float, ...]
    layers: tuple[Layer, ...] | None
    """The whole model as a table; None: the user passed code that no table describes."""
    cut: int | str | None
    identity: str
    features: int
    bottom: str | None
    """The digest of the bottom's weights; None: the server holds the top alone."""

    @classmethod
    def from_text(cls, text: str) -> "ServedModel":
        """Return the model of a server's description; raise `WireError` for any value out of its range."""
        try:
            fields = json.loads(text)
            channels, height, width = (_integer(side) for side in fields["shape"])
            rows, cut = fields["layers"], fields["cut"]
            model = cls(
                tuple(_word(name) for name in fields["classes"]),
                (channels, height, width),
                tuple(float(value) for value in fields["mean"]),
                tuple(float(value) for value in fields["std"]),
                None if rows is None else parse_layers(rows),
                _word(cut) if isinstance(cut, str) else None if cut is None else _integer(cut),
                _word(fields["identity"]),
                _integer(fields["features"]),
                fields.get("bottom"),
            )
            model._check()
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise WireError(f"it does not describe a model: {plain(str(error))}") from error
        return model

    def _check(self) -> None:
        check_images(self.shape, len(self.classes), self.mean, self.std)
        check("features", self.features, Range(1, MAX_OUTPUT))
        if self.bottom is not None and not re.fullmatch(r"[0-9a-f]{32}", str(self.bottom)):
            raise ValueError(f"the bottom's digest is {self.bottom!r:.60}")
        if self.layers is not None and (gives := prod(self._held[-1].gives)) != self.features:
            raise ValueError(f"features = {self.features}, and the bottom gives {gives}")

    @cached_property
    def _placed(self) -> tuple[list[Placed], int]:
        assert self.layers is not None
        table = ModelConfig(layers=self.layers, cut=self.cut)
        return placed_model(table, self.shape, len(self.classes))

    @property
    def _held(self) -> list[Placed]:
        """Return the layers that the device runs."""
        placed, held = self._placed
        return placed[:held]

    def about(self) -> dict[str, Any]:
        """Return what the digest covers: the device's layers and weights, and how images are prepared."""
        layers = named(self.layers or ())[: self._placed[1]]
        return {
            "classify": [layer.model_dump(mode="json") | {"name": name} for name, layer in layers],
            "shape": list(self.shape),
            "mean": list(self.mean),
            "std": list(self.std),
            "bottom": self.bottom,
        }

    @property
    def digest(self) -> str:
        """Return what an owner accepts: ``sha256:`` and 64 hexadecimal digits."""
        text = json.dumps(self.about(), sort_keys=True)
        return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def text_of_model(model: ServedModel) -> str:
    """Return the model as lines of printable text."""
    return "\n".join(map(printable, _lines(model)))


def _lines(model: ServedModel) -> Iterator[str]:
    held = model._held
    yield f"terms       {model.digest}"
    yield "use         classify: this device runs the layers below, the server the rest"
    yield image_line(model.shape, len(model.classes), model.mean, model.std)
    yield (
        f"model       {sum(layer.parameters for layer in held):,} parameters in {counted(len(held), 'layer')}, "
        f"weights {model.bottom}"
    )
    yield from layer_lines(held)
    yield (
        f"leaves      per image {model.features:,} values (an image has {prod(model.shape):,}), once "
        "for every time that it is classified"
    )


def _integer(value: object) -> int:
    if type(value) is not int:
        raise ValueError(f"{value!r:.60} is no whole number")
    return value


def _word(value: object) -> str:
    """Return a short printable text."""
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.60} is no text")
    return plain(value, LONGEST_NAME)
