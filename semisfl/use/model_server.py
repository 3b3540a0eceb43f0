"""The server of split inference: it holds the top of a model, and answers features with class probabilities.

Each device shows a certificate of the authority, and may not be revoked. gRPC's own limits bound the size of
a request and the number of calls; `semisfl.use.split_inference` describes the messages.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import unquote

import grpc
import torch

from semisfl.fleet.setup import NetworkOptions
from semisfl.net import chunks, hostport
from semisfl.net.frames import Schema, TensorSpec, WireError, decode, encode
from semisfl.net.server.admission import Refused, audit, cleaned
from semisfl.net.server.trust import Trust
from semisfl.settings import catalog
from semisfl.settings.config import ConfigError
from semisfl.use import split_inference as protocol
from semisfl.use.classifier import Classifier

MOST_CALLS = 64
"""Most calls in progress; gRPC refuses further ones, and the device may try again."""
KEEPALIVE = {"keepalive_time_ms": 30_000, "keepalive_timeout_ms": 60_000}
"""After so many milliseconds of silence gRPC pings a device, and disconnects it if no answer comes.

The answer waits behind whatever a slow link still has to carry, so the timeout is long.
"""
STOP_SECONDS = 2.0
"""Most time for calls in progress to end when the server stops."""

Answer = Callable[[bytes, grpc.ServicerContext], bytes]
"""A function of a request's bytes and its context that returns the answer's bytes."""


class ModelServer:
    """A server that answers devices from its construction until `close`.

    Each call has a thread, which waits for its request: a slow device delays no other. One call is computed at
    a time, because torch uses all cores for it.
    """

    def __init__(self, model: Classifier, network: NetworkOptions) -> None:
        """Listen at ``network.listen`` and serve ``model``, or its top if its file holds the top alone.

        Raises `ConfigError` for an address that cannot be used, and for missing or expired certificates.
        """
        hostport.check_listen(network)
        model.need("top")
        self._model = model
        self.served = protocol.ServedModel.of(model)
        """The terms of the model, as devices get them."""
        self.images = 0
        """Number of images that were classified so far."""
        secure = network.certificates if not network.insecure_loopback else None
        self._trust = Trust(secure) if secure is not None else None
        self._computing = threading.Lock()
        # Without flushing, features near 0 (below 1e-38) would slow a CPU down tenfold.
        threads = ThreadPoolExecutor(MOST_CALLS, "classify", torch.set_flush_denormal, (True,))
        self._server = grpc.server(
            threads,
            maximum_concurrent_rpcs=MOST_CALLS,
            options=chunks.options(protocol.LARGEST_REQUEST, so_reuseport=0, **KEEPALIVE),
        )
        answers: dict[str, Answer] = {
            "Describe": self._describe,
            "Bottom": self._bottom,
            "Features": self._features,
        }
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(self._guard(answer))
            for name, answer in answers.items()
        }
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(protocol.SERVICE, handlers),)
        )
        try:
            self.port = (
                self._server.add_insecure_port(network.listen)
                if self._trust is None
                else self._server.add_secure_port(network.listen, self._trust.server_credentials())
            )
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen on {network.listen}; choose another address or port"
            ) from error
        self._server.start()

    def close(self) -> None:
        """Stop listening, and allow calls in progress a moment to finish."""
        self._server.stop(STOP_SECONDS).wait()

    def _guard(self, answer: Answer) -> Answer:
        """Return a gRPC handler that calls ``answer`` for devices with access.

        A refused request gets a gRPC status with the reason, and a line in the audit log.
        """

        def call(request: bytes, context: grpc.ServicerContext) -> bytes:
            device = "?"
            try:
                if self._trust is not None:
                    certificate = self._trust.certificate_of(context)
                    device = certificate.name
                    self._trust.admit(certificate)
                return answer(request, context)
            except Refused as refusal:
                code, reason = refusal.code, refusal.reason
            except ValueError as error:
                code, reason = grpc.StatusCode.INVALID_ARGUMENT, str(error)
            audit(unquote(context.peer()), device, cleaned(reason))
            context.abort(code, reason)
            raise AssertionError  # abort raised

        return call

    def _describe(self, *_: object) -> bytes:
        """Answer ``Describe`` with the terms."""
        return self.served.model_dump_json().encode()

    def _bottom(self, *_: object) -> bytes:
        """Answer ``Bottom`` with the weights."""
        if self.served.bottom is None:
            raise WireError("this server holds the top alone; give the bottom's file (--bottom)")
        return b"".join(encode("bottom", {}, self._model.network.bottom.state_dict()))

    def _features(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        """Answer ``Features`` with the class probabilities that the top computes."""
        metadata = dict(context.invocation_metadata())
        rows, codec = int(metadata.get(protocol.ROWS, "0")), metadata.get(protocol.CODEC, "")
        if codec not in catalog.CODECS:
            raise WireError(f"codec {codec!r:.80} is not known here")
        spec = TensorSpec((rows, self.served.features), torch.float32, codec)
        frame = decode(request, {"features": Schema({"identity": str}, {"features": spec})})
        if frame.fields["identity"] != self.served.identity:
            raise WireError(
                "the device's bottom is not the other half of this server's model (or it is cut "
                "elsewhere); give it the bottom of the same export, or none"
            )
        features = frame.tensors["features"]
        if not torch.isfinite(features).all():
            raise WireError("features hold NaN or Inf")
        with self._computing:
            probabilities = self._model.answer(features)
            self.images += rows
        return b"".join(encode("answers", {}, {"probabilities": probabilities}))
