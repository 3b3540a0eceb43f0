"""The device of split inference: it runs the bottom, with torch or onnxruntime, and sends features."""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import grpc
import torch
from torch import Tensor

from semisfl.data.augment import Normalizer
from semisfl.engine.inference import outputs
from semisfl.models.split import Shape, SplitModel, build
from semisfl.net import chunks
from semisfl.net.client.diagnosis import NOT_CONNECTED, diagnose
from semisfl.net.client.lines import plain
from semisfl.net.frames import Schema, decode, encode
from semisfl.net.tls.credentials import Credentials
from semisfl.runs import checkpoint
from semisfl.runs.checkpoint import CheckpointError
from semisfl.settings import lookup
from semisfl.settings.layer_kinds import parse_layers
from semisfl.use import onnx_file
from semisfl.use import split_inference as protocol
from semisfl.use.classifier import Pictures, Predictions, predictions
from semisfl.use.model_file import load

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 30.0
"""For an answer, and the time that its bytes take on the slowest link allowed."""
Bottom = Callable[[Tensor], Tensor]
"""uint8 images -> features"""


class ModelClient:
    """Use a server's model from a device. ``bottom`` is a file of `semisfl export --part bottom`.

    Without one the bottom is fetched from the server, once, and kept in the cache. With
    ``send_images`` the images themselves are sent, to a server that accepts them.
    """

    def __init__(
        self,
        address: str,
        certificate: Credentials | None,
        *,
        insecure_loopback: bool = False,
        codec: str = "fp32",
        bottom: Path | None = None,
        send_images: bool = False,
    ) -> None:
        chunks.check_target(address, certificate is not None, insecure_loopback)
        lookup.codec(codec)
        self._address, self._codec = address, codec
        self._certificate = None if insecure_loopback else certificate
        self._channel = self._open()
        self.sent = self.received = 0
        """Bytes of all calls' frames so far, without what gRPC and TLS add."""
        try:
            self._begin(bottom, send_images)
        except BaseException:
            self.close()
            raise

    def _begin(self, bottom: Path | None, send_images: bool) -> None:
        fields = self._ask("Describe", "describe", {}, {}, "model", protocol.MODEL).fields
        model = self._understood(fields["model"])
        self.classes: tuple[str, ...] = model["classes"]
        self.shape: Shape = model["shape"]
        self.identity: str = model["identity"]
        self._features: int = model["features"]
        self._bottom: Bottom | None = None
        if send_images and not fields["images"]:
            raise ValueError(f"{self._address} takes features, no images; leave out --send-images")
        if not send_images:
            self._bottom = self._from_file(bottom) if bottom else self._from_server(model)

    def _understood(self, text: str) -> dict[str, Any]:
        try:
            return protocol.understood(text)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self._address} does not describe a model: {error!r}") from error

    # --- the bottom ------------------------------------------------------------------------------

    def _from_file(self, path: Path) -> Bottom:
        runner: Bottom
        if path.suffix == ".onnx":
            file = onnx_file.File(path)
            identity, part, runner = file.about()["identity"], file.about()["part"], file
        else:
            model = load(path)
            model.need("bottom")
            identity, part, runner = model.identity, "bottom", model.features
        if part != "bottom" or identity != self.identity:
            raise ValueError(
                f"{path} is not the bottom of the model that {self._address} serves, or cut elsewhere; "
                "export it from the same run, with the server's --cut, or leave out --bottom"
            )
        return runner

    def _from_server(self, model: Mapping[str, Any]) -> Bottom:
        """Return the bottom from the cache, or fetch it: the table, its weights and the normalisation."""
        if model["layers"] is None:
            raise ValueError(
                f"the model of {self._address} is described by no layer table; give its bottom as a "
                "file, --bottom"
            )
        layers, classes = parse_layers(model["layers"]), len(self.classes)
        network = build(layers, self.shape, classes, cut=model["cut"], projector="none")
        weights = self._weights(network.bottom.state_dict(), model.get("bottom"))
        network.bottom.load_state_dict(weights)
        return _bottom(network, Normalizer.of(model["mean"], model["std"]))

    def _weights(self, like: dict[str, Tensor], digest: object) -> dict[str, Tensor]:
        """Return the weights with this digest from the cache, or fetch them.

        Copies are kept by what they hold, so that no server can replace another one's.
        """
        cached = _cache_file(str(digest))
        with contextlib.suppress(CheckpointError, KeyError):
            if digest == checkpoint.digest(kept := checkpoint.read(cached)["bottom"]):
                return dict(kept)
        schema = protocol.bottom_schema(like)
        weights: dict[str, Tensor] = self._ask("Fetch", "fetch", {}, {}, "bottom", schema).tensors
        if digest is None:  # a server of an earlier version
            return weights
        if digest != checkpoint.digest(weights):
            raise ValueError(
                f"{self._address} sends another bottom than it describes; do not trust its answers"
            )
        try:
            cached.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            checkpoint.write(cached, {"bottom": weights})
        except OSError as error:
            log.warning("the bottom cannot be kept in %s: %s", cached, error.strerror or error)
        return weights

    # --- asking ----------------------------------------------------------------------------------

    def predict(self, images: Pictures) -> Predictions:
        """Classify images, as `Classifier.predict` does."""
        rows = protocol.rows_at_a_time(self._features, self._codec)
        return predictions(images, self.shape, self.classes, self.probabilities, rows)

    def probabilities(self, images: Tensor) -> Tensor:
        """Return the probabilities [n, classes] of at most MOST_ROWS uint8 images."""
        if not len(images):
            return torch.empty(0, len(self.classes))
        metadata = ((protocol.ROWS, str(len(images))), (protocol.CODEC, self._codec))
        schema = protocol.answers_schema(len(images), len(self.classes))
        fields = {"identity": self.identity}
        if self._bottom is None:
            kinds, tensors = ("Images", "images"), {"images": images}
        else:
            kinds, tensors = ("Features", "features"), {"features": self._bottom(images)}
        frame = self._ask(*kinds, fields, tensors, "answers", schema, metadata)
        return frame.tensors["probabilities"]

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> "ModelClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> grpc.Channel:
        options, files = protocol.options(protocol.LARGEST_BOTTOM), self._certificate
        if files is None:
            return grpc.insecure_channel(self._address, options)
        secure = grpc.ssl_channel_credentials(files.authority, files.key, files.certificate)
        return grpc.secure_channel(self._address, secure, options)

    def _ask(
        self,
        call: str,
        kind: str,
        fields: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        answer: str,
        schema: Schema,
        metadata: tuple[tuple[str, str], ...] = (),
    ) -> Any:
        data = b"".join(encode(kind, fields, tensors, self._codec))
        seconds = PATIENCE_SECONDS + (len(data) + schema.limit) / chunks.LOWEST_RATE
        try:
            reply = self._channel.stream_unary(protocol.method(call))(
                protocol.messages(data), timeout=seconds, metadata=metadata
            )
        except grpc.RpcError as error:
            raise self._reason(error) from error
        self.sent += len(data)
        self.received += len(reply)
        return decode(reply, {answer: schema})

    def _reason(self, error: Any) -> Exception:
        code, details = error.code(), plain(error.details() or "")
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return ValueError(f"{self._address} serves no model; is it `semisfl serve-model`?")
        if code not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            return ValueError(f"{self._address} refuses: {details}")
        finding = None
        if self._certificate is not None and NOT_CONNECTED in details:
            finding = asyncio.run(diagnose(self._address, self._certificate))
        return OSError(finding.reason if finding else f"no answer from {self._address}: {details}")


def _bottom(network: SplitModel, normalizer: Normalizer) -> Bottom:
    network.bottom.eval().requires_grad_(False)

    def run(images: Tensor) -> Tensor:
        return torch.cat(list(outputs(network.bottom, images, normalizer)))

    return run


def _cache_file(digest: str) -> Path:
    place = os.environ.get("SEMISFL_CACHE") or Path.home() / ".cache" / "semisfl"
    name = "".join(letter if letter.isalnum() else "-" for letter in digest)
    return Path(place) / f"bottom-{name[:64]}.safetensors"
