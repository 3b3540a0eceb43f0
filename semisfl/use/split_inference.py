"""Split inference: a device runs the bottom of a trained model, and a server runs the top.

    call        the device sends                    the server answers
    Describe    nothing                             the model that it serves, as JSON (`ServedModel`)
    Bottom      nothing                             a frame with the bottom's weights
    Features    a frame with one batch of features  a frame with the class probabilities

Each call is one unary gRPC call over the mutual TLS of training; frames are those of `semisfl.net.frames`.
A frame is decoded only against the schema that its receiver expects. So the metadata of ``Features``
names the number of rows and the codec. Here are the messages and the device's side; `model_server` has
the other one.
"""

import contextlib
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import grpc
import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from semisfl.data.augment import Normalizer
from semisfl.engine.inference import outputs
from semisfl.files import cache_folder, printable
from semisfl.fleet.codec import codec_named
from semisfl.fleet.outgoing import Outgoing
from semisfl.models.build import build
from semisfl.models.shapes import MAX_OUTPUT, Placed
from semisfl.net import chunks
from semisfl.net.client.connection import Target, open_channel
from semisfl.net.client.owner import Owner
from semisfl.net.client.rejection import explained, plain
from semisfl.net.client.shown_terms import image_line, layer_lines
from semisfl.net.frames import Schema, TensorSpec, WireError, decode, encode
from semisfl.net.ranges import check_images
from semisfl.net.terms import placed_model
from semisfl.runs import checkpoint
from semisfl.settings import lookup
from semisfl.settings.bits import feature_bits
from semisfl.settings.counts import counted
from semisfl.settings.layer_kinds import named, parse_layers
from semisfl.settings.run import ModelConfig
from semisfl.use import onnx_file
from semisfl.use.classifier import Classifier, Predictions, load, predictions
from semisfl.use.pictures import ListedPictures, Pictures, content_digest, list_pictures

SERVICE = "semisfl.Model"
ROWS, CODEC = "semisfl-rows", "semisfl-codec"
"""Metadata keys of a ``Features`` call."""
MOST_ROWS = 256
"""Images of one call."""
LARGEST_CALL = 64 * 2**20
"""Bytes of features in one call."""
LARGEST_REQUEST = LARGEST_CALL + 2**20
"""Bytes of one request to the server: features and the frame's header."""

PATIENCE_SECONDS = 30.0
"""For an answer, beside the time that its bytes take on the slowest link allowed."""
LARGEST_ANSWER = 2**31 - 1
"""Bytes of one answer, such as a bottom's weights."""

Bottom = Callable[[Tensor], Tensor]
"""uint8 images [n, C, H, W] -> features [n, d]"""

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
            and (gives := math.prod(self.device_layers[-1].gives)) != self.features
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
        f"leaves      per image {model.features:,} values (an image has {math.prod(model.shape):,}), once "
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


# --- the device ----------------------------------------------------------------------------------


def read_model(target: Target) -> ServedModel:
    """Return the model that a server serves; raise `ValueError` or `OSError` with the reason if there is none."""
    with _channel(target) as channel:
        answer = _call(channel, target, "Describe", b"", 0)
    return ServedModel.from_json(answer)


def _channel(target: Target) -> Any:
    return open_channel(target.address, target.credentials, chunks.options(LARGEST_ANSWER))


def _call(
    channel: Any,
    target: Target,
    name: str,
    request: bytes,
    expected: int,
    metadata: tuple[tuple[str, str], ...] = (),
) -> bytes:
    """Return the answer to one call, of about ``expected`` bytes."""
    seconds = PATIENCE_SECONDS + (len(request) + expected) / chunks.LOWEST_RATE
    ask = channel.unary_unary(f"/{SERVICE}/{name}")
    try:
        return bytes(ask(request, timeout=seconds, metadata=metadata))
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            raise ValueError(
                f"{target.address} serves no model; is it `semisfl serve --model`?"
            ) from error
        raise explained(error, target.address, secure=target.credentials is not None) from error


