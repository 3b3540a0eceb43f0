"""A device's calls to a server of split inference."""

from typing import Any

import grpc

from semisfl.net import chunks
from semisfl.net.client.diagnosis import explained
from semisfl.net.client.identity import open_channel
from semisfl.net.frames import Frame, Schema, decode, encode
from semisfl.net.headers import WireError
from semisfl.net.links import Fetched
from semisfl.net.tls.credentials import Credentials
from semisfl.settings.addresses import split_address
from semisfl.use import split_inference as protocol
from semisfl.use.served_model import ServedModel

PATIENCE_SECONDS = 30.0
"""For an answer, and the time that its bytes take on the slowest link allowed."""


class ModelConnection:
    """Call a server; ``certificate`` None: without TLS, for tests on a loopback address."""

    def __init__(self, address: str, certificate: Credentials | None) -> None:
        self.address, self._certificate = address, certificate
        self._limit = 0
        self._channel: grpc.Channel | None = None
        self.sent = self.received = 0
        """Bytes of all calls' frames so far, without what gRPC and TLS add."""

    def ask(
        self,
        call: str,
        request: bytes,
        answer: str,
        schema: Schema,
        metadata: tuple[tuple[str, str], ...] = (),
    ) -> Frame:
        """Return the answer to one call; raise `ValueError` or `OSError` with the reason if there is none."""
        seconds = PATIENCE_SECONDS + (len(request) + schema.limit) / chunks.LOWEST_RATE
        under_way = self.channel(schema.limit).stream_unary(protocol.method(call))
        try:
            reply = self._awaited(
                under_way.future(protocol.messages(request), timeout=seconds, metadata=metadata),
                len(request),
                schema.limit,
            )
        except grpc.RpcError as error:
            raise self._reason(error) from error
        self.sent += len(request)
        self.received += len(reply)
        return decode(reply, {answer: schema})

    def _awaited(self, under_way: Any, sends: int, most: int) -> bytes:
        """Return the answer, of ``most`` bytes; disconnect if masses of what are no messages come before it."""
        while True:
            try:
                return bytes(under_way.result(timeout=self._fetched.pause))
            except grpc.FutureTimeoutError:
                flood = self._fetched.end_flood(self.received, self.sent + sends, most)
                if flood is not None:
                    under_way.cancel()
                    raise ValueError(f"{self.address} broke the protocol: {flood}") from None

    def channel(self, limit: int = 0) -> grpc.Channel:
        """Return a channel that takes answers of ``limit`` bytes, and of no more than any asked for before."""
        if self._channel is not None and limit <= self._limit:
            return self._channel
        self.close()
        self._limit = limit
        self._fetched = Fetched(split_address(self.address)[1])
        self._channel = open_channel(self.address, self._certificate, chunks.options(limit))
        return self._channel

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()

    def _reason(self, error: Any) -> Exception:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return ValueError(f"{self.address} serves no model; is it `semisfl serve-model`?")
        return explained(error, self.address, self._certificate)


def described(connection: ModelConnection) -> tuple[ServedModel, bool]:
    """Return a server's model, and whether it accepts images."""
    request = b"".join(encode("describe", {}, {}))
    fields = connection.ask("Describe", request, "model", protocol.MODEL).fields
    try:
        return ServedModel.from_text(fields["model"]), fields["images"]
    except WireError as error:
        raise ValueError(f"{connection.address}: {error}") from error
