"""A small certificate authority, so that a fleet has mutual TLS without anyone learning openssl.

    DIR/authority.crt  authority.key     signs the others; the key may be kept elsewhere
        server.crt     server.key        with authority.crt and revoked.txt all a server needs
        clients/NAME/                    the folder to carry to the device:
            authority.crt  client.crt  client.key
        issued.txt                       every certificate ever signed
        revoked.txt                      serial numbers the server turns away at hello

A client is its certificate's name: the CN, and again a URI that no server certificate carries.
"""

import ipaddress
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from semisfl.net.x509_parts import CertError as CertError
from semisfl.net.x509_parts import (
    append_line,
    common_name_of,
    issuer_id,
    key_usage,
    read_file,
    read_pair,
    refuse_existing,
    start_certificate,
    to_pem,
    write_file,
)

AUTHORITY_LIFE = timedelta(days=3652)
LEAF_LIFE = timedelta(days=365)
CLOCK_SKEW = timedelta(hours=1)  # devices without a battery-backed clock start a little behind

CLIENT_URI = "semisfl://client/"
CLIENT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
HOST_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
HOST_NAME = re.compile(rf"(?=.{{1,253}}\Z){HOST_LABEL}(\.{HOST_LABEL})*")

Peer = bytes | Mapping[str, Iterable[bytes]]
"""A certificate in PEM, or gRPC's ``context.auth_context()``."""


@dataclass(frozen=True)
class Issued:
    """A line of issued.txt."""

    role: str  # "authority", "server" or "client"
    name: str
    serial: int
    fingerprint: str  # SHA-256 of the certificate, in hexadecimal
    valid_until: datetime
    revoked: bool = False


@dataclass(frozen=True)
class Credentials:
    """What one side of a connection needs, in PEM."""

    authority: bytes
    certificate: bytes
    key: bytes = field(repr=False)


def make_authority(
    directory: str | Path,
    *,
    valid_from: datetime | None = None,
    valid_until: datetime | None = None,
    overwrite: bool = False,
) -> Issued:
    """A new authority in ``directory``, valid for ten years, that has signed nothing yet."""
    directory = Path(directory)
    targets = [directory / "authority.key", directory / "authority.crt"]
    refuse_existing(targets, overwrite)
    key = ec.generate_private_key(ec.SECP256R1())
    # Its own name, so that a certificate of another authority is told apart by its issuer too.
    subject = common_name_of(f"semisfl authority {secrets.token_hex(4)}")
    period = _period(valid_from, valid_until, AUTHORITY_LIFE)
    builder = (
        start_certificate(subject, subject, key.public_key(), period)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(key_usage(key_cert_sign=True, crl_sign=True), critical=True)
        .add_extension(issuer_id(key), critical=False)
    )
    certificate = builder.sign(key, hashes.SHA256())
    issued = _issued("authority", "authority", certificate)
    revoked = directory / "revoked.txt"
    if not revoked.exists():
        write_file(revoked, b"# serial numbers of certificates to turn away, one a line\n")
    append_line(directory / "issued.txt", _ledger_line(issued))
    write_file(targets[0], to_pem(key))
    write_file(targets[1], to_pem(certificate))
    return issued


def make_server(
    directory: str | Path,
    names: Sequence[str],
    *,
    valid_from: datetime | None = None,
    valid_until: datetime | None = None,
    overwrite: bool = False,
) -> Issued:
    """The server's certificate, for every host name and IP address clients will connect to."""
    if isinstance(names, str) or not names:
        raise CertError(f"server names = {names!r}: give a list with at least one host name or IP")
    directory = Path(directory)
    return _make_leaf(
        directory,
        directory,
        role="server",
        name=names[0],
        subject="semisfl server",  # a CN holds 64 characters; hosts may be longer, and are below
        purpose=ExtendedKeyUsageOID.SERVER_AUTH,
        alternatives=[_host(name) for name in names],
        period=_period(valid_from, valid_until, LEAF_LIFE),
        overwrite=overwrite,
    )


def make_client(
    directory: str | Path,
    name: str,
    *,
    valid_from: datetime | None = None,
    valid_until: datetime | None = None,
    overwrite: bool = False,
) -> Issued:
    """A client's folder ``clients/NAME``. The folder replaced by ``overwrite`` stays valid
    wherever it was carried: `revoke` first, if it is lost."""
    directory = Path(directory)
    folder = _client_folder(directory, name)
    issued = _make_leaf(
        directory,
        folder,
        role="client",
        name=name,
        subject=name,
        purpose=ExtendedKeyUsageOID.CLIENT_AUTH,
        alternatives=[x509.UniformResourceIdentifier(CLIENT_URI + name)],
        period=_period(valid_from, valid_until, LEAF_LIFE),
        overwrite=overwrite,
    )
    write_file(folder / "authority.crt", read_file(directory / "authority.crt"))
    return issued


def revoke(directory: str | Path, name: str) -> list[int]:
    """Turn away every certificate ever issued to this client; the serials newly turned away."""
    everything = [entry for entry in listing(directory) if entry.role == "client"]
    theirs = [entry for entry in everything if entry.name == name]
    if not theirs:
        known = ", ".join(sorted({entry.name for entry in everything})) or "none"
        raise CertError(f"client {name!r} was never issued a certificate; those that were: {known}")
    fresh = [entry.serial for entry in theirs if not entry.revoked]
    today = datetime.now(UTC).date()
    for number in fresh:
        append_line(Path(directory) / "revoked.txt", f"{number:x}  # {name}, {today}\n")
    return fresh


def is_revoked(directory: str | Path, serial: int) -> bool:
    """Whether a peer's serial is to be turned away. Read afresh: a running server obeys at once."""
    return serial in _revoked(Path(directory))


