"""Hold the server's own certificate, which may be renewed, and decide which devices' certificates to accept.

Files may change, vanish or be damaged while the server runs. It goes on with what it read last. While
the list of revoked certificates cannot be read, the server accepts no new connection.
"""

import functools
import logging
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import grpc
import grpc.aio

from semisfl import files
from semisfl.net.messages import REVOKED
from semisfl.net.server.admission import Refused
from semisfl.net.tls import credentials, ledger
from semisfl.net.tls.x509_parts import CertError, to_pem

log = logging.getLogger(__name__)

HOUR, DAY = 3600.0, 86400.0


@dataclass(frozen=True)
class ClientCertificate:
    """A device's certificate."""

    name: str
    serial: int
    valid_until: datetime
    pem: bytes


class Trust:
    """Read ``folder``: authority.crt, server.crt, server.key and revoked.txt, and nothing else.

    Raise `CertError` if the server's own certificate cannot be read or has expired. Files that change later are read
    again: the certificate before each handshake, the list before each admission and each round.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._own = credentials.load_server_credentials(folder)
        if fault := credentials.expired(self._own):
            raise CertError(f"{fault}; no client could connect")
        self._revoked = ledger.revoked_serials(folder)
        self._own_stamp: tuple[object, ...] = ()
        self._list_stamp: tuple[object, ...] = ()
        self._unreadable = False
        self._warned: dict[str, float] = {}
        self._known: set[int] = set()
        self.remind()

    # --- the server's own certificate ------------------------------------------------------------

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return credentials for mutual TLS, which follow a renewed certificate."""
        return grpc.dynamic_ssl_server_credentials(self._configuration(), self._renewed, True)

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        pair = (self._own.key, self._own.certificate)
        return grpc.ssl_server_certificate_configuration([pair], self._own.authority)

    def _renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """Return what handshakes use from now on if the files hold a newer certificate, else None.

        gRPC calls this before each handshake, in a thread of its own.
        """
        stamp = self._stamp("server.crt", "server.key", "authority.crt")
        if stamp == self._own_stamp:
            return None
        try:
            newest = credentials.newest(self._own)
        except CertError as error:
            # Perhaps only one of the files is there yet: the next handshake looks again.
            self._warn("own", f"{error}; going on with the certificate read before", HOUR)
            return None
        self._own_stamp = stamp
        if newest is self._own:
            return None
        self._own = newest
        until = credentials.moment(credentials.ending(newest))
        log.warning(
            "%s is new, valid until %s; connections from now on use it", newest.label, until
        )
        return self._configuration()

    def remind(self) -> None:
        """Warn once a day if the server's certificate has expired or will soon."""
        if fault := credentials.expired(self._own):
            self._warn("expired", f"{fault}; nobody can connect; connected clients may stay", DAY)
        elif fault := credentials.early(self._own) or credentials.soon(self._own):
            self._warn("soon", fault, DAY)

    # --- the devices' ----------------------------------------------------------------------------

    @staticmethod
    def certificate_of(context: grpc.aio.ServicerContext) -> ClientCertificate:
        """Return a device's certificate. TLS has checked its authority and its dates."""
        peer = context.auth_context()
        try:
            name, certificate = credentials.identity(peer), credentials.parse(peer)
        except CertError as error:
            raise Refused(grpc.StatusCode.UNAUTHENTICATED, str(error)) from error
        until, pem = certificate.not_valid_after_utc, to_pem(certificate)
        return ClientCertificate(name, certificate.serial_number, until, pem)

    def admit(self, certificate: ClientCertificate) -> None:
        """Raise `Refused` if the device with this certificate may not come in."""
        self.read_revoked()
        self.check(certificate)
        if self._unreadable:
            raise Refused(
                grpc.StatusCode.UNAVAILABLE,
                "the server cannot read its list of revoked certificates; nobody new until it can",
            )
        if certificate.serial not in self._known:
            self._known.add(certificate.serial)
            self._introduce(certificate)

    def check(self, certificate: ClientCertificate) -> None:
        """Raise `Refused` if a device with this certificate may not be connected."""
        label = f"the certificate of {certificate.name}"
        if self.is_revoked(certificate.serial):
            raise Refused(grpc.StatusCode.PERMISSION_DENIED, f"{label} {REVOKED}")
        # The other reasons are not final: a device reads its files again, and may find a new certificate.
        if certificate.valid_until <= datetime.now(UTC):
            until = credentials.moment(certificate.valid_until)
            raise Refused(grpc.StatusCode.UNAVAILABLE, f"{label} expired on {until}")
        if not _signed(certificate.pem, self._own.authority):
            reason = f"{label} is not of the authority that this server has now"
            raise Refused(grpc.StatusCode.UNAVAILABLE, reason)

    def is_revoked(self, serial: int) -> bool:
        """Return whether the list that was read last holds this certificate."""
        return serial in self._revoked

    def read_revoked(self) -> None:
        """Read the list if it changed; keep the last good one if it cannot be read."""
        stamp = self._stamp("revoked.txt")
        if stamp == self._list_stamp:
            return
        try:
            self._revoked = ledger.revoked_serials(self._folder)
        except CertError as error:
            self._unreadable, self._list_stamp = True, ()
            self._warn("list", f"{error}; the last good list holds, and nobody new comes in", HOUR)
            return
        self._list_stamp = stamp
        if self._unreadable:
            log.warning("%s can be read again", self._folder / "revoked.txt")
            self._warned.pop("list", None)
        self._unreadable = False

    @staticmethod
    def _introduce(certificate: ClientCertificate) -> None:
        """Log a new certificate's serial, which can be revoked here, and warn if it expires soon."""
        name, until = certificate.name, credentials.moment(certificate.valid_until)
        log.info("%s has certificate %x, valid until %s", name, certificate.serial, until)
        if certificate.valid_until - datetime.now(UTC) < credentials.SOON:
            log.warning(
                "the certificate of %s expires on %s: make `semisfl certs request` on the device"
                " and `semisfl certs sign` where the authority is",
                name,
                until,
            )

    def _stamp(self, *names: str) -> tuple[object, ...]:
        return files.stamp(*(self._folder / name for name in names))

    def _warn(self, topic: str, text: str, every: float) -> None:
        now = time.monotonic()
        if now - self._warned.get(topic, -every) >= every:
            self._warned[topic] = now
            log.warning("%s", text)


@functools.lru_cache(maxsize=100_000)
def _signed(certificate: bytes, authority: bytes) -> bool:
    """Return whether the authority signed a certificate: TLS asked one that may have been replaced since."""
    return credentials.was_signed_by(credentials.parse(certificate), credentials.parse(authority))
