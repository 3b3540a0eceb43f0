"""Show a client's certificate to its server, renew it, and learn why the server does not take it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from semisfl.net import hostport
from semisfl.net.client.diagnosis import NOT_CONNECTED, Finding, diagnose
from semisfl.net.client.lines import brief_logger
from semisfl.net.client.rejection import Rejected
from semisfl.net.tls import credentials
from semisfl.net.tls.credentials import Credentials
from semisfl.net.tls.x509_parts import CertError

log = brief_logger(__name__)


@dataclass(frozen=True)
class Target:
    """The server to connect to, and what a client shows it. Refuses plaintext beyond this machine."""

    address: str
    certificate: Credentials | None
    insecure_loopback: bool = False
    """Connect in plaintext, whatever the certificate."""
    name: str = ""
    """The client's name in plaintext; a certificate has its own."""

    def __post_init__(self) -> None:
        hostport.check_target(self.address, self.certificate is not None, self.insecure_loopback)

    @property
    def credentials(self) -> Credentials | None:
        """Return the certificate to show; None: plaintext."""
        return None if self.insecure_loopback else self.certificate


def open_channel(
    address: str,
    certificate: Credentials | None,
    options: Sequence[tuple[str, int]],
    kind: Any = grpc,
) -> Any:
    """Return a channel of `grpc`, or of `grpc.aio`, that shows the certificate; None: one in plaintext."""
    if certificate is None:
        return kind.insecure_channel(address, options=options)
    files = certificate.authority, certificate.key, certificate.certificate
    return kind.secure_channel(address, grpc.ssl_channel_credentials(*files), options=options)


class Identity:
    """Hold the certificate that a client shows to the server at ``address``; None: plaintext."""

    def __init__(self, address: str, certificate: Credentials | None) -> None:
        self._address, self._certificate = address, certificate
        self._refusals = 0
        self._last_warning = ""
        if certificate and (warning := credentials.soon(certificate)):
            log.warning("%s", warning)

    def channel(self, options: Sequence[tuple[str, int]]) -> grpc.aio.Channel:
        """Return a channel to the server that shows the certificate, or one in plaintext."""
        channel: grpc.aio.Channel
        channel = open_channel(self._address, self._certificate, options, grpc.aio)
        return channel

    def check(self) -> None:
        """Raise `Rejected` if the certificate has expired."""
        if self._certificate and (fault := credentials.expired(self._certificate)):
            raise Rejected(fault)

    def renew(self) -> bool:
        """Read the certificate again; return whether it was renewed since it was last used."""
        before = self._certificate
        if before is None:
            return False
        try:
            self._certificate = credentials.newest(before)
        except CertError as error:
            if str(error) != self._last_warning:
                self._last_warning = str(error)
                log.warning("%s; going on with the certificate read before", error)
        renewed = self._certificate is not before
        if renewed:
            log.info("new %s: used from now on", before.label)
        return renewed

    async def look_into(self, reason: str) -> str:
        """Return the cause of a failed handshake; raise `Rejected` after enough of them in succession."""
        finding: Finding | None = None
        if self._certificate is not None and NOT_CONNECTED in reason:
            try:
                finding = await diagnose(self._address, self._certificate)
            except Exception as error:
                log.warning("cannot diagnose the handshake with %s: %r", self._address, error)
        self._refusals = self._refusals + 1 if finding and finding.enough else 0
        if finding and 0 < finding.enough <= self._refusals:
            raise Rejected(finding.reason)
        return finding.reason if finding else reason
