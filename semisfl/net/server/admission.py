"""Decide which clients may not come in, and say why."""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, Literal

import grpc
import grpc.aio

from semisfl.files import printable
from semisfl.fleet.consent import objections
from semisfl.net.frames import PROTOCOL
from semisfl.net.messages import BY_POLICY, Schemas
from semisfl.net.server.roster import Roster
from semisfl.net.terms import Terms
from semisfl.settings.config import Config
from semisfl.settings.policy import DevicePolicy, parse_policy
from semisfl.settings.sections import ConfigError

HANDSHAKE_SECONDS = 10.0
MOST_IMAGES = 10_000_000
"""Most images that a client may report as held or unreadable. More do not fit a device's memory. A false
report must neither distort |D_l| / |D| nor cost the server memory."""
LONGEST_TEXT = 400
"""Most characters of a client's text that go to a log."""

_audit = logging.getLogger("semisfl.audit")


def audit(peer: str, identity: str, reason: str) -> None:
    """Log one line about a refusal; `semisfl.net.server.refusals` limits repeated ones."""
    _audit.warning("refused peer=%s identity=%s reason=%s", peer, identity, reason)


def audit_held_back(peer: str, identity: str, reason: str) -> None:
    """Log one line about a client whose values had less than their full weight in a round."""
    _audit.warning("held back peer=%s identity=%s reason=%s", peer, identity, reason)


class Refused(Exception):
    """Raised when a client may not come in, with the reason and who states it."""

    def __init__(
        self, code: grpc.StatusCode, reason: str, by: Literal["server", "device"] = "server"
    ) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason
        self.by = by


UNFIT = grpc.StatusCode.FAILED_PRECONDITION
"""The code of a refusal that another attempt of the same device cannot change."""


def check_hello(fields: dict[str, Any], identity: str, terms: Terms, roster: Roster) -> None:
    if fields["protocol"] != PROTOCOL:
        raise Refused(
            UNFIT,
            f"protocol {fields['protocol']} but {PROTOCOL} here; install the same semisfl on both sides",
        )
    if fields["run"] not in ("", terms.run):
        raise Refused(
            UNFIT,
            f"the client belongs to run {fields['run'][:32]!r}, this server's model and configuration "
            f"are {terms.run!r}; restart the client",
        )
    known = {codec for codec in fields["codecs"] if isinstance(codec, str)}
    if missing := sorted(terms.codecs() - known):
        raise Refused(
            UNFIT,
            f"the client does not know the codecs {', '.join(missing)}; install the same semisfl on both "
            "sides, or leave them out of wire and policy",
        )
    if (method := terms.config.method) not in fields["methods"]:
        allow = f", and let it join with --allow-method {method}" if ":" in method else ""
        raise Refused(
            UNFIT,
            f"the client does not have method {method!r}; install its package on that device{allow}",
        )
    if lines := _objections(fields, terms.config):
        raise Refused(UNFIT, BY_POLICY + cleaned(lines, 2 * LONGEST_TEXT), "device")
    if identity not in roster.index and roster.full:
        raise no_place(roster, identity)


def policy_of(fields: dict[str, Any]) -> DevicePolicy:
    """Return the policy in a client's hello; raise `Refused` if it cannot be read."""
    try:
        return parse_policy(fields["policy"], "the client's policy")
    except ConfigError as error:
        raise Refused(UNFIT, cleaned(str(error)), "device") from error


def _objections(fields: dict[str, Any], config: Config) -> str:
    """Return all objections in one line; a policy with an unknown codec is an objection too."""
    try:
        return "; ".join(objections(policy_of(fields), config))
    except ConfigError as error:
        return str(error)


def refused_by_policy(reason: str) -> Refused:
    """Return the refusal that a client's own policy demands."""
    return Refused(UNFIT, BY_POLICY + cleaned(reason), "device")


def cleaned(text: str, longest: int = LONGEST_TEXT) -> str:
    """Return a client's text for a log: one line of printable ASCII, not too long."""
    return printable(text[:longest].encode("ascii", "replace").decode())


def check_ready(fields: dict[str, Any], schemas: Schemas) -> None:
    if fields["model"] != schemas.digest:
        raise Refused(
            UNFIT,
            f"the client built model {fields['model'][:32]!r} where {schemas.digest!r} is needed; "
            "install the same semisfl on both sides",
        )
    if fields["images"] < 1:
        raise Refused(UNFIT, "the client has no images; at least 1 is needed")
    for name in ("images", "skipped"):
        if not 0 <= fields[name] <= MOST_IMAGES:
            raise Refused(
                UNFIT,
                f"the client says {name} = {fields[name]}; at most {MOST_IMAGES} are accepted",
            )


def no_place(roster: Roster, identity: str) -> Refused:
    return Refused(
        grpc.StatusCode.PERMISSION_DENIED,
        f"all clients.total = {roster.total} places are taken and {identity} has none; "
        "free one with `semisfl fleet RUN remove NAME`, or raise clients.total at a --resume",
    )


class Handshakes:
    """Detect TLS handshakes that failed.

    gRPC does not report them, but it asks for the configuration when each handshake begins. If no
    stream follows in time, the server or the client refused, or the peer was not a client.
    """

    def __init__(self, seconds: float, refused: Callable[[str, str, str], None]) -> None:
        """Take ``refused``, which is called with the peer, the identity and the reason, like `audit`."""
        self._seconds, self._refused = seconds, refused
        self._loop = asyncio.get_running_loop()
        self._begun: deque[float] = deque()
        self._peers: Counter[str] = Counter()

    def begins(self) -> None:
        """Note a handshake. gRPC calls this in a thread of its own."""
        self._loop.call_soon_threadsafe(self._note)

    def _note(self) -> None:
        self._begun.append(time.monotonic())
        self._loop.call_later(self._seconds + 0.5, self._check)

    def _check(self) -> None:
        while self._begun and self._begun[0] <= time.monotonic() - self._seconds:
            self._begun.popleft()
            self._refused(
                "?", "?", "TLS: not TLS, or no valid certificate of this authority; or it left"
            )

    def stream_opened(self, peer: str) -> None:
        """Note a stream: the first of a connection proves that its handshake succeeded."""
        if not self._peers[peer] and self._begun:
            self._begun.popleft()
        self._peers[peer] += 1

    def stream_closed(self, peer: str) -> None:
        self._peers[peer] -= 1
        if not self._peers[peer]:
            del self._peers[peer]
