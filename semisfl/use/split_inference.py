"""Split inference: a device runs the bottom of a trained model, and a server runs the top.

    call        the device sends                    the server answers
    Describe    nothing                             the model that it serves, as JSON (`ServedModel`)
    Bottom      nothing                             a frame with the bottom's weights
    Features    a frame with one batch of features  a frame with the class probabilities

Each call is one unary gRPC call over the mutual TLS of training; frames are those of `semisfl.net.frames`.
A frame is decoded only against the schema that its receiver expects. So the metadata of ``Features``
names the number of rows and the codec.

The images never leave the device, and the server never learns more than the device's policy allows:
features are clipped, get noise and are rounded by a codec, and a ledger on the device counts how often
each image was used and how many bits the server has of it (`semisfl.fleet.caps.Classified`).

This module holds the messages and the device's side; `model_server` holds the server's side.
"""

import contextlib
import hashlib
import json
import math
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any

import grpc
import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from semisfl.data.augment import Normalizer
from semisfl.files import cache_folder, printable
from semisfl.fleet.codec import codec_named
from semisfl.fleet.outgoing import Outgoing
from semisfl.fleet.rows import Encoder
from semisfl.models.build import bottom_of
from semisfl.models.layers import cut_layers
from semisfl.models.shapes import MAX_OUTPUT, Placed, place
from semisfl.net import chunks
from semisfl.net.client.connection import Target, open_channel
from semisfl.net.client.owner import Owner
from semisfl.net.client.rejection import explained, plain
from semisfl.net.client.shown_terms import image_line, layer_lines
from semisfl.net.frames import Schema, TensorSpec, WireError, decode, encode
from semisfl.net.ranges import check_images
from semisfl.runs import checkpoint
from semisfl.settings import lookup
from semisfl.settings.counts import plural
from semisfl.settings.layer_kinds import name_layers, parse_layers
from semisfl.settings.policy import feature_bits
from semisfl.use import onnx_file
from semisfl.use.classifier import Classifier, Predictions, load, predictions
from semisfl.use.pictures import ListedPictures, Pictures, content_digest, list_pictures

SERVICE = "semisfl.Model"
ROWS, CODEC = "semisfl-rows", "semisfl-codec"
"""Metadata keys of a ``Features`` call: the number of images, and the codec of their features."""
MOST_ROWS = 256
"""Most images of one call."""
LARGEST_CALL = 64 * 2**20
"""Most bytes of features in one call."""
LARGEST_REQUEST = LARGEST_CALL + 2**20
"""Most bytes of one request to the server: the features and the frame's header."""
LARGEST_ANSWER = 2**31 - 1
"""Most bytes of one answer to a device, such as a bottom's weights."""
ANSWER_SECONDS = 30.0
"""Timeout of a call, added to the time that its bytes take on the slowest link allowed."""

Name = Annotated[str, Field(max_length=200), AfterValidator(plain)]


