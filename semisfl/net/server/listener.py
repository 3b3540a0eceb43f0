"""Accept or refuse clients and keep their sessions; every refusal leaves an audit line."""

import asyncio
import logging
import threading
import time
from collections import Counter
from typing import Any

import grpc
import grpc.aio

from semisfl.fleet.setup import NetworkOptions
from semisfl.net import chunks, messages
from semisfl.net.chunks import LoopThread, Violation
from semisfl.net.frames import Frame, WireError, decode, encode
from semisfl.net.messages import REVOKED
from semisfl.net.server import endpoint
from semisfl.net.server.admission import (
    HANDSHAKE_SECONDS,
    Handshakes,
    Refused,
    check_hello,
    check_ready,
    cleaned,
    no_place,
    policy_of,
    refused_by_policy,
)
from semisfl.net.server.cheap_frames import CheapFrames
from semisfl.net.server.context import ServerContext
from semisfl.net.server.session import Session
from semisfl.net.server.trust import Shown, Trust
from semisfl.settings.policy import DevicePolicy

log = logging.getLogger(__name__)

BREAK_SECONDS = 0.2
RETURN_SECONDS = 7.0
"""A client whose connection broke tries again after 6 s at most."""
STRIKES = 3
"""Offences after which an identity is refused until the server restarts."""