def listing(directory: str | Path) -> list[Issued]:
    """Every certificate ever issued, with its fingerprint, oldest first."""
    path = Path(directory) / "issued.txt"
    revoked = _revoked(Path(directory))
    entries = []
    for number, line in enumerate(read_file(path).decode("utf-8", "replace").splitlines(), 1):
        try:
            role, name, serial_text, fingerprint, until = line.split()
            valid_until = datetime.fromisoformat(until)
            entry = Issued(role, name, int(serial_text, 16), fingerprint, valid_until)
        except ValueError:
            raise CertError(f"{path} line {number} is damaged: restore it from a copy") from None
        entries.append(replace(entry, revoked=entry.serial in revoked))
    return entries


def load_server_credentials(directory: str | Path) -> Credentials:
    """The server's credentials; ``authority.key`` is not needed and not read."""
    return _load(Path(directory), "server")


def load_client_credentials(directory: str | Path, name: str | None = None) -> Credentials:
    """From a client's own folder, or by name from the authority's directory."""
    folder = Path(directory) if name is None else _client_folder(Path(directory), name)
    return _load(folder, "client")


def identity(peer: Peer) -> str:
    """The client a certificate names. Whether to trust the certificate was decided by TLS."""
    certificate = _certificate(peer)
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
            f"certificate of {names!r:.100} is not a client's: make one with make_client"
        )
    return names[0]


def serial(peer: Peer) -> int:
    """The serial number of a certificate, for `is_revoked`."""
    return _certificate(peer).serial_number


def _make_leaf(
    directory: Path,
    folder: Path,
    *,
    role: str,
    name: str,
    subject: str,
    purpose: x509.ObjectIdentifier,
    alternatives: list[x509.GeneralName],
    period: tuple[datetime, datetime],
    overwrite: bool,
) -> Issued:
    authority, authority_key = read_pair(directory, "authority")
    targets = [folder / f"{role}.key", folder / f"{role}.crt"]
    refuse_existing(targets, overwrite)
    begin, end = period[0], min(period[1], authority.not_valid_after_utc)
    if begin >= end:
        limit = authority.not_valid_after_utc
        raise CertError(
            f"valid_from = {begin} is not before the authority's end {limit}: make a new authority"
        )
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        start_certificate(
            common_name_of(subject), authority.subject, key.public_key(), (begin, end)
        )
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(key_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(issuer_id(authority_key), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    issued = _issued(role, name, certificate)
    # The ledger first: a certificate that exists but is not listed could not be revoked by name.
    append_line(directory / "issued.txt", _ledger_line(issued))
    write_file(targets[0], to_pem(key))
    write_file(targets[1], to_pem(certificate))
    return issued


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass
    # All digits and dots is a mistyped address, never a host.
    if not HOST_NAME.fullmatch(name) or re.fullmatch(r"[0-9.]+", name):
        raise CertError(f"server name {name!r} is neither an IP address nor an ASCII host name")
    return x509.DNSName(name)


def _client_folder(directory: Path, name: str) -> Path:
    if not CLIENT_NAME.fullmatch(name):
        raise CertError(
            f"client name {name!r}: use 1 to 63 letters, digits, '.', '_' and '-',"
            " starting with a letter or digit"
        )
    return directory / "clients" / name


def _period(
    begin: datetime | None, end: datetime | None, life: timedelta
) -> tuple[datetime, datetime]:
    begin = begin or datetime.now(UTC) - CLOCK_SKEW
    if begin.tzinfo is None or (end is not None and end.tzinfo is None):
        raise CertError("valid_from and valid_until need a time zone, e.g. datetime.now(UTC)")
    end = end or begin + life
    if begin >= end:
        raise CertError(f"valid_until = {end} is not after valid_from = {begin}")
    return begin.astimezone(UTC), end.astimezone(UTC)


def _issued(role: str, name: str, certificate: x509.Certificate) -> Issued:
    fingerprint = certificate.fingerprint(hashes.SHA256()).hex()
    until = certificate.not_valid_after_utc
    return Issued(role, name, certificate.serial_number, fingerprint, until)


def _ledger_line(entry: Issued) -> str:
    until = entry.valid_until.isoformat()
    return f"{entry.role} {entry.name} {entry.serial:x} {entry.fingerprint} {until}\n"


def _revoked(directory: Path) -> set[int]:
    """Fails closed: a server without its list, or with a damaged one, lets nobody in."""
    path = directory / "revoked.txt"
    numbers = set()
    for line_number, line in enumerate(read_file(path).decode("utf-8", "replace").splitlines(), 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        if not re.fullmatch(r"[0-9a-fA-F]+", text):
            raise CertError(f"{path} line {line_number} is not a hexadecimal serial: correct it")
        numbers.add(int(text, 16))
    return numbers


def _certificate(peer: Peer) -> x509.Certificate:
    if isinstance(peer, Mapping):
        chain = list(peer.get("x509_pem_cert", ()))
        if len(chain) != 1:
            raise CertError("peer showed no certificate: connect with mutual TLS")
        peer = chain[0]
    try:
        return x509.load_pem_x509_certificate(peer)
    except ValueError:
        raise CertError("certificate is not valid PEM: make it again") from None


def _load(folder: Path, role: str) -> Credentials:
    """Dates are left to TLS, which both sides check at every connection."""
    certificate, key = read_pair(folder, role)
    authority_pem = read_file(folder / "authority.crt")
    try:
        certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(authority_pem))
    except (ValueError, TypeError, InvalidSignature):
        path = folder / f"{role}.crt"
        raise CertError(
            f"{path} was not signed by {folder / 'authority.crt'}: make it again"
        ) from None
    return Credentials(authority_pem, to_pem(certificate), to_pem(key))