class ServedModel(BaseModel):
    """The terms of `classify`: what the device computes and sends. The server sends them as JSON.

    The device's owner accepts them by their `digest`. Numbers are checked against the ranges of
    `semisfl.net.ranges` before anything is built from them.
    """

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)

    classes: tuple[Name, ...]
    """Names of the classes, in the order of the probabilities."""
    shape: tuple[int, int, int]
    """Channels, height and width of an image."""
    mean: tuple[float, ...]
    """Mean of each channel, of pixels between 0 and 1, by which images are normalised."""
    std: tuple[float, ...]
    """Standard deviation of each channel, likewise."""
    layers: list[dict[str, Any]] | None
    """The bottom as a table; None: the user passed code that no table describes."""
    identity: Name
    """Names a model and its cut; a bottom and a top that belong together have the same identity."""
    features: int = Field(ge=1, le=MAX_OUTPUT)
    """Number of features of one image."""
    bottom: str | None = Field(pattern=r"^[0-9a-f]{32}$")
    """The digest of the bottom's weights; None: the server holds the top alone."""

    @classmethod
    def of(cls, model: Classifier) -> "ServedModel":
        """Return the terms under which a server serves ``model``."""
        about, bottom = model.description, model.network.bottom.state_dict()
        return cls(
            classes=about.classes,
            shape=about.shape,
            mean=about.mean,
            std=about.std,
            layers=_named(about.layers or about.bottom_layers)[: len(cut_layers(model.network)[0])]
            or None,
            identity=model.identity,
            features=model.network.features,
            bottom=checkpoint.digest(bottom) if "bottom" in model.parts else None,
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> "ServedModel":
        """Parse the terms that a server sent; raise `WireError` for any value out of its range."""
        try:
            return cls.model_validate_json(text)
        except ValueError as error:
            raise WireError(f"it does not describe a model: {plain(str(error))}") from error

    @model_validator(mode="after")
    def _check(self) -> "ServedModel":
        """Check ranges, and that the layers return the stated number of features: bits are counted by it."""
        check_images(self.shape, len(self.classes), self.mean, self.std)
        if self.layers is not None:
            returned = math.prod(self.device_layers[-1].gives)
            if returned != self.features:
                raise ValueError(f"features = {self.features}, but the bottom returns {returned}")
        return self

    @property
    def downloadable(self) -> bool:
        """Return whether a device can build the bottom from these terms and the server's weights.

        It cannot if the network is code, or if the server was started with the top alone.
        """
        return self.layers is not None and self.bottom is not None

    @cached_property
    def device_layers(self) -> list[Placed]:
        """Return the layers that the device runs, with their shapes."""
        return place(parse_layers(self.layers), self.shape, len(self.classes), whole=False)

    def terms(self) -> dict[str, Any]:
        """Return what the digest covers: the device's layers and weights, and how images are prepared.

        The top, the names of the classes and the identity are the server's own business.
        """
        return {
            "classify": _named(self.layers),
            "shape": list(self.shape),
            "mean": list(self.mean),
            "std": list(self.std),
            "bottom": self.bottom,
        }

    @property
    def digest(self) -> str:
        """Return the text by which an owner accepts these terms: ``sha256:`` and 64 hexadecimal digits."""
        text = json.dumps(self.terms(), sort_keys=True)
        return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def _named(layers: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Return a table in its one canonical form, in which every layer has a name."""
    named = name_layers(parse_layers(layers)) if layers else []
    return [layer.model_dump(mode="json") | {"name": name} for name, layer in named]


def text_of_model(model: ServedModel) -> str:
    """Return the terms as printable text for the owner of a device, as `semisfl inspect` shows them."""
    held = model.device_layers
    parameters = sum(layer.parameters for layer in held)
    lines = [
        f"terms       {model.digest}",
        "use         classify: this device runs the layers below, the server the rest",
        image_line(model.shape, len(model.classes), model.mean, model.std),
        f"model       {parameters:,} parameters in {plural(len(held), 'layer')}, weights {model.bottom}",
        *layer_lines(held),
        f"leaves      per image {model.features:,} values (an image has {math.prod(model.shape):,}), once "
        "for every time that it is classified",
    ]
    return "\n".join(map(printable, lines))


def rows_per_call(features: int, codec: str) -> int:
    """Return how many images with ``features`` values each fit into one call, at least 1."""
    one = codec_named(codec).size((1, features))
    return max(1, min(MOST_ROWS, LARGEST_CALL // max(1, one)))


# --- the device ----------------------------------------------------------------------------------


def read_model(target: Target) -> ServedModel:
    """Ask a server which model it serves.

    Raises `ValueError` if the server refuses, serves no model or sends terms out of their ranges, and
    `OSError` if it cannot be reached.
    """
    with _channel(target) as channel:
        return ServedModel.from_json(_call(channel, target, "Describe", b"", 0))


def _channel(target: Target) -> Any:
    """Open a gRPC channel to a server, with the device's certificate."""
    return open_channel(target.address, target.credentials, chunks.options(LARGEST_ANSWER))


def _call(
    channel: Any,
    target: Target,
    name: str,
    request: bytes,
    expected: int,
    metadata: tuple[tuple[str, str], ...] = (),
) -> bytes:
    """Make one call and return its answer; ``expected`` bytes of it are awaited on the slowest link allowed.

    Raises `ValueError` if the server refuses, and `OSError` if it does not answer in time.
    """
    seconds = ANSWER_SECONDS + (len(request) + expected) / chunks.LOWEST_RATE
    ask = channel.unary_unary(f"/{SERVICE}/{name}")
    try:
        return bytes(ask(request, timeout=seconds, metadata=metadata))
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            raise ValueError(
                f"{target.address} serves no model; is it `semisfl serve --model`?"
            ) from error
        raise explained(error, target.address, secure=target.credentials is not None) from error


class ModelClient(contextlib.AbstractContextManager["ModelClient"]):
    """Classify images of a device with a server's help; the end of a ``with`` block closes the connection.

    All features pass through the owner's policy (`Outgoing`), and every use of an image is written to the
    owner's ledger before its features are sent.
    """

    def __init__(
        self,
        target: Target,
        *,
        codec: str | None = None,
        bottom: Path | None = None,
        owner: Owner | None = None,
    ) -> None:
        """Connect to a server, and get the bottom of its model.

        Args:
            target: the server's address, and the certificate that the device shows.
            codec: the codec of the features; None: the policy's, or fp32 if it names none.
            bottom: a file of `semisfl export --part bottom`, as .safetensors or .onnx. None: download the
                bottom from the server, if the owner has accepted its terms.
            owner: the policy, the ledger and the accepted terms of the device's owner.

        Raises `PolicyBreach` if the terms are not accepted or the codec is finer than the policy's.
        """
        lookup.codec(codec or "fp32")
        self._owner, self._target = owner or Owner(), target
        self._outgoing = Outgoing(self._owner.policy, encode, unpredictable=True)
        self._codec = self._outgoing.codec(codec)
        self.model = read_model(target)
        self._row_bits = feature_bits(self._outgoing.policy, self.model.features)
        self._channel = _channel(target)
        self._encoder = self._read_bottom(bottom) if bottom else self._download_bottom()

    # --- the bottom ------------------------------------------------------------------------------

    def _read_bottom(self, path: Path) -> Encoder:
        """Read the bottom from a file; raise `ValueError` if it is not the bottom of the served model."""
        if path.suffix == ".onnx":
            file = onnx_file.File(path, foreign=True)
            encoder = Encoder(partial(self._run_file, file), lambda images: images, self._outgoing)
            identity = file.identity
        else:
            model = load(path)
            model.need("bottom")
            encoder = Encoder(model.network.bottom, model.normalizer, self._outgoing)
            identity = model.identity
        if identity != self.model.identity:
            raise ValueError(
                f"{path} is not the bottom of the model that {self._target.address} serves, or cut elsewhere; "
                "export it from the same run, with the server's --cut, or leave out --bottom"
            )
        return encoder

    def _download_bottom(self) -> Encoder:
        """Build the bottom from the server's terms, if the owner accepts them, and get its weights."""
        model = self.model
        if model.layers is None or model.bottom is None:
            raise ValueError(
                f"{self._target.address} serves a top alone; give the bottom as a file, --bottom"
            )
        self._owner.approval.check(model.digest)
        with torch.device("meta"):  # tensors there take no memory
            bottom, _ = bottom_of(parse_layers(model.layers), model.shape, len(model.classes))
        bottom.eval().requires_grad_(False)
        bottom.load_state_dict(self._weights(bottom.state_dict(), model.bottom), assign=True)
        return Encoder(bottom, Normalizer.of(model.mean, model.std), self._outgoing)

    def _weights(self, like: dict[str, Tensor], digest: str) -> dict[str, Tensor]:
        """Return the bottom's weights with this digest, from the cache or from the server.

        ``like``: tensors with the shapes and types that the layers need. The cache is a file per digest,
        so each bottom is downloaded once.
        """
        cached = cache_folder() / f"bottom-{digest}.safetensors"
        with contextlib.suppress(checkpoint.CheckpointError, KeyError):
            kept = dict(checkpoint.read(cached)["bottom"])
            if checkpoint.digest(kept) == digest:
                return kept
        specs = {name: TensorSpec(tuple(t.shape), t.dtype) for name, t in like.items()}
        schema = Schema({}, specs)
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

    def _run_file(self, file: onnx_file.File, images: Tensor) -> Tensor:
        """Return the features [n, d] that a file computes from images; raise `ValueError` for another shape or type.

        A file may mix the images of a batch, or return several rows of one image; but bits are counted for one row
        of each image alone.
        """
        alone = images.split(1 if self._row_bits < math.inf else len(images))
        parts = [file(some) for some in alone]
        for some, rows in zip(alone, parts, strict=True):
            expected = (len(some), self.model.features)
            if tuple(rows.shape) != expected or rows.dtype != torch.float32:
                raise ValueError(
                    f"the bottom gives {rows.dtype} {list(rows.shape)}, and {self._target.address} takes "
                    f"torch.float32 {list(expected)}; give the file of the model that it serves"
                )
        return torch.cat(parts)

    # --- asking ----------------------------------------------------------------------------------

    def predict(self, images: Pictures) -> Predictions:
        """Classify images, as `Classifier.predict` does.

        Raises `PolicyBreach`, and sends nothing, if a quota of the policy would be exceeded.
        """
        listed = list_pictures(images)
        self._spend(listed)
        rows = rows_per_call(self.model.features, self._codec)
        return predictions(listed, self.model.shape, self.model.classes, self._answers, rows)

    @property
    def summary(self) -> str:
        """Return one line: how many bits about each image its features carry at most."""
        bound = f"carries at most {self._row_bits:.1f} bits of each image"
        if self._row_bits == math.inf:
            bound = "has no bound in bits: the policy has no noise"
        return f"what was sent {bound}"

    def _spend(self, images: ListedPictures) -> None:
        """Write one use of every image to the owner's ledger; raise `PolicyBreach` beyond a quota."""
        if self._owner.policy.capped:
            digests = [content_digest(image) for image in images]
            self._owner.allowance.take_answers(self._owner.policy, digests, self._row_bits)

    def _answers(self, images: Tensor) -> Tensor:
        """Encode one batch of images, send its features and return the server's probabilities [n, classes]."""
        if not len(images):
            return torch.empty(0, len(self.model.classes))
        rows = self._encoder.plain(images)
        parts = self._outgoing.frame(
            "features", {"identity": self.model.identity}, rows, self._codec
        )
        metadata = ((ROWS, str(len(images))), (CODEC, self._codec))
        probabilities = TensorSpec((len(images), len(self.model.classes)))
        schema = Schema({}, {"probabilities": probabilities})
        answer = _call(
            self._channel, self._target, "Features", b"".join(parts), schema.limit, metadata
        )
        return decode(answer, {"answers": schema}).tensors["probabilities"]

    def __exit__(self, *_: object) -> None:
        self._channel.close()