class Listener:
    """Listen, admit clients and keep their sessions, on the loop of ``thread``."""

    def __init__(
        self,
        context: ServerContext,
        network: NetworkOptions,
        *,
        handshake_seconds: float = HANDSHAKE_SECONDS,
        thread: LoopThread | None = None,
    ) -> None:
        chunks.check_listen(network)
        self.sessions: dict[int, Session] = {}
        self.changed = threading.Condition()
        """Notified whenever a client came or went."""
        self.last_heard: dict[int, float] = {}
        """When each former client was last heard of, in seconds after the epoch."""
        self.sent = self.received = 0
        """Bytes of all streams that have ended."""
        self._context = context
        self._terms, self._roster = context.terms, context.roster
        self._welcome_text, self._run = self._terms.to_json(), self._terms.run
        self._device_log = context.device_log
        insecure, folder = network.insecure_loopback, network.certificates
        self._trust = None if insecure or folder is None else Trust(folder)
        self._handshake_seconds = handshake_seconds
        self._streams: dict[str, Session] = {}
        self._epochs: Counter[str] = Counter()
        self._strikes: Counter[str] = Counter()
        self._removed: set[str] = set()
        self._lost: dict[str, float] = {}
        """When the connection of each absent identity ended."""
        self._finished = False
        self._thread = thread or LoopThread("semisfl-server")
        self._owns_thread = thread is None
        try:
            self.port = self._thread.call(self._bind(network.listen))
        except BaseException:
            if self._owns_thread:
                self._thread.stop()
            raise

    def start(self) -> None:
        """Let clients in."""
        self._thread.call(self._server.start())

    @property
    def thread(self) -> LoopThread:
        return self._thread

    async def _bind(self, listen: str) -> int:
        seconds = self._handshake_seconds
        self._handshakes = Handshakes(seconds, self._device_log.refused)
        calls = {chunks.METHOD: self._serve, chunks.TERMS: self._show_terms}
        self._server, port = endpoint.bind(listen, calls, self._trust, self._handshakes, seconds)
        self._cheap_frames = CheapFrames(self._flooded)
        self._cheap_frames.watch(port)
        return port

    def _flooded(self, peer: str, identity: str, reason: str) -> None:
        """Strike a client whose connection was ended for cheap frames."""
        self._strikes[identity] += identity != "?"
        self._device_log.refused(peer, identity, f"protocol: {reason}")

    async def _show_terms(self, _: Any, context: grpc.aio.ServicerContext) -> None:
        """Send the run's terms to a device that only looks: it takes no place and ends no session."""
        peer, identity = context.peer(), "?"
        if not self._cheap_frames.stream_opened(peer):
            return
        self._handshakes.stream_opened(peer)
        try:
            if self._trust is not None:
                shown = self._trust.shown(context)
                identity = self._cheap_frames.of(peer).identity = shown.name
                self._trust.admit(shown)
            await context.write(self._welcome_text.encode())
        except Refused as refusal:
            self._device_log.refused(peer, identity, refusal.reason)
            await context.abort(refusal.code, refusal.reason)
        finally:
            self._handshakes.stream_closed(peer)

    # --- one stream ------------------------------------------------------------------------------

    async def _serve(self, _: Any, context: grpc.aio.ServicerContext) -> None:
        peer, identity, shown = context.peer(), "?", None
        session: Session | None = None
        if not self._cheap_frames.stream_opened(peer):
            return
        self._handshakes.stream_opened(peer)
        try:
            if self._trust is not None:
                shown = self._trust.shown(context)
                identity = self._cheap_frames.of(peer).identity = shown.name
                self._trust.admit(shown)
                if self._roster.full:
                    self._free_revoked()
            hello = await endpoint.hello(context, self._handshake_seconds)
            if shown is None:
                identity = f"plaintext:{hello.fields['name']}"
            if self._strikes[identity] >= STRIKES:
                raise Refused(
                    grpc.StatusCode.PERMISSION_DENIED,
                    f"{identity} is in quarantine after {STRIKES} breaches of the protocol",
                )
            if identity in self._removed:
                raise Refused(
                    grpc.StatusCode.PERMISSION_DENIED,
                    f"{identity} was removed by the operator and stays out until the server restarts",
                )
            check_hello(hello.fields, identity, self._terms, self._roster)
            if self._finished:
                self._lost.pop(identity, None)
                return  # the stream's status tells the client that the run is finished
            session = self._open(context, identity, shown, hello)
            ending = await session.run()
            # Close first: saying goodbye over a dead connection may never return.
            self._close(session)
            if ending is None:
                # A broken connection looks the same until gRPC reports it, a moment later.
                await asyncio.sleep(BREAK_SECONDS)
                self._lost.pop(identity, None)
                log.info("%s said goodbye", identity)
            elif ending[0] is not grpc.StatusCode.OK:
                await context.abort(*ending)
        except asyncio.CancelledError:
            if session is not None:
                log.info("the connection to %s was lost", identity)
            raise
        except Refused as refusal:
            self._device_log.refused(peer, identity, refusal.reason)
            await context.abort(refusal.code, refusal.reason)
        except (Violation, WireError) as error:
            self._strikes[identity] += 1
            self._device_log.refused(peer, identity, f"protocol: {error}")
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            self._handshakes.stream_closed(peer)
            if session is not None:
                self._close(session)

    # --- sessions --------------------------------------------------------------------------------

    def _open(
        self, context: grpc.aio.ServicerContext, identity: str, shown: Shown | None, hello: Frame
    ) -> Session:
        older = self._streams.get(identity)
        came = (hello.fields["instance"], hello.fields["attempt"])
        if older is not None and older.came[0] == came[0] and older.came[1] > came[1]:
            raise Refused(grpc.StatusCode.UNAVAILABLE, f"a later connection of {identity} is here")
        self._epochs[identity] += 1
        session = Session(context, identity, self._epochs[identity], self._arrived)
        session.connection = self._cheap_frames.of(session.peer)
        session.shown, session.came = shown, came
        session.policy = policy_of(hello.fields)
        self._streams[identity] = session
        self._lost.pop(identity, None)
        if older is not None:
            log.info("%s connected again; its older connection is closed", identity)
            # Remove it before anything else is read, so that its frames are never applied.
            self._forget(older)
            older.close(
                grpc.StatusCode.ABORTED,
                f"{identity} connected again; this older connection is closed",
            )
        fields = {"terms": self._welcome_text, "run": self._run, "epoch": session.epoch}
        session.ask(encode("welcome", fields, {}), messages.READY.limit)
        return session

    def _arrived(self, session: Session, ticket: int, data: bytearray) -> None:
        if self._streams.get(session.identity) is not session:
            return
        if session.client >= 0:
            self._context.inbox.put((session, ticket, data))
            return
        ready = decode(data, {"ready": messages.READY, "refusal": messages.REFUSAL})
        try:
            if ready.kind == "refusal":
                raise refused_by_policy(ready.fields["reason"])
            self._enrol(session, ready)
        except Refused as refusal:
            self._device_log.refused(session.peer, session.identity, refusal.reason)
            session.close(refusal.code, refusal.reason)

    def _enrol(self, session: Session, ready: Frame) -> None:
        check_ready(ready.fields, self._context.schemas)
        try:
            serial = session.shown.serial if session.shown else None
            client = self._roster.enrol(session.identity, ready.fields["images"], serial)
        except OSError as error:
            log.warning("%s waits: the roster cannot be written: %s", session.identity, error)
            raise Refused(grpc.StatusCode.UNAVAILABLE, "the server's disk is full") from error
        if client is None:
            raise no_place(self._roster, session.identity)
        if ready.fields["skipped"]:
            log.warning(
                "%s skipped %d images it could not read", session.identity, ready.fields["skipped"]
            )
        log.info(
            "%s is here as client %d with %d images",
            session.identity,
            client,
            ready.fields["images"],
        )
        self._log_policy(session)
        session.tell(encode("enrolled", {"client": client}, {}))
        session.client = client
        with self.changed:
            self.sessions[client] = session
            self.changed.notify_all()
        self._device_log.here(session.identity, client, ready.fields["images"])

    def _log_policy(self, session: Session) -> None:
        """Log what the client's policy limits, so that the operator can plan the run."""
        policy, rounds = session.policy, self._terms.config.rounds
        if policy != DevicePolicy().of_device():
            log.info("the policy of %s: %s", session.identity, cleaned(policy.summary()))
        if policy.rounds is not None and policy.rounds < rounds:
            log.warning(
                "%s takes part in %d rounds at most, the run has %d",
                session.identity,
                policy.rounds,
                rounds,
            )

    def dismiss(self, session: Session, reason: str) -> None:
        """Log that a client's own policy ended its part, which is not an offence."""
        self._device_log.refused(session.peer, session.identity, reason)

    def _close(self, session: Session) -> None:
        if self._streams.get(session.identity) is session:
            del self._streams[session.identity]
        if session.closed:
            return
        session.closed = True
        self._lost[session.identity] = time.monotonic()
        self.sent += session.sent
        self.received += session.received
        self._forget(session)

    def _forget(self, session: Session) -> None:
        with self.changed:
            if self.sessions.get(session.client) is session:
                del self.sessions[session.client]
                self.last_heard[session.client] = session.heard_at
                self.changed.notify_all()
                self._device_log.gone(session.identity, session.client)
        self._context.inbox.put((session, 0, None))

    def check_certificates(self) -> None:
        """Disconnect clients whose certificate was revoked or has expired since they came in."""
        if self._trust is None:
            return
        self._trust.remind()
        self._trust.read_revoked()
        for session in list(self._streams.values()):
            if session.shown and (refusal := self._trust.refusal(session.shown)):
                self._device_log.refused(session.peer, session.identity, refusal.reason)
                self._forget(session)
                session.close(refusal.code, refusal.reason)
        self._free_revoked()

    def _free_revoked(self) -> None:
        """Free the places of devices whose latest certificate is revoked."""
        assert self._trust is not None
        for name, serial in list(self._roster.serials.items()):
            if self._trust.is_revoked(serial):
                self._free(name, f"its certificate {REVOKED}")

    def _free(self, identity: str, reason: str) -> None:
        try:
            client = self._roster.remove(identity)
        except OSError as error:
            log.warning("%s keeps its place: the roster cannot be written: %s", identity, error)
            return
        log.warning("the place of %s is free: %s", identity, reason)
        self._device_log.removed(identity, client, reason)

    def remove(self, identity: str) -> None:
        """Free the place of a device, disconnect it and keep it out until the server restarts."""
        client = self._roster.remove(identity)
        reason = "removed by the operator"
        self._removed.add(identity)
        if session := self._streams.get(identity):
            self._forget(session)
            session.close(grpc.StatusCode.PERMISSION_DENIED, f"{identity} was {reason}")
        log.warning("the place of %s is free: %s", identity, reason)
        self._device_log.removed(identity, client, reason)

    def offend(self, session: Session, reason: str) -> None:
        """Disconnect a client for an invalid frame; after STRIKES offences it stays out."""
        self._strikes[session.identity] += 1
        self._device_log.refused(session.peer, session.identity, f"protocol: {reason}")
        session.close(grpc.StatusCode.INVALID_ARGUMENT, reason)

    def strike(self, identity: str, reason: str) -> None:
        """Count an offence; disconnect the client at STRIKES offences."""
        session = self._streams.get(identity)
        if session is not None and self._strikes[identity] + 1 >= STRIKES:
            self.offend(session, reason)
        else:
            self._strikes[identity] += 1
            self._device_log.refused(session.peer if session else "?", identity, reason)

    def audit_held_back(self, identity: str, reason: str) -> None:
        session = self._streams.get(identity)
        self._device_log.held_back(session.peer if session else "?", identity, reason)

    def bytes_moved(self) -> tuple[int, int]:
        """Return the bytes sent and received on all streams so far, framing included."""
        live = list(self._streams.values())
        return self.sent + sum(s.sent for s in live), self.received + sum(s.received for s in live)

    def close(
        self, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE, reason: str = "the server stops"
    ) -> None:
        """Say goodbye to everyone and stop listening."""
        self._thread.call(self._stop(code, reason))
        if self._owns_thread:
            self._thread.stop()

    async def _stop(self, code: grpc.StatusCode, reason: str) -> None:
        self._finished = code is grpc.StatusCode.OK
        now = time.monotonic()
        away = {name for name, lost in self._lost.items() if now - lost < RETURN_SECONDS}
        for session in list(self._streams.values()):
            session.close(code, reason)
        # A client that has just lost its connection tries again, and would try for ever.
        while self._finished and away & self._lost.keys():
            if time.monotonic() - now > RETURN_SECONDS:
                break
            await asyncio.sleep(0.1)
        self._cheap_frames.stop()
        await self._server.stop(2.0)

    def kill(self) -> None:
        """Drop every connection without a goodbye, as a crash would."""
        self._thread.loop.call_soon_threadsafe(self._cheap_frames.stop)
        self._thread.call(self._server.stop(None))
        if self._owns_thread:
            self._thread.stop()
