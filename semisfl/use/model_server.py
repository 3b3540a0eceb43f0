"""The server of split inference: it holds the top, and never an image unless it says that it takes them."""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import torch
from torch import Tensor

from semisfl import lookup
from semisfl.config import ConfigError
from semisfl.fleet.setup import NetworkOptions
from semisfl.net import chunks
from semisfl.net.frames import Frame, Schema, WireError, decode, encode
from semisfl.net.server.admission import HANDSHAKE_SECONDS, Refused, audit
from semisfl.net.server.trust import Trust
from semisfl.use import split_inference as said
from semisfl.use.classifier import Classifier

log = logging.getLogger(__name__)

WORKERS = 4
MOST_WAITING = 64
"""Calls under way; further ones are told to come again."""
GOODBYE_SECONDS = 2.0


Answer = tuple[bytes, int]
"""A frame, and how many images it answers for."""


class ModelServer:
    """Answers until `close`."""

    def __init__(
        self, model: Classifier, network: NetworkOptions, *, accept_images: bool = False
    ) -> None:
        chunks.check_listen(network)
        model.need("top")
        if accept_images:
            model.need("bottom")
        self._model, self._accept_images = model, accept_images
        insecure, folder = network.insecure_loopback, network.certificates
        self._trust = None if insecure or folder is None else Trust(folder)
        self.answered: Counter[str] = Counter()
        """Images so far, by who asked."""
        self._computing = threading.Lock()
        self._server = grpc.server(
            ThreadPoolExecutor(WORKERS, "semisfl-model"),
            options=[
                *said.options(said.LARGEST_CALL),
                ("grpc.so_reuseport", 0),
                ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_SECONDS * 1000)),
            ],
            maximum_concurrent_rpcs=MOST_WAITING,
        )
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(self._guarded(answer))
            for name, answer in (
                ("Describe", self._describe),
                ("Fetch", self._fetch),
                ("Features", self._features),
                ("Images", self._images),
            )
        }
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(said.SERVICE, handlers),)
        )
        self.port = self._bind(network.listen)
        self._server.start()

    def _bind(self, listen: str) -> int:
        try:
            if self._trust is None:
                return int(self._server.add_insecure_port(listen))
            trust = self._trust
            credentials = grpc.dynamic_ssl_server_credentials(
                trust.configuration(), trust.renewed, True
            )
            return int(self._server.add_secure_port(listen, credentials))
        except RuntimeError as error:
            self._server.stop(None)
            raise ConfigError(
                f"cannot listen on {listen}: {error}; choose another address or port"
            ) from error

    def close(self) -> None:
        """Finish what is under way, for a moment, and stop listening."""
        self._server.stop(GOODBYE_SECONDS).wait()

    # --- calls -----------------------------------------------------------------------------------

    def _guarded(self, answer: Callable[[bytes, Mapping[str, str]], Answer]) -> Any:
        """``answer`` for those who may ask; a refusal is a status with its reason, and an audit line."""

        def call(data: bytes, context: grpc.ServicerContext) -> bytes:
            identity = "?"
            try:
                if self._trust is not None:
                    shown = self._trust.shown(context)
                    identity = shown.name
                    self._trust.admit(shown)
                metadata = {
                    key: value
                    for key, value in context.invocation_metadata()
                    if isinstance(value, str)
                }
                told, images = answer(data, metadata)
                self.answered[identity] += images
                return told
            except Refused as refusal:
                code, reason = refusal.code, refusal.reason
            except (WireError, ValueError) as error:
                code, reason = grpc.StatusCode.INVALID_ARGUMENT, str(error)
            audit(context.peer(), identity, reason)
            context.abort(code, reason)
            raise AssertionError("abort raises")

        return call

    def _describe(self, data: bytes, _: Mapping[str, str]) -> Answer:
        decode(data, {"describe": said.DESCRIBE})
        model = self._model
        told = said.told(model.description, model.identity, model.network.features)
        return _joined("model", {"model": told, "images": self._accept_images}, {}), 0

    def _fetch(self, data: bytes, _: Mapping[str, str]) -> Answer:
        decode(data, {"fetch": said.FETCH})
        if "bottom" not in self._model.parts:
            raise Refused(
                grpc.StatusCode.FAILED_PRECONDITION,
                "this server holds the top alone; give the bottom's file (--bottom)",
            )
        return _joined("bottom", {}, self._model.network.bottom.state_dict()), 0

    def _features(self, data: bytes, metadata: Mapping[str, str]) -> Answer:
        rows, codec = _rows(metadata), metadata.get(said.CODEC, "")
        if codec not in lookup.codec_names():
            raise WireError(f"codec {codec!r:.40} is not known; use one of {_codecs()}")
        schema = said.features_schema(rows, self._model.network.features, codec)
        features = self._decoded(data, "features", schema).tensors["features"]
        if not torch.isfinite(features).all():
            raise WireError("features hold NaN or Inf")
        return self._answers(self._model.answer, features)

    def _images(self, data: bytes, metadata: Mapping[str, str]) -> Answer:
        if not self._accept_images:
            raise Refused(
                grpc.StatusCode.PERMISSION_DENIED,
                "this server takes features, no images; start it with --accept-images",
            )
        schema = said.images_schema(_rows(metadata), self._model.shape)
        images = self._decoded(data, "images", schema).tensors["images"]
        return self._answers(self._model.probabilities, images)

    def _decoded(self, data: bytes, kind: str, schema: Schema) -> Frame:
        frame = decode(data, {kind: schema})
        if frame.fields["identity"] != self._model.identity:
            raise Refused(
                grpc.StatusCode.FAILED_PRECONDITION,
                "the device's bottom is not the other half of this server's model (or it is cut "
                "elsewhere); give it the bottom of the same export, or none",
            )
        return frame

    def _answers(self, answer: Callable[[Tensor], Tensor], given: Tensor) -> Answer:
        with self._computing:
            probabilities = answer(given)
        return _joined("answers", {}, {"probabilities": probabilities}), len(given)


def _joined(kind: str, fields: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    return b"".join(encode(kind, fields, tensors))


def _rows(metadata: Mapping[str, str]) -> int:
    text = metadata.get(said.ROWS, "")
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= said.MOST_ROWS):
        raise WireError(f"{said.ROWS} = {text!r:.40}; a call has 1 to {said.MOST_ROWS} images")
    return int(text)


def _codecs() -> str:
    return ", ".join(lookup.codec_names())
