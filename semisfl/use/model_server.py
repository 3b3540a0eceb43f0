"""The server of split inference: it holds the top of a model and receives features, never images."""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import unquote

import grpc
import torch

from semisfl.fleet.setup import NetworkOptions
from semisfl.net import chunks, hostport
from semisfl.net.frames import WireError, decode, encode
from semisfl.net.server.admission import Refused, audit, cleaned
from semisfl.net.server.trust import Trust
from semisfl.settings import lookup
from semisfl.settings.config import ConfigError
from semisfl.use import split_inference as protocol
from semisfl.use.classifier import Classifier

MOST_CALLS = 64
"""Calls in progress; gRPC refuses further ones for now."""
KEEPALIVE = {"keepalive_time_ms": 30_000, "keepalive_timeout_ms": 60_000}
"""A device that is gone is noticed after these. A slow link may have to carry other bytes before the answer."""
GOODBYE_SECONDS = 2.0
"""Most time for calls in progress to end when the server stops."""

Answer = Callable[[bytes, grpc.ServicerContext, str], bytes]
"""(request, context, the device's name) -> the answer's bytes."""


class ModelServer:
    """Answer devices from now until `close`. One call is computed at a time: torch uses all cores for it."""

    def __init__(self, model: Classifier, network: NetworkOptions) -> None:
        hostport.check_listen(network)
        model.need("top")
        self._model = model
        self.served = protocol.ServedModel.of(model)
        """The model as devices see it."""
        self.answered: Counter[str] = Counter()
        """Images so far, by the device's name."""
        insecure, folder = network.insecure_loopback, network.certificates
        self._trust = None if insecure or folder is None else Trust(folder)
        # Tiny features would slow a CPU down tenfold.
        worker = ThreadPoolExecutor(1, "semisfl-model", torch.set_flush_denormal, (True,))
        self._server = grpc.server(
            worker,
            maximum_concurrent_rpcs=MOST_CALLS,
            options=chunks.options(protocol.LARGEST_REQUEST, so_reuseport=0, **KEEPALIVE),
        )
        answers: dict[str, Answer] = {
            "Describe": self._describe,
            "Bottom": self._bottom,
            "Features": self._features,
        }
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(self._guarded(answer))
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
        self._server.stop(GOODBYE_SECONDS).wait()

    def _guarded(self, answer: Answer) -> Callable[[bytes, grpc.ServicerContext], bytes]:
        """Return ``answer`` for devices with access. A refusal is a gRPC status with its reason, and an audit line."""

        def call(request: bytes, context: grpc.ServicerContext) -> bytes:
            device = "?"
            try:
                if self._trust is not None:
                    certificate = self._trust.certificate_of(context)
                    device = certificate.name
                    self._trust.admit(certificate)
                return answer(request, context, device)
            except Refused as refusal:
                code, reason = refusal.code, refusal.reason
            except ValueError as error:
                code, reason = grpc.StatusCode.INVALID_ARGUMENT, str(error)
            audit(unquote(context.peer()), device, cleaned(reason))
            context.abort(code, reason)
            raise AssertionError  # abort raised

        return call

    def _describe(self, *_: object) -> bytes:
        return self.served.model_dump_json().encode()

    def _bottom(self, *_: object) -> bytes:
        if self.served.bottom is None:
            raise WireError("this server holds the top alone; give the bottom's file (--bottom)")
        return b"".join(encode("bottom", {}, self._model.network.bottom.state_dict()))

    def _features(self, request: bytes, context: grpc.ServicerContext, device: str) -> bytes:
        metadata = dict(context.invocation_metadata())
        rows, codec = int(metadata.get(protocol.ROWS, "0")), metadata.get(protocol.CODEC, "")
        lookup.codec(codec)
        schema = protocol.features_schema(rows, self.served.features, codec)
        frame = decode(request, {"features": schema})
        if frame.fields["identity"] != self.served.identity:
            raise WireError(
                "the device's bottom is not the other half of this server's model (or it is cut "
                "elsewhere); give it the bottom of the same export, or none"
            )
        features = frame.tensors["features"]
        if not torch.isfinite(features).all():
            raise WireError("features hold NaN or Inf")
        probabilities = self._model.answer(features)
        self.answered[device] += rows
        return b"".join(encode("answers", {}, {"probabilities": probabilities}))
