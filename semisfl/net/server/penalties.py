"""Keep clients out that broke the protocol, were removed, or whose certificate is no longer valid."""

import logging
from collections import Counter
from collections.abc import Iterable

import grpc

from semisfl.net.messages import REVOKED
from semisfl.net.server.admission import Refused
from semisfl.net.server.context import ServerContext
from semisfl.net.server.session import Session
from semisfl.net.server.session_table import SessionTable
from semisfl.net.server.trust import Trust

log = logging.getLogger(__name__)

STRIKES = 3
"""Offences after which an identity is refused until the server restarts."""
EXCUSES = 3
"""How often the values of another client excuse an identity's absurd ones; a round without a fault of its own gives
one back. Two that work together would otherwise excuse each other in every round."""


class Penalties:
    """Count offences and disconnect clients. Every refusal leaves an audit line."""

    def __init__(self, context: ServerContext, table: SessionTable, trust: Trust | None) -> None:
        self.strikes: Counter[str] = Counter()
        """Offences of each identity since the server started."""
        self._roster, self._device_log = context.roster, context.device_log
        self._table, self._trust = table, trust
        self._excused: Counter[str] = Counter()
        self._removed: set[str] = set()
        self._dismissed: set[str] = set()

    def check(self, identity: str) -> None:
        """Raise `Refused` for a client in quarantine, or one that the operator removed."""
        if self.strikes[identity] >= STRIKES:
            raise Refused(
                grpc.StatusCode.PERMISSION_DENIED,
                f"{identity} is in quarantine after {STRIKES} breaches of the protocol",
            )
        if identity in self._removed:
            raise Refused(
                grpc.StatusCode.PERMISSION_DENIED,
                f"{identity} was removed by the operator and stays out until the server restarts",
            )

    def breach(self, peer: str, identity: str, reason: str) -> None:
        """Count a breach of the protocol, which ends the client's stream."""
        self.strikes[identity] += 1
        self._device_log.refused(peer, identity, f"protocol: {reason}")

    def flooded(self, peer: str, identity: str, reason: str) -> None:
        """Strike a client whose connection was ended for cheap frames."""
        self.strikes[identity] += identity != "?"
        self._device_log.refused(peer, identity, f"protocol: {reason}")

    def offend(self, session: Session, reason: str) -> None:
        """Disconnect a client for an invalid frame; after STRIKES offences it stays out."""
        self.breach(session.peer, session.identity, reason)
        session.close(grpc.StatusCode.INVALID_ARGUMENT, reason)

    def strike(self, identity: str, reason: str) -> None:
        """Count an offence; disconnect the client at STRIKES offences."""
        session = self._table.streams.get(identity)
        if session is not None and self.strikes[identity] + 1 >= STRIKES:
            self.offend(session, reason)
        else:
            self.strikes[identity] += 1
            self._device_log.refused(session.peer if session else "?", identity, reason)

    def excuse(self, identity: str) -> bool:
        """Count one excuse of a client by another's values; return whether it may have it."""
        self._excused[identity] += 1
        return self._excused[identity] <= EXCUSES

    def note_good_round(self, identities: Iterable[str]) -> None:
        """Give each of the clients, which had no fault in a good round, an excuse back."""
        self._excused.subtract(identities)
        self._excused = +self._excused

    def audit_held_back(self, identity: str, reason: str) -> None:
        session = self._table.streams.get(identity)
        self._device_log.held_back(session.peer if session else "?", identity, reason)

    def dismiss(self, session: Session, reason: str) -> None:
        """Disconnect a client whose own policy ended its part; to come back and do so again is an offence."""
        self._device_log.refused(session.peer, session.identity, reason, "device")
        self.strikes[session.identity] += session.identity in self._dismissed
        self._dismissed.add(session.identity)
        self._table.forget(session)
        session.close(grpc.StatusCode.FAILED_PRECONDITION, reason)

    def remove(self, identity: str) -> None:
        """Free the place of a device, disconnect it and keep it out until the server restarts."""
        reason = "removed by the operator"
        self._free(identity, reason)
        self._removed.add(identity)
        if session := self._table.streams.get(identity):
            self._table.forget(session)
            session.close(grpc.StatusCode.PERMISSION_DENIED, f"{identity} was {reason}")

    def check_certificates(self) -> None:
        """Disconnect clients whose certificate was revoked or has expired since they came in."""
        if self._trust is None:
            return
        self._trust.remind()
        self._trust.read_revoked()
        for session in list(self._table.streams.values()):
            if session.certificate and (refusal := self._trust.refusal(session.certificate)):
                self._device_log.refused(session.peer, session.identity, refusal.reason)
                self._table.forget(session)
                session.close(refusal.code, refusal.reason)
        self.free_revoked()

    def free_revoked(self) -> None:
        """Free the places of devices whose latest certificate is revoked."""
        assert self._trust is not None
        for name, serial in list(self._roster.serials.items()):
            if self._trust.is_revoked(serial):
                try:
                    self._free(name, f"its certificate {REVOKED}")
                except OSError as error:
                    log.warning("%s keeps its place: the roster cannot be written: %s", name, error)

    def _free(self, identity: str, reason: str) -> None:
        client = self._roster.remove(identity)
        log.warning("the place of %s is free: %s", identity, reason)
        self._device_log.removed(identity, client, reason)
