"""The device of split inference: it runs the bottom under its owner's policy and sends features."""

import contextlib
import math
from collections.abc import Callable
from pathlib import Path

import grpc
import torch
from torch import Tensor

from semisfl.data.augment import Normalizer
from semisfl.engine.inference import outputs
from semisfl.files import cache_folder
from semisfl.fleet.outgoing import Outgoing
from semisfl.models.build import build
from semisfl.net import chunks
from semisfl.net.client.connection import Target, open_channel
from semisfl.net.client.owner import Owner
from semisfl.net.client.rejection import explained
from semisfl.net.frames import decode, encode
from semisfl.net.headers import WireError
from semisfl.runs import checkpoint
from semisfl.runs.checkpoint import CheckpointError
from semisfl.settings import lookup
from semisfl.settings.bits import feature_bits
from semisfl.settings.layer_kinds import parse_layers
from semisfl.use import onnx_file
from semisfl.use import split_inference as protocol
from semisfl.use.classifier import Predictions, load, predictions
from semisfl.use.pictures import ListedPictures, Pictures, content_digest, list_pictures
from semisfl.use.split_inference import ServedModel

PATIENCE_SECONDS = 30.0
"""For an answer, beside the time that its bytes take on the slowest link allowed."""
LARGEST_ANSWER = 2**31 - 1
"""Bytes of one answer, such as a bottom's weights."""

Bottom = Callable[[Tensor], Tensor]
"""uint8 images [n, C, H, W] -> features [n, d]"""


def read_model(target: Target) -> ServedModel:
    """Return the model that a server serves; raise `ValueError` or `OSError` with the reason if there is none."""
    with _channel(target) as channel:
        answer = _call(channel, target, "Describe", b"", 0)
    try:
        return ServedModel.from_json(answer)
    except WireError as error:
        raise ValueError(f"{target.address}: {error}") from error


def _channel(target: Target) -> grpc.Channel:
    channel: grpc.Channel
    channel = open_channel(target.address, target.credentials, chunks.options(LARGEST_ANSWER))
    return channel


def _call(
    channel: grpc.Channel,
    target: Target,
    name: str,
    request: bytes,
    expected: int,
    metadata: tuple[tuple[str, str], ...] = (),
) -> bytes:
    """Return the answer to one call, of about ``expected`` bytes."""
    seconds = PATIENCE_SECONDS + (len(request) + expected) / chunks.LOWEST_RATE
    ask = channel.unary_unary(f"/{protocol.SERVICE}/{name}")
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
        with contextlib.suppress(CheckpointError, KeyError):
            kept = dict(checkpoint.read(cached)["bottom"])
            if checkpoint.digest(kept) == digest:
                return kept
        schema = protocol.bottom_schema(like)
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
        rows = protocol.rows_per_call(self.model.features, self._codec)
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
        policy = self._owner.policy
        if policy.uses_per_image is not None or policy.bits_per_image is not None:
            digests = [content_digest(image) for image in images]
            self._owner.allowance.take_answers(policy, digests, self._row_bits)

    def _answers(self, images: Tensor) -> Tensor:
        """Return the server's probabilities for one batch of images."""
        if not len(images):
            return torch.empty(0, len(self.model.classes))
        rows = self._outgoing.answerable(self._checked(self._bottom(images), len(images)))
        fields = {"identity": self.model.identity}
        request = b"".join(self._outgoing.frame("features", fields, rows, self._codec))
        metadata = ((protocol.ROWS, str(len(images))), (protocol.CODEC, self._codec))
        schema = protocol.answers_schema(len(images), len(self.model.classes))
        answer = _call(self._channel, self._target, "Features", request, schema.limit, metadata)
        return decode(answer, {"answers": schema}).tensors["probabilities"]

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def __enter__(self) -> "ModelClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
