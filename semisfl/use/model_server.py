"""The server of split inference: it holds the top, and receives no images unless it was started to accept them."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any
from urllib.parse import unquote

import grpc
import grpc.aio
import torch
from torch import Tensor

from semisfl.fleet.setup import NetworkOptions
from semisfl.net import chunks, hostport
from semisfl.net.chunks import LoopThread
from semisfl.net.frames import Frame, Schema, decode, encode
from semisfl.net.headers import WireError
from semisfl.net.links import disconnect, where
from semisfl.net.server import endpoint
from semisfl.net.server.admission import HANDSHAKE_SECONDS, Refused, audit, cleaned
from semisfl.net.server.cheap_frames import CheapFrames
from semisfl.net.server.refusals import Refusals
from semisfl.net.server.trust import Trust
from semisfl.runs import checkpoint
from semisfl.settings import lookup
from semisfl.use import split_inference as protocol
from semisfl.use.classifier import Classifier
from semisfl.use.model_calls import Places, request
from semisfl.use.served_model import ServedModel

WORKERS = 4
MOST_CALLS, CALLS_EACH = 64, 4
"""Under way in all, and of one device; further ones are refused for now."""
KEEPALIVE_SECONDS, DEAD_SECONDS = 30, 60
"""Seconds without a byte before a device is asked whether it is there, and seconds until its answer.
A slow link may have to carry other bytes before it."""
GOODBYE_SECONDS, BREAK_SECONDS = 2.0, 0.1


Answer = tuple[bytes, int]
"""A frame, and how many images it answers for."""
Answering = Callable[[Frame], Answer]
Expected = Mapping[str, Schema]
"""The schema of a request, by its kind."""
Taking = Callable[[Mapping[str, str]], Expected]


class ModelServer:
    """Answer calls until `close`.

    Requests are received on an event loop, so that a silent device delays no other; only complete
    requests occupy a thread.
    """

    def __init__(
        self,
        model: Classifier,
        network: NetworkOptions,
        *,
        accept_images: bool = False,
        silence_seconds: float = chunks.SILENCE_SECONDS,
        calls_each: int = CALLS_EACH,
    ) -> None:
        hostport.check_listen(network)
        model.need("top")
        if accept_images:
            model.need("bottom")
        self._model, self._accept_images = model, accept_images
        bottom = model.network.bottom.state_dict() if "bottom" in model.parts else None
        digest = None if bottom is None else checkpoint.digest(bottom)
        self._about = protocol.describe(
            model.description, model.identity, model.network.features, digest
        )
        self.terms = None
        """Terms that owners of devices accept; None: devices cannot download the bottom."""
        if digest is not None and model.description.layers is not None:
            self.terms = ServedModel.from_text(self._about)
        insecure, folder = network.insecure_loopback, network.certificates
        self._trust = None if insecure or folder is None else Trust(folder)
        self.answered: Counter[str] = Counter()
        """Images so far, by who asked."""
        # Without certificates devices cannot be distinguished.
        self._places = Places(MOST_CALLS, MOST_CALLS if self._trust is None else calls_each)
        self._silence = silence_seconds
        self._refusals = Refusals(lambda peer, identity, reason, _: audit(peer, identity, reason))
        self._cheap_frames = CheapFrames(self._refusals.note, idle_may_stay=True)
        self._computing = threading.Lock()
        self._workers = ThreadPoolExecutor(WORKERS, "semisfl-model")
        self._thread = LoopThread("semisfl-model-calls")
        try:
            self.port = self._thread.call(self._start(network.listen))
        except BaseException:
            self._thread.stop()
            raise

    async def _start(self, listen: str) -> int:
        methods = {
            "Describe": self._guarded(self._describe, lambda _: {"describe": protocol.DESCRIBE}),
            "Fetch": self._guarded(self._fetch, lambda _: {"fetch": protocol.FETCH}),
            "Features": self._guarded(self._features, self._takes_features),
            "Images": self._guarded(self._images, self._takes_images),
        }
        options = chunks.options(
            keepalive_time_ms=KEEPALIVE_SECONDS * 1000,
            keepalive_timeout_ms=DEAD_SECONDS * 1000,
            keepalive_permit_without_calls=1,
            **{"http2.max_pings_without_data": 0},
        )
        secure = None if self._trust is None else endpoint.credentials(self._trust)
        self._server, port = endpoint.open_port(
            listen, protocol.SERVICE, methods, secure, options, HANDSHAKE_SECONDS
        )
        await self._server.start()
        self._cheap_frames.watch(port)
        return port

    def close(self) -> None:
        """Stop listening, and allow calls in progress a moment to finish."""
        self._thread.call(self._stop())
        self._thread.stop()
        self._workers.shutdown(wait=False, cancel_futures=True)
        self._refusals.sum_up()

    async def _stop(self) -> None:
        self._cheap_frames.stop()
        await self._server.stop(GOODBYE_SECONDS)

    # --- calls -----------------------------------------------------------------------------------

    def _guarded(self, answer: Answering, takes: Taking) -> endpoint.Serve:
        """Return ``answer`` with access checks; a refusal is a gRPC status with its reason, and an audit line.

        ``takes`` returns the request that the call's metadata announces.
        """

        async def call(_: Any, context: grpc.aio.ServicerContext) -> None:
            peer, identity = context.peer(), "?"
            try:
                if self._trust is not None:
                    certificate = self._trust.certificate_of(context)
                    identity = certificate.name
                    self._trust.admit(certificate, partial(self._cheap_frames.check_crowd, peer))
                with self._places.place(identity):
                    await self._answer(answer, takes, identity, context)
                return
            except Refused as refusal:
                code, reason = refusal.code, refusal.reason
            except (WireError, ValueError) as error:
                code, reason = grpc.StatusCode.INVALID_ARGUMENT, str(error)
                # A connection that broke looks like the request's end until gRPC says so.
                await asyncio.sleep(BREAK_SECONDS)
            self._refusals.note(unquote(peer), identity, cleaned(reason))
            await endpoint.abort(context, code, reason)

        return call

    async def _answer(
        self, answer: Answering, takes: Taking, identity: str, context: grpc.aio.ServicerContext
    ) -> None:
        metadata = {
            key: value
            for key, value in context.invocation_metadata() or ()
            if isinstance(value, str)
        }
        connection, expected = self._cheap_frames.of(context.peer()), takes(metadata)
        (most,) = (schema.limit for schema in expected.values())
        data = await request(context, self._silence, connection, most)
        content, images = await self._thread.loop.run_in_executor(
            self._workers, lambda: answer(decode(data, expected))
        )
        self.answered[identity] += images
        # By itself: gRPC sends no status to a stream whose first write with it was cancelled.
        await context.send_initial_metadata(())
        seconds = self._silence + len(content) / chunks.LOWEST_RATE
        try:
            async with asyncio.timeout(seconds):
                await context.write(content)
            connection.sent += len(content)
        except TimeoutError as error:
            # The stream itself would end only once the device takes what waits on it.
            disconnect(where(context.peer()))
            late = f"the answer was not taken within {seconds:.3g} s"
            raise Refused(grpc.StatusCode.DEADLINE_EXCEEDED, late) from error

    def _describe(self, _: Frame) -> Answer:
        return _joined("model", {"model": self._about, "images": self._accept_images}, {}), 0

    def _fetch(self, request: Frame) -> Answer:
        if "bottom" not in self._model.parts:
            raise Refused(
                grpc.StatusCode.FAILED_PRECONDITION,
                "this server holds the top alone; give the bottom's file (--bottom)",
            )
        with self._computing:
            parts = self._parts
        part = request.fields["part"]
        if not 0 <= part < len(parts):
            raise WireError(f"part {part} of the bottom is asked for, which has {len(parts)}")
        return _joined("part", {}, {"bytes": parts[part]}), 0

    @cached_property
    def _parts(self) -> Sequence[Tensor]:
        frame = _joined("bottom", {}, self._model.network.bottom.state_dict())
        return torch.frombuffer(bytearray(frame), dtype=torch.uint8).split(protocol.PART)

    def _takes_features(self, metadata: Mapping[str, str]) -> Expected:
        rows, codec = _rows(metadata), metadata.get(protocol.CODEC, "")
        if codec not in (known := lookup.CODECS.names()):
            raise WireError(f"codec {codec!r:.40} is not known; use one of {', '.join(known)}")
        features = self._model.network.features
        return {"features": protocol.features_schema(rows, features, codec)}

    def _features(self, request: Frame) -> Answer:
        self._check_identity(request)
        features = request.tensors["features"]
        if not torch.isfinite(features).all():
            raise WireError("features hold NaN or Inf")
        return self._answers(self._model.answer, features)

    def _takes_images(self, metadata: Mapping[str, str]) -> Expected:
        if not self._accept_images:
            raise Refused(
                grpc.StatusCode.PERMISSION_DENIED,
                "this server takes features, no images; start it with --accept-images",
            )
        return {"images": protocol.images_schema(_rows(metadata), self._model.shape)}

    def _images(self, request: Frame) -> Answer:
        self._check_identity(request)
        return self._answers(self._model.probabilities, request.tensors["images"])

    def _check_identity(self, request: Frame) -> None:
        if request.fields["identity"] != self._model.identity:
            raise Refused(
                grpc.StatusCode.FAILED_PRECONDITION,
                "the device's bottom is not the other half of this server's model (or it is cut "
                "elsewhere); give it the bottom of the same export, or none",
            )

    def _answers(self, answer: Callable[[Tensor], Tensor], inputs: Tensor) -> Answer:
        with self._computing:
            probabilities = answer(inputs)
        return _joined("answers", {}, {"probabilities": probabilities}), len(inputs)


def _joined(kind: str, fields: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    return b"".join(encode(kind, fields, tensors))


def _rows(metadata: Mapping[str, str]) -> int:
    text = metadata.get(protocol.ROWS, "")
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= protocol.MOST_ROWS):
        raise WireError(
            f"{protocol.ROWS} = {text!r:.40}; a call has 1 to {protocol.MOST_ROWS} images"
        )
    return int(text)
