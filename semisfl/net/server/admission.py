"""Decide which devices may not come in, and say why.

What a device says of itself is checked twice: its hello (version, run, codecs, methods, policy) before it is sent the
terms, and its ready (model, images) before it gets a place. `semisfl.net.server.trust` checks its certificate.
"""

import logging
from collections.abc import Mapping
from typing import Any, Literal

import grpc

from semisfl.files import printable
from semisfl.fleet.consent import objections
from semisfl.net.frames import PROTOCOL
from semisfl.net.messages import BY_POLICY, Schemas
from semisfl.net.server.roster import Roster
from semisfl.net.terms import Terms
from semisfl.settings import lookup
from semisfl.settings.policy import DevicePolicy, parse_policy
from semisfl.settings.sections import ConfigError

HANDSHAKE_SECONDS = 10.0
"""Most time for the TLS handshake of a connection, and for its hello."""
MOST_IMAGES = 10_000_000
"""Most images that a client may report as held or unreadable. More do not fit a device's memory. A false
report must neither distort |D_l| / |D| nor cost the server memory."""
LONGEST_TEXT = 800
"""Most characters of a client's text that go to a log."""

_audit = logging.getLogger("semisfl.audit")


def audit(peer: str, identity: str, reason: str) -> None:
    """Log one line about a refusal: the address, the device's name (``?`` before it is known) and the reason.

    Lines of this form go to the logger ``semisfl.audit``, for tools that watch a server.
    """
    _audit.warning("refused peer=%s identity=%s reason=%s", peer, identity, reason)


class Refused(Exception):
    """Raised when a device may not come in.

    ``code`` is the status of gRPC that it hears: some are final, after others it tries again
    (`semisfl.net.client.rejection`). ``by`` says who states the ``reason``: the server, or the device's own policy.
    """

    def __init__(
        self, code: grpc.StatusCode, reason: str, by: Literal["server", "device"] = "server"
    ) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason
        self.by = by


UNFIT = grpc.StatusCode.FAILED_PRECONDITION
"""The code of a refusal that another attempt of the same device cannot change."""


def check_hello(fields: Mapping[str, Any], identity: str, terms: Terms, roster: Roster) -> None:
    """Raise `Refused` unless the device with this hello fits the run and has or finds a place in it.

    ``fields`` are those of `messages.HELLO`; ``identity`` is the device's name, from its certificate if it has one.
    """
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
    method, trained = terms.config.method, terms.bottom is None
    if trained and method not in fields["methods"]:
        allow = f", and let it join with --allow-method {method}" if ":" in method else ""
        raise Refused(
            UNFIT,
            f"the client does not have method {method!r}; install its package on that device{allow}",
        )
    try:
        lines = objections(policy_of(fields), terms.config)
    except ConfigError as error:  # an unknown codec
        raise refused_by_policy(str(error)) from error
    if lines:
        raise refused_by_policy("; ".join(lines))
    if identity not in roster.index and roster.full:
        raise no_place(roster, identity)


def policy_of(fields: Mapping[str, Any]) -> DevicePolicy:
    """Return the policy in a client's hello; raise `Refused` if it cannot be read."""
    try:
        lookup.check_importable(fields["policy"], "the client's policy")
        return parse_policy(fields["policy"], "the client's policy")
    except ConfigError as error:
        raise refused_by_policy(str(error)) from error


def refused_by_policy(reason: str) -> Refused:
    """Return the refusal that a client's own policy demands."""
    return Refused(UNFIT, BY_POLICY + cleaned(reason.removeprefix(BY_POLICY)), "device")


def cleaned(text: str, longest: int = LONGEST_TEXT) -> str:
    """Return a client's text for a log: one line of printable ASCII, not too long."""
    return printable(text[:longest].encode("ascii", "replace").decode())


def check_ready(fields: Mapping[str, Any], schemas: Schemas) -> None:
    """Raise `Refused` unless the device has built the server's model and reports a possible number of images."""
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
    """Return the refusal of a device that finds every place taken."""
    return Refused(
        grpc.StatusCode.PERMISSION_DENIED,
        f"all clients.total = {roster.total} places are taken and {identity} has none; "
        "free one with `semisfl fleet RUN remove NAME`, or raise clients.total at a --resume",
    )