class ModelClient:
    """Use a server's model from a device.

    The bottom is downloaded from the server, if the ``owner`` accepts its terms, and kept in the cache; or
    ``bottom`` is a file of `semisfl export --part bottom`. All that leaves passes the owner's policy.
    ``codec``: that of the features; None: the policy's, else fp32.
    """

    def __init__(
        self,
        target: Target,
        *,
        codec: str | None = None,
        bottom: Path | None = None,
        owner: Owner | None = None,
    ) -> None:
        lookup.codec(codec or "fp32")
        self._owner, self._target = owner or Owner(), target
        self._outgoing = Outgoing(self._owner.policy, encode, unpredictable=True)
        self._codec = self._outgoing.codec(codec)
        self.model = read_model(target)
        self._row_bits = feature_bits(self._outgoing.policy, self.model.features)
        self._channel = _channel(target)
        self._bottom = self._read_bottom(bottom) if bottom else self._download_bottom()

    # --- the bottom ------------------------------------------------------------------------------

    def _read_bottom(self, path: Path) -> Bottom:
        """Return the bottom of a file; raise `ValueError` if it is not that of the served model."""
        runner: Bottom
        if path.suffix == ".onnx":
            file = onnx_file.File(path, foreign=True)
            # A file may mix the images of a batch, and bits are counted for each image alone.
            runner = self._one_by_one(file) if self._row_bits < math.inf else file
            identity = file.identity
        else:
            model = load(path)
            runner, identity = model.features, model.identity
        if identity != self.model.identity:
            raise ValueError(
                f"{path} is not the bottom of the model that {self._target.address} serves, or cut elsewhere; "
                "export it from the same run, with the server's --cut, or leave out --bottom"
            )
        return runner

    def _download_bottom(self) -> Bottom:
        """Return the bottom that the server's terms describe, with its weights, once the owner accepts them."""
        model = self.model
        if model.layers is None or model.bottom is None:
            raise ValueError(
                f"{self._target.address} serves a top alone; give the bottom as a file, --bottom"
            )
        self._owner.approval.check(model.digest)
        layers = parse_layers(model.layers)
        # Tensors on "meta" take no memory: the top, which stays on the server, is never allocated.
        with torch.device("meta"):
            network = build(
                layers, model.shape, len(model.classes), cut=model.cut, projector="none"
            )
        bottom = network.bottom.eval().requires_grad_(False)
        bottom.load_state_dict(self._weights(bottom.state_dict(), model.bottom), assign=True)
        normalizer = Normalizer.of(model.mean, model.std)
        return lambda images: torch.cat(list(outputs(bottom, images, normalizer)))

    def _weights(self, like: dict[str, Tensor], digest: str) -> dict[str, Tensor]:
        """Return the weights with this digest, from the cache or from the server."""
        cached = cache_folder() / f"bottom-{digest}.safetensors"
        with contextlib.suppress(checkpoint.CheckpointError, KeyError):
            kept = dict(checkpoint.read(cached)["bottom"])
            if checkpoint.digest(kept) == digest:
                return kept
        schema = bottom_schema(like)
        answer = _call(self._channel, self._target, "Bottom", b"", schema.limit)
        weights = decode(answer, {"bottom": schema}).tensors
        if checkpoint.digest(weights) != digest:
            raise ValueError(
                f"{self._target.address} sends another bottom than it describes; try again if its model "
                "was replaced meanwhile"
            )
        with contextlib.suppress(OSError):  # it is downloaded again then
            cached.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            checkpoint.write(cached, {"bottom": weights}, private=True)
        return weights

    def _one_by_one(self, bottom: Bottom) -> Bottom:
        return lambda images: torch.cat([self._checked(bottom(one), 1) for one in images.split(1)])

    def _checked(self, rows: Tensor, count: int) -> Tensor:
        """Return the bottom's ``rows``; raise `ValueError` unless they are as the bits were counted for."""
        expected = (count, self.model.features)
        if tuple(rows.shape) != expected or rows.dtype != torch.float32:
            raise ValueError(
                f"the bottom gives {rows.dtype} {list(rows.shape)}, and {self._target.address} takes "
                f"torch.float32 {list(expected)}; give the file of the model that it serves"
            )
        return rows

    # --- asking ----------------------------------------------------------------------------------

    def predict(self, images: Pictures) -> Predictions:
        """Classify images, as `Classifier.predict` does; raise `PolicyBreach` beyond the policy's caps."""
        listed = list_pictures(images)
        self._spend(listed)
        rows = rows_per_call(self.model.features, self._codec)
        return predictions(listed, self.model.shape, self.model.classes, self._answers, rows)

    def probabilities(self, images: Tensor) -> Tensor:
        """Return the probabilities [n, classes] of at most MOST_ROWS uint8 images."""
        self._spend(images)
        return self._answers(images)

    @property
    def carried(self) -> str:
        """Return what a row of features carries about its image, in one line."""
        if self._row_bits == math.inf:
            return "what was sent has no bound in bits: the policy has no noise"
        return f"what was sent carries at most {self._row_bits:.1f} bits of each image"

    def _spend(self, images: ListedPictures) -> None:
        """Count one use of every image, on disk before anything is sent."""
        if self._owner.policy.capped:
            digests = [content_digest(image) for image in images]
            self._owner.allowance.take_answers(self._owner.policy, digests, self._row_bits)

    def _answers(self, images: Tensor) -> Tensor:
        """Return the server's probabilities for one batch of images."""
        if not len(images):
            return torch.empty(0, len(self.model.classes))
        rows = self._outgoing.answerable(self._checked(self._bottom(images), len(images)))
        fields = {"identity": self.model.identity}
        request = b"".join(self._outgoing.frame("features", fields, rows, self._codec))
        metadata = ((ROWS, str(len(images))), (CODEC, self._codec))
        schema = answers_schema(len(images), len(self.model.classes))
        answer = _call(self._channel, self._target, "Features", request, schema.limit, metadata)
        return decode(answer, {"answers": schema}).tensors["probabilities"]

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def __enter__(self) -> "ModelClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
