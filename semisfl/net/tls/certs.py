"""Issue certificates for mutual TLS with a small authority; nobody needs openssl.

    DIR/authority.crt  authority.key     signs the others; the key may be kept elsewhere
        server.crt     server.key        with authority.crt and revoked.txt all a server needs
        clients/NAME/                    the files to carry to the device:
            authority.crt  client.crt    and client.key, if it was made here (`make_client`)
        issued.txt                       every certificate ever signed
        revoked.txt                      serial numbers the server turns away

A device makes its key itself (`make_request`), and the authority signs its request (`sign_request`): the key never
leaves the device. A client is its certificate's name: the CN, and again a URI that no server certificate carries.
"""

import ipaddress
import re
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from semisfl.net.tls.credentials import (
    CLIENT_URI,
    Credentials as Credentials,
    check_name,
    client_folder,
    hosts,
    identity as identity,
    load_client_credentials as load_client_credentials,
    load_server_credentials as load_server_credentials,
    read_certificate,
)
from semisfl.net.tls.ledger import (
    Issued,
    clients_named,
    enter,
    listing as listing,
    revoke as revoke,
    revoke_certificate as revoke_certificate,
    revoke_serial as revoke_serial,
)
from semisfl.net.tls.x509_parts import (
    CertError as CertError,
    common_name_of,
    is_missing,
    issuer_id,
    key_fingerprint,
    key_usage,
    one_at_a_time,
    read_file,
    read_key,
    read_pair,
    refuse_existing,
    start_certificate,
    to_pem,
    write_file,
)

AUTHORITY_LIFE = timedelta(days=3652)
"""How long an authority's certificate is valid."""
LEAF_LIFE = timedelta(days=365)
"""How long a server's and a device's certificate is valid."""
CLOCK_SKEW = timedelta(hours=1)
"""Certificates begin this much in the past: devices without a battery-backed clock start a little behind."""

HOST_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
HOST_NAME = re.compile(rf"(?=.{{1,253}}\Z){HOST_LABEL}(\.{HOST_LABEL})*")


def make_authority(
    directory: str | Path,
    *,
    valid_from: datetime | None = None,
    valid_until: datetime | None = None,
) -> Issued:
    """Make a new authority in ``directory`` and return its line of the ledger.

    Args:
        directory: a folder without an authority; it is made if there is none.
        valid_from: the first moment, with a time zone; default: an hour ago.
        valid_until: the last moment; default: ten years later.

    Raises `CertError` if there is an authority already, or the files cannot be written.
    """
    directory = Path(directory)
    key = ec.generate_private_key(ec.SECP256R1())
    # A unique name, so that certificates of two authorities also differ in their issuer.
    subject = common_name_of(f"semisfl authority {secrets.token_hex(4)}")
    period = _period(valid_from, valid_until, AUTHORITY_LIFE)
    builder = (
        start_certificate(subject, subject, key.public_key(), period)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(key_usage(key_cert_sign=True, crl_sign=True), critical=True)
        .add_extension(issuer_id(key), critical=False)
    )
    certificate = builder.sign(key, hashes.SHA256())
    issued = Issued.of("authority", "authority", certificate)
    instead = "choose another folder, or remove it if none of its certificates is needed"
    _keep(directory, directory, issued, key, certificate, instead)
    return issued


def make_server(
    directory: str | Path,
    names: Sequence[str],
    *,
    valid_from: datetime | None = None,
    valid_until: datetime | None = None,
    overwrite: bool = False,
) -> Issued:
    """Make the server's certificate, and return its line of the ledger.

    Args:
        directory: the authority's folder, which gets server.crt and server.key.
        names: every host name and IP address that devices connect to.
        valid_from: as in `make_authority`.
        valid_until: default: a year later, and never later than the authority's.
        overwrite: replace a certificate that is there; it stays valid.

    Raises `CertError` for a name that is none, or if there is a certificate already.
    """
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
    """Make a client's key and certificate in ``clients/NAME``, and return its line of the ledger.

    For a test bench, where one person owns the server and the devices: a device of somebody else makes its key itself
    (`make_request`). The arguments are those of `make_server`; ``name`` is the client's, by which the server knows
    it. A certificate replaced by ``overwrite`` stays valid: `revoke` it first if it is lost.
    """
    return _make_client(
        Path(directory), name, _period(valid_from, valid_until, LEAF_LIFE), overwrite
    )


