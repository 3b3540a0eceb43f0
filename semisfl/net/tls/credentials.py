"""Read a certificate, its key and its authority, check their dates, and read renewed ones.

A device and a server each have one folder with a certificate, its key and the authority's certificate. TLS itself
decides whom to trust; this module says who that is (`identity`), and tells in time that a certificate expires.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.x509.oid import NameOID

from semisfl.net.tls.x509_parts import CertError, read_file, read_pair, to_pem

CLIENT_URI = "semisfl://client/"
"""Begins the URI in a client's certificate, which no server's has."""
CLIENT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
SOON = timedelta(days=30)
"""A certificate that expires within this time is warned about."""

Peer = bytes | Mapping[str, Iterable[bytes]]
"""A certificate in PEM, or gRPC's ``context.auth_context()``."""


@dataclass(frozen=True)
class Credentials:
    """What one side of a connection needs, in PEM: its certificate and key, and the authority that it trusts."""

    authority: bytes
    certificate: bytes
    key: bytes = field(repr=False)
    path: Path | None = field(default=None, compare=False)
    """The certificate's file. A renewed one replaces it, beside its key and authority."""

    @property
    def label(self) -> str:
        """Return the certificate's file, for messages."""
        return str(self.path or "the certificate")


def load_server_credentials(directory: str | Path) -> Credentials:
    """Return the server's credentials from ``directory``; ``authority.key`` is not needed and not read.

    Raises `CertError` if a file is missing, damaged or does not belong to the others. Dates are not checked here.
    """
    return _load(Path(directory) / "server.crt")


def load_client_credentials(directory: str | Path, name: str | None = None) -> Credentials:
    """Return a client's credentials from its own folder, or by ``name`` from the authority's folder.

    Raises `CertError` as `load_server_credentials` does.
    """
    folder = Path(directory) if name is None else client_folder(Path(directory), name)
    return _load(folder / "client.crt")


def newest(credentials: Credentials) -> Credentials:
    """Return the credentials in the files if they were renewed, else ``credentials`` itself.

    Raises `CertError` while the files do not fit together, as when somebody is copying them.
    """
    if credentials.path is None:
        return credentials
    latest = _load(credentials.path)
    return credentials if latest == credentials else latest


def check_name(name: str) -> None:
    """Raise `CertError` if a client cannot have this name, which is also that of its folder."""
    if not CLIENT_NAME.fullmatch(name):
        raise CertError(
            f"client name {name!r}: use 1 to 63 letters, digits, '.', '_' and '-',"
            " starting with a letter or digit"
        )


def client_folder(directory: Path, name: str) -> Path:
    """Return the folder of a client below the authority's; raise `CertError` for a bad name."""
    check_name(name)
    return directory / "clients" / name


def identity(peer: Peer) -> str:
    """Return the name of the client that a certificate names. TLS has decided whether to trust it.

    Raises `CertError` for a certificate that is no client's.
    """
    certificate = parse(peer)
    names = [
        str(entry.value)
        for entry in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    ]
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        uris = extension.value.get_values_for_type(x509.UniformResourceIdentifier)
    except (x509.ExtensionNotFound, ValueError):
        uris = []
    if len(names) != 1 or uris != [CLIENT_URI + names[0]] or not CLIENT_NAME.fullmatch(names[0]):
        raise CertError(
            f"certificate of {names!r:.100} is not a client's: make one with `semisfl certs sign`"
        )
    return names[0]


def hosts(certificate: x509.Certificate) -> list[str]:
    """Return the host names and addresses that a server's certificate is for."""
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except (x509.ExtensionNotFound, ValueError):
        return []
    names = extension.value.get_values_for_type(x509.DNSName)
    return [*names, *map(str, extension.value.get_values_for_type(x509.IPAddress))]


def expired(credentials: Credentials) -> str | None:
    """Return that these have expired and what to do; None while they are valid."""
    if (end := ending(credentials)) > datetime.now(UTC):
        return None
    return f"{credentials.label} expired on {moment(end)} (now {now()}): {remedy(credentials)}"


def early(credentials: Credentials) -> str | None:
    """Return that these are not valid yet; None if they are. Waiting or setting the clock helps."""
    begin = parse(credentials.certificate).not_valid_before_utc
    if begin <= datetime.now(UTC):
        return None
    return (
        f"{credentials.label} is valid from {moment(begin)} only, and this machine's clock says"
        f" {now()}: set the clock, or wait"
    )


def soon(credentials: Credentials) -> str | None:
    """Return a warning if these expire within SOON, else None."""
    end = ending(credentials)
    left = end - datetime.now(UTC)
    if not timedelta(0) < left <= SOON:
        return None
    days = "today" if left < timedelta(days=1) else f"in {left.days} days"
    return f"{credentials.label} expires {days}, on {moment(end)}: {remedy(credentials)}"


def ending(credentials: Credentials) -> datetime:
    """Return when these expire: no certificate is valid for longer than its authority's."""
    pems = (credentials.certificate, credentials.authority)
    return min(parse(pem).not_valid_after_utc for pem in pems)


def remedy(credentials: Credentials) -> str:
    """Return what to do about credentials that expire: renew them, or make another authority."""
    if parse(credentials.authority).not_valid_after_utc < datetime.now(UTC) + SOON:
        return "so does its authority; make another with `semisfl certs init`, and all others anew"
    try:
        name = identity(credentials.certificate)
    except CertError:
        return "make a new one with `semisfl certs renew --server` where the authority is"
    return f"make `semisfl certs request --name {name}` here and `semisfl certs sign` where the authority is"


def moment(time: datetime) -> str:
    """Return a time as people read it, in UTC."""
    return f"{time.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def now() -> str:
    """Return the time of this machine's clock, as `moment` writes it."""
    return moment(datetime.now(UTC))


def parse(peer: Peer) -> x509.Certificate:
    """Return the certificate of a peer; raise `CertError` if it showed none, or more than one."""
    if isinstance(peer, Mapping):
        chain = list(peer.get("x509_pem_cert", ()))
        if len(chain) != 1:
            raise CertError("peer showed no certificate: connect with mutual TLS")
        peer = chain[0]
    try:
        return x509.load_pem_x509_certificate(peer)
    except ValueError:
        raise CertError("certificate is not valid PEM: make it again") from None


def read_certificate(path: Path) -> x509.Certificate:
    """Return the certificate in a PEM file; raise `CertError` if there is none."""
    content = read_file(path)
    try:
        return x509.load_pem_x509_certificate(content)
    except ValueError:
        raise CertError(
            f"{path} is not a certificate in PEM: restore it, or make it again"
        ) from None


def was_signed_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    """Return whether this ``authority`` signed the certificate."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _load(path: Path) -> Credentials:
    """Read the files. Does not check validity dates; see `expired`."""
    certificate, key = read_pair(path.parent, path.stem)
    authority = read_certificate(path.with_name("authority.crt"))
    if not was_signed_by(certificate, authority):
        raise CertError(
            f"{path} was not signed by {path.with_name('authority.crt')}: make it again"
        )
    return Credentials(to_pem(authority), to_pem(certificate), to_pem(key), path)
