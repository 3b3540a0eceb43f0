"""Listen for devices, admit or refuse them and serve their streams; every refusal leaves an audit line.

Each device opens one bidirectional gRPC stream and keeps it open; that passes NAT, and needs no port on the device.
With certificates TLS checks both sides before the first byte reaches this program, and `Trust` then looks at
revocation. Without certificates the listener only takes connections of this machine's own loopback.
"""

import asyncio
import contextlib
import logging
import time
from typing import Any

import grpc
import grpc.aio

from semisfl.net import chunks, messages
from semisfl.net.chunks import Assembler, LoopThread
from semisfl.net.frames import Frame, WireError, decode
from semisfl.net.server.admission import HANDSHAKE_SECONDS, Refused, cleaned
from semisfl.net.server.session import Session
from semisfl.net.server.sessions import Sessions
from semisfl.net.server.trust import ClientCertificate, Trust
from semisfl.settings.config import ConfigError

log = logging.getLogger(__name__)

ABORT_SECONDS = 10.0
"""Most time for a device to take the end of its stream."""
BREAK_SECONDS = 0.2
"""A broken connection looks like a goodbye until gRPC reports it, a moment later."""
RETURN_SECONDS = 7.0
"""A device whose connection broke tries again after 6 s at most."""


class Listener:
    """Listen, admit devices and serve their streams, on the loop of ``thread``."""

    def __init__(
        self,
        sessions: Sessions,
        listen: str,
        trust: Trust | None,
        *,
        handshake_seconds: float = HANDSHAKE_SECONDS,
        thread: LoopThread | None = None,
    ) -> None:
        """Take the port now; devices come in after `start`. ``thread`` None: start one.

        ``listen`` is HOST:PORT; port 0 takes a free one. ``trust`` None: plaintext.
        """
        self._sessions, self._trust = sessions, trust
        self._seconds = handshake_seconds
        self._finished = False
        self._owns_thread = thread is None
        self.thread = thread or LoopThread("semisfl-server")
        try:
            self.port = self.thread.call(self._bind(listen))
        except BaseException:
            self._stop_thread()
            raise

    async def _bind(self, listen: str) -> int:
        """Make the server of streams, which is not started yet; return its port."""
        options = chunks.options(
            server_handshake_timeout_ms=int(self._seconds * 1000), so_reuseport=0
        )
        self._server = grpc.aio.server(options=options)
        methods = {
            name: grpc.stream_stream_rpc_method_handler(serve)
            for name, serve in (("Session", self._serve), ("Terms", self._show_terms))
        }
        known = grpc.method_handlers_generic_handler(chunks.SERVICE, methods)
        self._server.add_generic_rpc_handlers((known,))
        try:
            if self._trust is None:
                return self._server.add_insecure_port(listen)
            return self._server.add_secure_port(listen, self._trust.server_credentials())
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen on {listen}: {error}; choose another address or port"
            ) from error

    def start(self) -> None:
        """Let devices in."""
        self.thread.call(self._server.start())

    async def _show_terms(self, _: Any, context: grpc.aio.ServicerContext) -> None:
        """Send the run's terms to a device that only looks: it takes no place and ends no session."""
        identity = "?"
        try:
            if self._trust is not None:
                certificate = self._trust.certificate_of(context)
                identity = certificate.name
                self._trust.admit(certificate)
            await context.write(self._sessions.terms.to_json().encode())
        except Refused as refusal:
            await self._refuse(context, identity, refusal)

    async def _refuse(
        self, context: grpc.aio.ServicerContext, identity: str, refusal: Refused
    ) -> None:
        """Record a refusal, and end the stream with its reason."""
        self._sessions.device_log.refused(context.peer(), identity, refusal.reason, refusal.by)
        await abort(context, refusal.code, refusal.reason)

    async def _serve(self, _: Any, context: grpc.aio.ServicerContext) -> None:
        """Serve one stream of a device, from its hello to its end."""
        identity, session = "?", None
        certificate: ClientCertificate | None = None
        try:
            if self._trust is not None:
                certificate = self._trust.certificate_of(context)
                identity = certificate.name
            # Before any refusal: a status that meets the hello on its way is an internal error to the device.
            hello = await self._hello(context)
            if certificate is None:
                identity = f"plaintext:{cleaned(hello.fields['name'])}"
            elif self._trust is not None:
                self._trust.admit(certificate)
            if self._finished:
                self._sessions.lost.pop(identity, None)
                return  # the stream's status tells the device that the run is finished
            session = self._sessions.open(context, identity, hello, certificate)
            await self._run(session, context)
        except asyncio.CancelledError:
            log.info("the connection to %s was lost", identity)
            raise
        except Refused as refusal:
            await self._refuse(context, identity, refusal)
        except WireError as error:
            self._sessions.breach(context.peer(), identity, str(error))
            await abort(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            if session is not None:
                self._sessions.close(session)

    async def _hello(self, context: grpc.aio.ServicerContext) -> Frame:
        """Return a device's first frame; raise `Refused` if it does not come in time."""
        assembler, complete = Assembler(messages.HELLO.limit), None
        try:
            async with asyncio.timeout(self._seconds):
                while complete is None:
                    chunk = await context.read()
                    if chunk is grpc.aio.EOF:
                        raise Refused(grpc.StatusCode.UNAVAILABLE, "the stream ended before hello")
                    complete = assembler.feed(chunk)
                # By itself: if a refusal cancelled the first write with it, gRPC would send no status.
                await context.send_initial_metadata(())
        except TimeoutError as error:
            # Not an offence: the server itself may be too busy.
            late = f"no hello within {self._seconds:g} s"
            raise Refused(grpc.StatusCode.UNAVAILABLE, late) from error
        return decode(complete[1], {"hello": messages.HELLO})

    async def _run(self, session: Session, context: grpc.aio.ServicerContext) -> None:
        """Serve a session to its end, and tell a goodbye of the device from a lost connection."""
        ending = await session.run()
        # Close first: saying goodbye over a dead connection may never return.
        self._sessions.close(session)
        if ending is None:
            await asyncio.sleep(BREAK_SECONDS)
            self._sessions.lost.pop(session.identity, None)
            log.info("%s said goodbye", session.identity)
        elif ending[0] is not grpc.StatusCode.OK:
            await abort(context, *ending)

    # --- the end ---------------------------------------------------------------------------------

    def close(self, code: grpc.StatusCode, reason: str) -> None:
        """Say goodbye to every device and stop listening. ``code`` OK: the run is finished."""
        self.thread.call(self._stop(code, reason))
        self._stop_thread()

    async def _stop(self, code: grpc.StatusCode, reason: str) -> None:
        """Say goodbye, and wait a moment for devices that just lost their connection: they would try for ever."""
        self._finished = code is grpc.StatusCode.OK
        now, lost = time.monotonic(), self._sessions.lost
        away = {name for name, since in lost.items() if now - since < RETURN_SECONDS}
        self._sessions.say_goodbye(code, reason)
        while self._finished and away & lost.keys() and time.monotonic() < now + RETURN_SECONDS:
            await asyncio.sleep(0.1)
        await self._server.stop(2.0)

    def kill(self) -> None:
        """Drop every connection without a goodbye, as a crash would; for tests."""
        self.thread.call(self._server.stop(None))
        self._stop_thread()

    def _stop_thread(self) -> None:
        if self._owns_thread:
            self.thread.stop()


async def abort(context: grpc.aio.ServicerContext, code: grpc.StatusCode, reason: str) -> None:
    """End a stream; give up on a device that does not take its end, or is gone."""
    with contextlib.suppress(TimeoutError, grpc.aio.InternalError):
        async with asyncio.timeout(ABORT_SECONDS):
            await context.abort(code, reason)