def make_request(folder: str | Path, name: str) -> tuple[Path, str]:
    """Make a device's key and a request for a certificate; return the request's file and the key's fingerprint.

    A key that is there is kept, so until the new certificate arrives the old one works.

    Args:
        folder: the device's own folder, which gets ``client.key`` and ``NAME.csr``.
        name: the client's, by which the server will know it.

    Raises `CertError` for a bad name or a damaged key, or if the files cannot be written.
    """
    folder = Path(folder)
    check_name(name)
    path, request = folder / "client.key", folder / f"{name}.csr"
    with one_at_a_time(folder):
        if is_missing(path):
            write_file(path, to_pem(ec.generate_private_key(ec.SECP256R1())))
        key = read_key(path)
        builder = x509.CertificateSigningRequestBuilder(common_name_of(name))
        write_file(request, to_pem(builder.sign(key, hashes.SHA256())))
    return request, key_fingerprint(key.public_key())


def sign_request(directory: str | Path, file: str | Path) -> tuple[Issued, str]:
    """Sign a device's request; return the certificate's line of the ledger and the key's fingerprint.

    Name and key are taken from the request, nothing else. ``clients/NAME`` of the authority's folder gets what the
    device needs: client.crt and authority.crt. The same again renews a certificate.

    Args:
        directory: the authority's folder.
        file: the request that `make_request` wrote.

    Raises `CertError` for a file that is no request, and if the device of this name has another key or was revoked.
    """
    directory = Path(directory)
    content = read_file(Path(file))
    try:
        request = x509.load_pem_x509_csr(content)
        (name,) = (str(one.value) for one in request.subject)
        key = request.public_key()
    except ValueError:
        raise CertError(f"{file} is no request: `semisfl certs request` makes one") from None
    if not request.is_signature_valid or not isinstance(key, ec.EllipticCurvePublicKey):
        raise CertError(f"{file} is damaged: make it again with `semisfl certs request`")
    present = client_folder(directory, name) / "client.crt"
    if not is_missing(present) and read_certificate(present).public_key() == key:
        _refuse_revoked(directory, name)
    elif not is_missing(present) or any(
        (one.role, one.name, one.state) == ("client", name, "valid") for one in listing(directory)
    ):
        raise CertError(
            f"{name!r} has a certificate with another key: another device needs another name; if this device has a new"
            f" key, revoke the old one with `semisfl certs revoke --name {name}`, and remove {present.parent}"
        )
    issued = _make_client(directory, name, _period(None, None, LEAF_LIFE), True, key)
    return issued, key_fingerprint(key)


def _make_client(
    directory: Path,
    name: str,
    period: tuple[datetime, datetime],
    overwrite: bool,
    public_key: ec.EllipticCurvePublicKey | None = None,
) -> Issued:
    """Make a client's certificate in ``clients/NAME``; without a ``public_key`` also a new key."""
    folder = client_folder(directory, name)
    issued = _make_leaf(
        directory,
        folder,
        role="client",
        name=name,
        subject=name,
        purpose=ExtendedKeyUsageOID.CLIENT_AUTH,
        alternatives=[x509.UniformResourceIdentifier(CLIENT_URI + name)],
        period=period,
        overwrite=overwrite,
        public_key=public_key,
    )
    write_file(folder / "authority.crt", read_file(directory / "authority.crt"))
    return issued


def renew_client(directory: str | Path, name: str) -> Issued:
    """Make a new key and certificate in ``clients/NAME`` for a client of `make_client`.

    The old certificate stays valid until it expires or is revoked, so there is no moment in which
    the device could not connect.
    """
    folder = client_folder(Path(directory), name)
    _refuse_revoked(Path(directory), name)
    if is_missing(folder / "client.key") and not is_missing(folder / "client.crt"):
        raise CertError(
            f"the key of {name!r} is on the device: renew with `semisfl certs request` there and"
            " `semisfl certs sign` here"
        )
    return make_client(directory, name, overwrite=True)


