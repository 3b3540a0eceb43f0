"""Split inference: a device runs the bottom of a trained model, and a server runs the top.

    call        the device sends                    the server answers
    Describe    nothing                             the model that it serves, as JSON (`ServedModel`)
    Bottom      nothing                             a frame with the bottom's weights
    Features    a frame with one batch of features  a frame with the class probabilities

Each call is one unary gRPC call over the mutual TLS of training; frames are those of `semisfl.net.frames`.
A frame is decoded only against the schema that its receiver expects. So the metadata of ``Features``
names the number of rows and the codec.
"""

import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from math import prod
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from semisfl.files import printable
from semisfl.fleet.codec import codec_named
from semisfl.models.shapes import MAX_OUTPUT, Placed
from semisfl.net.client.rejection import plain
from semisfl.net.client.shown_terms import image_line, layer_lines
from semisfl.net.frames import Schema, TensorSpec
from semisfl.net.headers import WireError
from semisfl.net.ranges import check_images
from semisfl.net.terms import placed_model
from semisfl.runs import checkpoint
from semisfl.settings.counts import counted
from semisfl.settings.layer_kinds import named, parse_layers
from semisfl.settings.run import ModelConfig
from semisfl.use.classifier import Classifier

SERVICE = "semisfl.Model"
ROWS, CODEC = "semisfl-rows", "semisfl-codec"
"""Metadata keys of a ``Features`` call."""
MOST_ROWS = 256
"""Images of one call."""
LARGEST_CALL = 64 * 2**20
"""Bytes of features in one call."""
LARGEST_REQUEST = LARGEST_CALL + 2**20
"""Bytes of one request to the server: features and the frame's header."""

Name = Annotated[str, Field(max_length=200), AfterValidator(plain)]


class ServedModel(BaseModel):
    """The terms of `classify`: what the device computes and sends. The server states them as JSON."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)

    classes: tuple[Name, ...]
    shape: tuple[int, int, int]
    """Channels, height and width of an image."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    layers: list[dict[str, Any]] | None
    """The whole model as a table; None: the user passed code that no table describes."""
    cut: int | Name | None
    identity: Name
    """Equal for the bottom and the top of one model, cut at one layer."""
    features: int = Field(ge=1, le=MAX_OUTPUT)
    """Values of one row."""
    bottom: str | None = Field(pattern=r"^[0-9a-f]{32}$")
    """The digest of the bottom's weights; None: the server holds the top alone."""

    @classmethod
    def of(cls, model: Classifier) -> "ServedModel":
        """Return the terms under which a server serves ``model``."""
        about = model.description
        has_bottom = "bottom" in model.parts
        return cls(
            classes=about.classes,
            shape=about.shape,
            mean=about.mean,
            std=about.std,
            layers=about.layers,
            cut=about.cut,
            identity=model.identity,
            features=model.network.features,
            bottom=checkpoint.digest(model.network.bottom.state_dict()) if has_bottom else None,
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> "ServedModel":
        """Return the terms that a server states; raise `WireError` for any value out of its range."""
        try:
            return cls.model_validate_json(text)
        except ValueError as error:
            raise WireError(f"it does not describe a model: {plain(str(error))}") from error

    @model_validator(mode="after")
    def _check(self) -> "ServedModel":
        check_images(self.shape, len(self.classes), self.mean, self.std)
        if (
            self.layers is not None
            and (gives := prod(self.device_layers[-1].gives)) != self.features
        ):
            raise ValueError(f"features = {self.features}, and the bottom gives {gives}")
        return self

    @property
    def downloadable(self) -> bool:
        """Return whether a device can build the bottom from these terms and the server's weights."""
        return self.layers is not None and self.bottom is not None

    @cached_property
    def device_layers(self) -> list[Placed]:
        """Return the layers that the device runs, with their shapes."""
        table = ModelConfig(layers=parse_layers(self.layers), cut=self.cut)
        placed, held = placed_model(table, self.shape, len(self.classes))
        return placed[:held]

    def terms(self) -> dict[str, Any]:
        """Return what the digest covers: the device's layers and weights, and how images are prepared."""
        layers = named(parse_layers(self.layers or []))
        held = layers[: len(self.device_layers)] if self.layers else []
        return {
            "classify": [layer.model_dump(mode="json") | {"name": name} for name, layer in held],
            "shape": list(self.shape),
            "mean": list(self.mean),
            "std": list(self.std),
            "bottom": self.bottom,
        }

    @property
    def digest(self) -> str:
        """Return what an owner accepts: ``sha256:`` and 64 hexadecimal digits."""
        text = json.dumps(self.terms(), sort_keys=True)
        return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def text_of_model(model: ServedModel) -> str:
    """Return the terms as lines of printable text, for the owner of a device."""
    held = model.device_layers
    parameters = sum(layer.parameters for layer in held)
    lines = [
        f"terms       {model.digest}",
        "use         classify: this device runs the layers below, the server the rest",
        image_line(model.shape, len(model.classes), model.mean, model.std),
        f"model       {parameters:,} parameters in {counted(len(held), 'layer')}, weights {model.bottom}",
        *layer_lines(held),
        f"leaves      per image {model.features:,} values (an image has {prod(model.shape):,}), once "
        "for every time that it is classified",
    ]
    return "\n".join(map(printable, lines))


def features_schema(rows: int, features: int, codec: str) -> Schema:
    """Return the schema of a request with ``rows`` rows of ``features`` values."""
    spec = TensorSpec((rows, features), torch.float32, codec)
    return Schema({"identity": str}, {"features": spec})


def answers_schema(rows: int, classes: int) -> Schema:
    """Return the schema of the answer: class probabilities [rows, classes]."""
    return Schema({}, {"probabilities": TensorSpec((rows, classes))})


def bottom_schema(state: Mapping[str, Tensor]) -> Schema:
    """Return the schema of a bottom's weights, which have the shapes and types of ``state``."""
    specs = {name: TensorSpec(tuple(t.shape), t.dtype) for name, t in state.items()}
    return Schema({}, specs)


def rows_per_call(features: int, codec: str) -> int:
    """Return how many images fit into one call."""
    one = codec_named(codec).size((1, features))
    return max(1, min(MOST_ROWS, LARGEST_CALL // max(1, one)))
