"""Listen for clients, accept or refuse them and serve their streams; every refusal leaves an audit line."""

import asyncio
import logging
import time
from functools import partial
from typing import Any

import grpc
import grpc.aio

from semisfl.fleet.setup import NetworkOptions
from semisfl.net import chunks, hostport
from semisfl.net.chunks import LoopThread, Violation
from semisfl.net.frames import Frame
from semisfl.net.headers import WireError
from semisfl.net.server import endpoint
from semisfl.net.server.admission import (
    HANDSHAKE_SECONDS,
    Handshakes,
    Refused,
    check_hello,
    cleaned,
)
from semisfl.net.server.cheap_frames import CheapFrames
from semisfl.net.server.context import ServerContext
from semisfl.net.server.penalties import Penalties
from semisfl.net.server.session import Session
from semisfl.net.server.session_table import SessionTable
from semisfl.net.server.trust import Trust

log = logging.getLogger(__name__)

BREAK_SECONDS = 0.2
RETURN_SECONDS = 7.0
"""A client whose connection broke tries again after 6 s at most."""


class Listener:
    """Listen, admit clients and serve their streams, on the loop of ``thread``."""

    def __init__(
        self,
        context: ServerContext,
        network: NetworkOptions,
        *,
        handshake_seconds: float = HANDSHAKE_SECONDS,
        thread: LoopThread | None = None,
    ) -> None:
        hostport.check_listen(network)
        insecure, folder = network.insecure_loopback, network.certificates
        self._trust = None if insecure or folder is None else Trust(folder)
        self.table = SessionTable(context)
        self.penalties = Penalties(context, self.table, self._trust)
        self._terms, self._roster = context.terms, context.roster
        self._device_log = context.device_log
        self._handshake_seconds = handshake_seconds
        self._finished = False
        self.thread = thread or LoopThread("semisfl-server")
        self._owns_thread = thread is None
        try:
            self.port = self.thread.call(self._bind(network.listen))
        except BaseException:
            if self._owns_thread:
                self.thread.stop()
            raise

    def start(self) -> None:
        """Let clients in."""
        self.thread.call(self._server.start())

    async def _bind(self, listen: str) -> int:
        seconds = self._handshake_seconds
        self._handshakes = Handshakes(seconds, self._device_log.refused)
        methods = {"Session": self._serve, "Terms": self._show_terms}
        secure = None
        if self._trust is not None:
            secure = endpoint.credentials(self._trust, self._handshakes.begins)
        self._server, port = endpoint.open_port(
            listen, chunks.SERVICE, methods, secure, chunks.options(), seconds, self._refuse
        )
        self._cheap_frames = CheapFrames(self.penalties.flooded)
        self._cheap_frames.watch(port)
        return port

    async def _show_terms(self, _: Any, context: grpc.aio.ServicerContext) -> None:
        """Send the run's terms to a device that only looks: it takes no place and ends no session."""
        await self._briefly(context, self.table.terms.encode())

    async def _refuse(self, _: Any, context: grpc.aio.ServicerContext) -> None:
        """Refuse a method that there is not; such streams count as all others do."""
        await self._briefly(context, None)

    async def _briefly(self, context: grpc.aio.ServicerContext, answer: bytes | None) -> None:
        """Serve a stream that has no session; ``answer`` None: there is no such method."""
        peer, identity = context.peer(), "?"
        if not self._cheap_frames.stream_opened(peer):
            return
        self._handshakes.stream_opened(peer)
        try:
            if self._trust is not None:
                certificate = self._trust.certificate_of(context)
                identity = certificate.name
                self._trust.admit(certificate, partial(self._cheap_frames.check_crowd, peer))
            if answer is None:
                await endpoint.first_message(context)
                raise Refused(grpc.StatusCode.UNIMPLEMENTED, "this server has no such method")
            async with asyncio.timeout(self._handshake_seconds):
                await context.write(answer)
        except TimeoutError:
            seconds = self._handshake_seconds
            self._device_log.refused(peer, identity, f"it did not take the terms in {seconds:g} s")
        except Refused as refusal:
            self._device_log.refused(peer, identity, refusal.reason, refusal.by)
            await endpoint.abort(context, refusal.code, refusal.reason)
        finally:
            self._handshakes.stream_closed(peer)
            self._cheap_frames.stream_closed(peer)

    # --- one stream ------------------------------------------------------------------------------

    async def _serve(self, _: Any, context: grpc.aio.ServicerContext) -> None:
        peer, identity, certificate = context.peer(), "?", None
        session: Session | None = None
        hello: Frame | None = None
        if not self._cheap_frames.stream_opened(peer):
            return
        self._handshakes.stream_opened(peer)
        try:
            if self._trust is not None:
                certificate = self._trust.certificate_of(context)
                identity = certificate.name
                self._trust.admit(certificate, partial(self._cheap_frames.check_crowd, peer))
                if self._roster.full:
                    self.penalties.free_revoked()
            hello = await endpoint.hello(context, self._handshake_seconds)
            if certificate is None:
                identity = f"plaintext:{cleaned(hello.fields['name'])}"
            self.penalties.check(identity)
            check_hello(hello.fields, identity, self._terms, self._roster)
            if self._finished:
                self.table.lost.pop(identity, None)
                return  # the stream's status tells the client that the run is finished
            self.table.arrives(identity)
            connection = self._cheap_frames.of(peer)
            session = self.table.open(context, identity, hello, certificate, connection)
            ending = await session.run()
            # Close first: saying goodbye over a dead connection may never return.
            self.table.close(session)
            if ending is None:
                # A broken connection looks the same until gRPC reports it, a moment later.
                await asyncio.sleep(BREAK_SECONDS)
                self.table.lost.pop(identity, None)
                log.info("%s said goodbye", identity)
            elif ending[0] is not grpc.StatusCode.OK:
                await endpoint.abort(context, *ending)
        except asyncio.CancelledError:
            if session is not None:
                log.info("the connection to %s was lost", identity)
            raise
        except Refused as refusal:
            self._device_log.refused(peer, identity, refusal.reason, refusal.by)
            if hello is None:
                await endpoint.first_message(context)
            await endpoint.abort(context, refusal.code, refusal.reason)
        except (Violation, WireError) as error:
            self.penalties.breach(peer, identity, str(error))
            await endpoint.abort(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            self._handshakes.stream_closed(peer)
            self._cheap_frames.stream_closed(peer)
            if session is not None:
                self.table.close(session)

    # --- the end ---------------------------------------------------------------------------------

    def close(self, code: grpc.StatusCode, reason: str) -> None:
        """Say goodbye to everyone and stop listening."""
        self.thread.call(self._stop(code, reason))
        if self._owns_thread:
            self.thread.stop()

    async def _stop(self, code: grpc.StatusCode, reason: str) -> None:
        self._finished = code is grpc.StatusCode.OK
        now = time.monotonic()
        away = {name for name, lost in self.table.lost.items() if now - lost < RETURN_SECONDS}
        for session in list(self.table.streams.values()):
            session.close(code, reason)
        # A client that has just lost its connection tries again, and would try for ever.
        while self._finished and away & self.table.lost.keys():
            if time.monotonic() - now > RETURN_SECONDS:
                break
            await asyncio.sleep(0.1)
        self._cheap_frames.stop()
        await self._server.stop(2.0)

    def kill(self) -> None:
        """Drop every connection without a goodbye, as a crash would."""
        self.thread.loop.call_soon_threadsafe(self._cheap_frames.stop)
        self.thread.call(self._server.stop(None))
        if self._owns_thread:
            self.thread.stop()
