"""The devices of a run: the session of each that is here, and who is kept out.

A device that connects sends a hello. If it may come in, `Sessions.open` gives it a session and welcomes it with the
terms of the run. The device loads its images and answers that it is ready; then it gets a place in the roster, is told
its index, and may be drawn for rounds. Its session ends with its stream. A device that comes back gets a new session
and keeps its place.

A device stays out if its certificate is revoked, if the operator removed it, or after STRIKES breaches of the
protocol. The first two free its place for another device.
"""

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import grpc
import grpc.aio

from semisfl.net import messages
from semisfl.net.frames import Frame, decode, encode
from semisfl.net.messages import REVOKED, Schemas
from semisfl.net.server.admission import (
    Refused,
    check_hello,
    check_ready,
    cleaned,
    no_place,
    refused_by_policy,
)
from semisfl.net.server.device_log import DeviceLog
from semisfl.net.server.roster import Roster, removed_names
from semisfl.net.server.session import Session
from semisfl.net.server.trust import ClientCertificate, Trust
from semisfl.net.terms import Terms
from semisfl.settings.counts import plural
from semisfl.settings.policy import DevicePolicy

log = logging.getLogger(__name__)

STRIKES = 3
"""Breaches of the protocol after which a device is refused until the server restarts."""

Arrival = tuple[Session, int, bytearray | None]
"""A session, the ticket that is answered, and the frame; None: the connection is lost."""


