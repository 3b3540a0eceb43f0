"""Parts of X.509 certificates, PEM, and files that nobody else may read.

Keys are on the curve P-256 and not encrypted: the files' permissions (0600, in folders of 0700) protect them. Every
file is replaced as a whole, so a full disk or a crash leaves the old one.
"""

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from semisfl.files import append_whole, write_whole

MISSING = {
    "authority": "; copy it from the authority's folder",
    "client": "; `semisfl certs request` and `semisfl certs sign` make it",
    "server": "; `semisfl certs server` makes it",
}
"""Advice on a file of this name that is not there."""


class CertError(ValueError):
    """Raised for a bad certificate, key or name; the message is one line."""


def start_certificate(
    subject: x509.Name,
    issuer: x509.Name,
    public_key: ec.EllipticCurvePublicKey,
    period: tuple[datetime, datetime],
) -> x509.CertificateBuilder:
    """Return a builder with the names, key, serial number and validity of a new certificate."""
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(period[0])
        .not_valid_after(period[1])
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
    )


def common_name_of(common_name: str) -> x509.Name:
    """Return a name that consists of a common name (CN) alone."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def issuer_id(key: ec.EllipticCurvePrivateKey) -> x509.AuthorityKeyIdentifier:
    """Return the extension that names the key which signs a certificate."""
    return x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())


def key_usage(
    *, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False
) -> x509.KeyUsage:
    """Return the extension that says what a key is for; what is not named is not allowed."""
    return x509.KeyUsage(
        digital_signature=digital_signature,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def read_pair(folder: Path, role: str) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Return ``ROLE.crt`` and ``ROLE.key`` of a folder; raise `CertError` if they are damaged or do not fit."""
    certificate_path, key_path = folder / f"{role}.crt", folder / f"{role}.key"
    content = read_file(certificate_path)
    key = read_key(key_path)
    try:
        certificate = x509.load_pem_x509_certificate(content)
    except ValueError:
        raise CertError(f"{certificate_path} is damaged: make it again") from None
    if key.public_key() != certificate.public_key():
        raise CertError(f"{key_path} does not belong to {certificate_path}: make them again")
    return certificate, key


def read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Return the private key in a PEM file; raise `CertError` if there is none of the kind that we make."""
    content = read_file(path)
    try:
        key = serialization.load_pem_private_key(content, password=None)
    except (ValueError, TypeError):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise CertError(f"{path} is damaged: make it again")
    return key


def key_fingerprint(key: ec.EllipticCurvePublicKey) -> str:
    """Return the first 16 hexadecimal digits of a key's SHA-256, by which people compare keys."""
    der = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    return hashlib.sha256(key.public_bytes(*der)).hexdigest()[:16]


def to_pem(
    thing: x509.Certificate | x509.CertificateSigningRequest | ec.EllipticCurvePrivateKey,
) -> bytes:
    """Return a certificate, a request or an unencrypted private key in PEM."""
    if not isinstance(thing, ec.EllipticCurvePrivateKey):
        return thing.public_bytes(serialization.Encoding.PEM)
    return thing.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def refuse_existing(paths: Sequence[Path], instead: str) -> None:
    """Raise `CertError` if one of the files exists; ``instead`` says what to do."""
    if existing := [path for path in paths if not is_missing(path)]:
        raise CertError(f"{existing[0]} exists: {instead}")


def is_missing(path: Path) -> bool:
    """Return whether a file is missing. One without permission is not: reading it says why."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def read_file(path: Path) -> bytes:
    """Return a file's bytes; raise `CertError` with the reason, and where a missing file comes from."""
    try:
        return path.read_bytes()
    except OSError as error:
        fix = "" if isinstance(error, PermissionError) else MISSING.get(path.stem, "")
        raise CertError(f"{path} cannot be read: {error.strerror or error}{fix}") from None


def write_file(path: Path, content: bytes) -> None:
    """Write the whole file or nothing; at no moment can others read a key.

    Its folder is made if there is none. Raises `CertError` with the system's reason, such as a full disk.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(path, content, private=True)
    except OSError as error:
        raise CertError(f"{path} cannot be written: {error.strerror or error}") from None


@contextlib.contextmanager
def one_at_a_time(directory: Path) -> Iterator[None]:
    """Let other commands that make certificates in ``directory`` wait until the block ends.

    On a file system without locks nobody waits. Raises `CertError` if the folder cannot be made or opened.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise CertError(f"{directory} cannot be used: {error.strerror or error}") from None
    try:
        with contextlib.suppress(OSError):  # some file systems have no locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def append_line(path: Path, line: str) -> None:
    """Append a line in one write, so that two commands at once keep both lines.

    Raises `CertError` as `write_file` does; no half of a line is left then.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # An editor may have left the last line without its end.
        complete = not path.exists() or path.read_bytes()[-1:] in (b"", b"\n")
        append_whole(path, (line if complete else f"\n{line}").encode(), private=True)
    except OSError as error:
        raise CertError(f"{path} cannot be written: {error.strerror or error}") from None
