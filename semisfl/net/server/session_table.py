"""Keep the session of each client: opened by its hello, enrolled once it is ready, closed at its end."""

import logging
import threading
import time
from collections import Counter, defaultdict, deque

import grpc
import grpc.aio

from semisfl.net import messages
from semisfl.net.frames import Frame, decode, encode
from semisfl.net.server.admission import (
    Refused,
    check_ready,
    cleaned,
    no_place,
    policy_of,
    refused_by_policy,
)
from semisfl.net.server.cheap_frames import Connection
from semisfl.net.server.context import ServerContext
from semisfl.net.server.session import Session
from semisfl.net.server.trust import ClientCertificate
from semisfl.settings.counts import counted
from semisfl.settings.policy import DevicePolicy

log = logging.getLogger(__name__)

MOST_ARRIVALS, ARRIVALS_SECONDS = 20, 60.0
"""How often an identity may connect in so many seconds. Each arrival is written down, in the log and in
``fleet.jsonl``, and wakes the run; a client that stays for less than 3 s ends no round."""


class SessionTable:
    """Hold one session per identity. Lives on the loop; others read `enrolled` under `changed`."""

    def __init__(self, context: ServerContext) -> None:
        self.enrolled: dict[int, Session] = {}
        """The session of each client that is here, by its index in the roster."""
        self.changed = threading.Condition()
        """Notified whenever a client came or went."""
        self.last_heard: dict[int, float] = {}
        """When each former client was last heard of, in seconds after the epoch."""
        self.streams: dict[str, Session] = {}
        """The latest session of each identity, enrolled or not."""
        self.epochs: Counter[str] = Counter()
        self.lost: dict[str, float] = {}
        """When the connection of each absent identity ended."""
        self.terms = context.terms.to_json()
        """The run's terms as clients receive them."""
        self._context = context
        self._arrivals: defaultdict[str, deque[float]] = defaultdict(
            lambda: deque(maxlen=MOST_ARRIVALS)
        )

    def arrives(self, identity: str) -> None:
        """Note that a client connects; raise `Refused` if it does so too often."""
        times, now = self._arrivals[identity], time.monotonic()
        if len(times) == MOST_ARRIVALS and now - times[0] < ARRIVALS_SECONDS:
            raise Refused(
                grpc.StatusCode.UNAVAILABLE,
                f"{identity} connected {MOST_ARRIVALS} times within {ARRIVALS_SECONDS:g} s; "
                "come again later",
            )
        times.append(now)

    def open(
        self,
        context: grpc.aio.ServicerContext,
        identity: str,
        hello: Frame,
        certificate: ClientCertificate | None,
        connection: Connection,
    ) -> Session:
        """Return the session of a client that may come in; it replaces an older one of that client."""
        older = self.streams.get(identity)
        attempt = (hello.fields["instance"], hello.fields["attempt"])
        if older is not None and older.attempt[0] == attempt[0] and older.attempt[1] > attempt[1]:
            raise Refused(grpc.StatusCode.UNAVAILABLE, f"a later connection of {identity} is here")
        self.epochs[identity] += 1
        session = Session(context, identity, self.epochs[identity], self._arrived)
        session.connection = connection
        session.certificate, session.attempt = certificate, attempt
        session.policy = policy_of(hello.fields)
        self.streams[identity] = session
        self.lost.pop(identity, None)
        if older is not None:
            again = f"{identity} connected again, or another device has the same certificate"
            log.info("%s; the older connection is closed", again)
            # Remove it before anything else is read, so that its frames are never applied.
            self.forget(older)
            older.close(grpc.StatusCode.ABORTED, f"{again}; this older connection is closed")
        fields = {"terms": self.terms, "run": self._context.terms.run, "epoch": session.epoch}
        session.ask(encode("welcome", fields, {}), messages.READY.limit)
        return session

    def _arrived(self, session: Session, ticket: int, data: bytearray) -> None:
        if session.forgotten:
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
            device_log, identity = self._context.device_log, session.identity
            device_log.refused(session.peer, identity, refusal.reason, refusal.by)
            session.close(refusal.code, refusal.reason)

    def _enrol(self, session: Session, ready: Frame) -> None:
        check_ready(ready.fields, self._context.schemas)
        try:
            serial = session.certificate.serial if session.certificate else None
            client = self._context.roster.enrol(session.identity, ready.fields["images"], serial)
        except OSError as error:
            log.warning("%s waits: the roster cannot be written: %s", session.identity, error)
            reason = f"the server cannot write down who has a place: {error.strerror or 'its log says why'}"
            raise Refused(grpc.StatusCode.UNAVAILABLE, reason) from error
        if client is None:
            raise no_place(self._context.roster, session.identity)
        if ready.fields["skipped"]:
            log.warning(
                "%s skipped %s it could not read",
                session.identity,
                counted(ready.fields["skipped"], "image"),
            )
        log.info(
            "%s is here as client %d with %s",
            session.identity,
            client,
            counted(ready.fields["images"], "image"),
        )
        self._log_policy(session)
        session.notify(encode("enrolled", {"client": client}, {}))
        session.client = client
        with self.changed:
            self.enrolled[client] = session
            self.changed.notify_all()
        self._context.device_log.here(session.identity, client, ready.fields["images"])

    def _log_policy(self, session: Session) -> None:
        """Log what the client's policy limits, so that the operator can plan the run."""
        policy, rounds = session.policy, self._context.config.rounds
        if policy != DevicePolicy().of_device():
            log.info("the policy of %s: %s", session.identity, cleaned(policy.summary()))
        if policy.rounds is not None and policy.rounds < rounds:
            log.warning(
                "%s takes part in %s at most, the run has %d",
                session.identity,
                counted(policy.rounds, "round"),
                rounds,
            )

    def close(self, session: Session) -> None:
        """Note that the stream of a session has ended."""
        if self.streams.get(session.identity) is session:
            del self.streams[session.identity]
        if session.closed:
            return
        session.closed = True
        self.lost[session.identity] = time.monotonic()
        self.forget(session)

    def forget(self, session: Session) -> None:
        """Take a client out of the rounds: nothing that its session brings counts any more."""
        with self.changed:
            session.forgotten = True
            if self.enrolled.get(session.client) is session:
                del self.enrolled[session.client]
                self.last_heard[session.client] = session.heard_at
                self.changed.notify_all()
                self._context.device_log.gone(session.identity, session.client)
                self._context.inbox.put((session, 0, None))