class Sessions:
    """Hold at most one session per device. It lives on the loop; others read `enrolled` under `changed`."""

    def __init__(
        self,
        terms: Terms,
        schemas: Schemas,
        roster: Roster,
        device_log: DeviceLog,
        trust: Trust | None,
    ) -> None:
        """Take ``trust`` in the devices' certificates; None: all connections are in plaintext."""
        self.terms, self.roster, self.device_log = terms, roster, device_log
        self.enrolled: dict[int, Session] = {}
        """The session of each client that is here, by its index in the roster."""
        self.changed = threading.Condition()
        """Notified whenever a client came or went."""
        self.last_seen: dict[int, float] = {}
        """When each client that is away was last heard of, in seconds after the epoch."""
        self.lost: dict[str, float] = {}
        """When the connection of each device that is away ended."""
        self.strikes: Counter[str] = Counter()
        """Breaches of the protocol by each device since the server started."""
        self.inbox: queue.Queue[Arrival] = queue.Queue()
        """What arrives for the thread that trains. Before Python 3.13 a signal at the wrong moment makes the wait of
        a SimpleQueue endless."""
        self.begin: Callable[[Session], None] = lambda session: None
        """Called on the loop when a device has got its place."""
        self.take: Callable[[Session, int, bytearray], None] = lambda *arrival: self.inbox.put(
            arrival
        )
        """Called on the loop with each frame of a device that has its place."""
        self._schemas, self._trust = schemas, trust
        self._latest: dict[str, Session] = {}
        """The latest session of each device, enrolled or not."""
        self._directory: Path | None = None
        self._removed: set[str] = set()
        self._dismissed: set[str] = set()
        """Devices whose own policy ended their part before."""

    def keep_in(self, directory: Path) -> None:
        """Read from ``directory`` which devices the operator has removed, now and before each round."""
        self._directory = directory
        self._removed = removed_names(directory)

    # --- a device comes and goes -------------------------------------------------------------------

    def open(
        self,
        context: grpc.aio.ServicerContext,
        identity: str,
        hello: Frame,
        certificate: ClientCertificate | None,
    ) -> Session:
        """Return the session of a device that may come in; raise `Refused` if it may not.

        It replaces an older session of that device.
        """
        if self.roster.full:
            self.free_places()
        self._check(identity)
        check_hello(hello.fields, identity, self.terms, self.roster)
        session = Session(context, identity, hello.fields, certificate, self._arrived)
        older = self._latest.get(identity)
        if older is not None:
            (process, number), (of_older, number_of_older) = session.attempt, older.attempt
            if process == of_older and number < number_of_older:
                reason = f"a later connection of {identity} is here"
                raise Refused(grpc.StatusCode.UNAVAILABLE, reason)
        self._latest[identity] = session
        self.lost.pop(identity, None)
        if older is not None:
            again = f"{identity} connected again, or another device has the same certificate"
            log.info("%s; the older connection is closed", again)
            # Before anything else is read, so that the frames of the older one are never applied.
            self.forget(older)
            older.close(grpc.StatusCode.ABORTED, f"{again}; this older connection is closed")
        welcome = encode("welcome", {"terms": self.terms.to_json()}, {})
        session.ask(b"".join(welcome), messages.READY.limit)
        return session

    def _check(self, identity: str) -> None:
        """Raise `Refused` for a device in quarantine, or one that the operator removed."""
        if self.strikes[identity] >= STRIKES:
            reason = f"{identity} is in quarantine after {STRIKES} breaches of the protocol"
            raise Refused(grpc.StatusCode.PERMISSION_DENIED, reason)
        if identity in self._removed:
            reason = f"{identity} was removed by the operator"
            raise Refused(grpc.StatusCode.PERMISSION_DENIED, reason)

    def _arrived(self, session: Session, ticket: int, data: bytearray) -> None:
        """Take a frame from a session's stream: its ready, or an answer for the thread that trains."""
        if session.forgotten:
            return
        try:
            if session.client >= 0:
                self.take(session, ticket, data)
                return
            ready = decode(data, {"ready": messages.READY, "refusal": messages.REFUSAL})
            if ready.kind == "refusal":
                raise refused_by_policy(ready.fields["reason"])
            self._enrol(session, ready)
        except Refused as refusal:
            self.disconnect(session, refusal)
        except OSError as error:
            reason = f"the server cannot write what it has to keep: {error.strerror or error}"
            self.disconnect(session, Refused(grpc.StatusCode.UNAVAILABLE, reason))

    def _enrol(self, session: Session, ready: Frame) -> None:
        """Give the device its place; raise `Refused` if there is none, and `OSError` if it cannot be written down."""
        check_ready(ready.fields, self._schemas)
        name, images, skipped = session.identity, ready.fields["images"], ready.fields["skipped"]
        serial = session.certificate.serial if session.certificate else None
        client = self.roster.enrol(name, images, serial)
        if client is None:
            raise no_place(self.roster, name)
        log.info("%s is here as client %d with %s", name, client, plural(images, "image"))
        if skipped:
            log.warning("%s skipped %s it could not read", name, plural(skipped, "image"))
        self._log_policy(session)
        session.tell(b"".join(encode("enrolled", {"client": client}, {})))
        session.client = client
        with self.changed:
            self.enrolled[client] = session
            self.changed.notify_all()
        self.device_log.note("here", name, client=client, images=images)
        self.begin(session)

    def _log_policy(self, session: Session) -> None:
        """Log what the device's policy limits, so that the operator can plan the run."""
        policy, rounds = session.policy, self.terms.config.rounds
        if policy != DevicePolicy().of_device():
            log.info("the policy of %s: %s", session.identity, cleaned(policy.summary()))
        if policy.rounds is not None and policy.rounds < rounds:
            most = plural(policy.rounds, "round")
            log.warning(
                "%s takes part in %s at most, the run has %d", session.identity, most, rounds
            )

    def close(self, session: Session) -> None:
        """Note that the stream of a session has ended."""
        if self._latest.get(session.identity) is session:
            del self._latest[session.identity]
            self.lost[session.identity] = time.monotonic()
        self.forget(session)

    def forget(self, session: Session) -> None:
        """Take a client out of the rounds: nothing that its session brings counts any more."""
        with self.changed:
            session.forgotten = True
            if self.enrolled.get(session.client) is session:
                del self.enrolled[session.client]
                self.last_seen[session.client] = session.seen
                self.changed.notify_all()
                self.device_log.note("gone", session.identity, client=session.client)
                self.inbox.put((session, 0, None))

    def say_goodbye(self, code: grpc.StatusCode, reason: str) -> None:
        """End every session with the same status."""
        for session in list(self._latest.values()):
            session.close(code, reason)

    # --- who is kept out ---------------------------------------------------------------------------

    def disconnect(self, session: Session, refusal: Refused) -> None:
        """Take a client out, and end its stream with the reason."""
        self.device_log.refused(session.peer, session.identity, refusal.reason, refusal.by)
        self.forget(session)
        session.close(refusal.code, refusal.reason)

    def breach(self, peer: str, identity: str, reason: str) -> None:
        """Count a breach of the protocol; after STRIKES of them the device is out before the next round."""
        self.strikes[identity] += 1
        self.device_log.refused(peer, identity, f"protocol: {reason}")

    def offend(self, session: Session, reason: str) -> None:
        """Count an invalid frame as a breach of the protocol, and disconnect the device."""
        self.breach(session.peer, session.identity, reason)
        session.close(grpc.StatusCode.INVALID_ARGUMENT, reason)

    def dismiss(self, session: Session, reason: str) -> None:
        """Disconnect a device whose own policy ended its part; to come back and do so again is a breach."""
        self.strikes[session.identity] += session.identity in self._dismissed
        self._dismissed.add(session.identity)
        self.disconnect(session, refused_by_policy(reason))

    def review(self) -> None:
        """Before a round: disconnect devices in quarantine, removed or revoked ones, and expired certificates."""
        if self._trust is not None:
            self._trust.remind()
        self.free_places()
        for session in list(self._latest.values()):
            try:
                self._check(session.identity)
                if self._trust is not None and session.certificate is not None:
                    self._trust.check(session.certificate)
            except Refused as refusal:
                self.disconnect(session, refusal)

    def free_places(self) -> None:
        """Free the places of devices that were removed, or whose latest certificate is revoked."""
        if self._directory is not None:
            self._removed = removed_names(self._directory)
        leaving = dict.fromkeys(self._removed & self.roster.index.keys(), "removed by the operator")
        if self._trust is not None:
            self._trust.read_revoked()
            for name, serial in self.roster.serials.items():
                if self._trust.is_revoked(serial):
                    leaving[name] = f"its certificate {REVOKED}"
        for name, reason in leaving.items():
            try:
                client = self.roster.remove(name)
            except OSError as error:
                log.warning("%s keeps its place: the roster cannot be written: %s", name, error)
                continue
            log.warning("the place of %s is free: %s", name, reason)
            self.device_log.note("removed", name, client=client, reason=reason)