def _refuse_revoked(directory: Path, name: str) -> None:
    """Raise `CertError` for a client all of whose certificates are revoked."""
    if all(entry.revoked for entry in clients_named(directory, name)):
        raise CertError(
            f"every certificate of {name!r} is revoked: if it may come back, remove its folder in"
            f" {directory / 'clients'} and make it a new one"
        )


def renew_server(directory: str | Path, more_hosts: Sequence[str] = ()) -> Issued:
    """Make a new key and certificate for the server, for the same hosts and ``more_hosts``.

    The old certificate stays valid too. A running server reads the new files by itself. Raises `CertError` if the
    old certificate is not there to tell its hosts.
    """
    path = Path(directory) / "server.crt"
    if is_missing(path):
        raise CertError(
            f"{path} is not there to tell the hosts: copy it here,"
            " or name them with `semisfl certs server --host HOST`"
        )
    names = dict.fromkeys([*hosts(read_certificate(path)), *more_hosts])
    return make_server(directory, list(names), overwrite=True)


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
    public_key: ec.EllipticCurvePublicKey | None = None,
) -> Issued:
    """Make a certificate for one purpose, signed by the authority, and write it to ``folder``.

    Without a ``public_key`` a new key is made and written too.
    """
    if is_missing(directory / "authority.key"):
        raise CertError(
            f"{directory / 'authority.key'} is not there: certificates are made where it is kept;"
            " `semisfl certs init` makes a new authority"
        )
    authority, authority_key = read_pair(directory, "authority")
    begin, end = period[0], min(period[1], authority.not_valid_after_utc)
    if begin >= end:
        raise CertError(
            f"valid_from = {begin} is not before the authority's end {end}: make a new authority"
        )
    key = None
    if public_key is None:
        key = ec.generate_private_key(ec.SECP256R1())
        public_key = key.public_key()
    certificate = (
        start_certificate(common_name_of(subject), authority.subject, public_key, (begin, end))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(key_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(issuer_id(authority_key), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    issued = Issued.of(role, name, certificate)
    instead = None if overwrite else "`semisfl certs renew` replaces it by a new one"
    _keep(directory, folder, issued, key, certificate, instead)
    return issued


def _keep(
    directory: Path,
    folder: Path,
    issued: Issued,
    key: ec.EllipticCurvePrivateKey | None,
    certificate: x509.Certificate,
    instead: str | None,
) -> None:
    """Enter a certificate in the ledger and write it and its key, if that was made here, to ``folder``.

    Files that exist are replaced only if ``instead``, which says what to do about them, is None.
    """
    targets = [folder / f"{issued.role}.key", folder / f"{issued.role}.crt"]
    # Two commands at once would both find the folder empty, and could leave the key of one with the certificate of
    # the other.
    with one_at_a_time(directory):
        if instead is not None:
            refuse_existing(targets, instead)
        if issued.role == "authority" and is_missing(directory / "revoked.txt"):
            head = b"# serial numbers of certificates to turn away, one per line\n"
            write_file(directory / "revoked.txt", head)
        # The ledger first: a certificate that exists but is not listed could not be revoked by name.
        enter(directory, issued)
        if key is not None:
            write_file(targets[0], to_pem(key))
        write_file(targets[1], to_pem(certificate))


def _host(name: str) -> x509.GeneralName:
    """Return a host name or IP address as a certificate holds it."""
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass
    # All digits and dots is a mistyped address, never a host.
    if not HOST_NAME.fullmatch(name) or re.fullmatch(r"[0-9.]+", name):
        raise CertError(
            f"server name {name!r} is neither an IP address nor an ASCII host name; correct it"
        )
    return x509.DNSName(name)


def _period(
    begin: datetime | None, end: datetime | None, life: timedelta
) -> tuple[datetime, datetime]:
    """Return when a certificate begins and ends, in UTC; by default it lasts for ``life``."""
    begin = begin or datetime.now(UTC) - CLOCK_SKEW
    if begin.tzinfo is None or (end is not None and end.tzinfo is None):
        raise CertError("valid_from and valid_until need a time zone, e.g. datetime.now(UTC)")
    end = end or begin + life
    if begin >= end:
        raise CertError(
            f"valid_until = {end} is not after valid_from = {begin}; choose a later one"
        )
    return begin.astimezone(UTC), end.astimezone(UTC)
