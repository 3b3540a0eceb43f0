"""Keep an authority's lists: every certificate it signed, and those to refuse.

issued.txt stays with the authority. revoked.txt is there too, and on the server: a line added in
either place is a revocation, but only the server's own copy turns anybody away.
"""

import re
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes

from semisfl.net.tls.credentials import identity, read_certificate, was_signed_by
from semisfl.net.tls.x509_parts import CertError, append_line, is_missing, read_file

SHORTEST_PREFIX = 8
LEAST_DIGITS = 30
"""Fewest digits of a whole serial: 159 random bits practically never begin with more zeros."""
MOST_DIGITS = 40
"""No serial is longer than 20 bytes."""


@dataclass(frozen=True)
class Issued:
    """A certificate that was issued: a line of issued.txt."""

    role: str
    """authority, server or client"""
    name: str
    """The client's name; of a server its first host."""
    serial: int
    fingerprint: str
    """SHA-256 of the certificate, in hexadecimal"""
    valid_until: datetime
    valid_from: datetime
    revoked: bool = field(default=False, kw_only=True)

    @classmethod
    def of(cls, role: str, name: str, certificate: x509.Certificate) -> "Issued":
        """Return the line for a new certificate."""
        fingerprint = certificate.fingerprint(hashes.SHA256()).hex()
        period = certificate.not_valid_after_utc, certificate.not_valid_before_utc
        return cls(role, name, certificate.serial_number, fingerprint, *period)

    @property
    def days_left(self) -> int:
        """Return the whole days until it expires; negative once it has."""
        return (self.valid_until - datetime.now(UTC)).days

    @property
    def state(self) -> str:
        """Return revoked, not yet valid, valid or expired. On its last day a certificate is valid."""
        if self.revoked:
            return "revoked"
        if self.valid_from > datetime.now(UTC):
            return "not yet valid"
        return "valid" if self.days_left >= 0 else "expired"


def enter(directory: Path, entry: Issued) -> None:
    """Add a line to issued.txt."""
    dates = f"{entry.valid_until.isoformat()} {entry.valid_from.isoformat()}"
    line = f"{entry.role} {entry.name} {entry.serial:x} {entry.fingerprint} {dates}\n"
    append_line(directory / "issued.txt", line)


def listing(directory: str | Path) -> list[Issued]:
    """Return every certificate ever issued by the authority in ``directory``, oldest first.

    Raises `CertError` if issued.txt or revoked.txt is missing or damaged.
    """
    path = Path(directory) / "issued.txt"
    if is_missing(path):
        raise CertError(
            f"{path} is not there: it is kept with authority.key, where `certs init` was run"
        )
    revoked = revoked_serials(directory)
    entries = []
    for number, line in enumerate(read_file(path).decode("utf-8", "replace").splitlines(), 1):
        try:
            role, name, serial_text, fingerprint, *dates = line.split()
            until, begin = map(datetime.fromisoformat, dates)
            entry = Issued(role, name, int(serial_text, 16), fingerprint, until, begin)
        except ValueError:
            raise CertError(f"{path} line {number} is damaged: restore it from a copy") from None
        entries.append(replace(entry, revoked=entry.serial in revoked))
    return entries


def clients_named(directory: str | Path, name: str) -> list[Issued]:
    """Return every certificate ever issued to this client, oldest first."""
    everything = [entry for entry in listing(directory) if entry.role == "client"]
    theirs = [entry for entry in everything if entry.name == name]
    if not theirs:
        known = ", ".join(sorted({entry.name for entry in everything})) or "none"
        raise CertError(f"client {name!r} was never issued a certificate; those that were: {known}")
    return theirs


def revoke(directory: str | Path, name: str) -> list[int]:
    """Revoke every certificate ever issued to this client; return the newly revoked serials.

    Raises `CertError` for an unknown name, or where the authority's issued.txt is not.
    """
    directory = Path(directory)
    if is_missing(directory / "issued.txt"):
        raise CertError(
            f"{directory / 'issued.txt'} is not there, so the serials of {name!r} are not known here: "
            "revoke by name where the authority is and carry its revoked.txt over,"
            " or revoke here with --serial HEX or --certificate FILE"
        )
    fresh = [entry.serial for entry in clients_named(directory, name) if not entry.revoked]
    for number in fresh:
        _turn_away(directory, number, name)
    return fresh


def revoke_serial(directory: str | Path, text: str) -> tuple[int, bool]:
    """Revoke a certificate by its hexadecimal serial; return the serial and whether that is new.

    If issued.txt is there, the serial must be in it, and its first digits are enough. Where there is none, as on a
    server, all digits are needed: a serial that is cut short would revoke nobody. Raises `CertError` otherwise.
    """
    directory = Path(directory)
    digits = text.strip().lower().removeprefix("0x").replace(":", "").lstrip("0")
    if not re.fullmatch(r"[0-9a-f]+", digits):
        raise CertError(f"serial {text!r} is not hexadecimal: `semisfl certs list` shows serials")
    if len(digits) > MOST_DIGITS:
        raise CertError(
            f"serial {text!r} has {len(digits)} digits, and none has over {MOST_DIGITS} hexadecimal"
            " ones: give `serial_hex` of `semisfl certs list --json`, not the decimal `serial`"
        )
    if is_missing(directory / "issued.txt"):
        if len(digits) < LEAST_DIGITS:
            raise CertError(
                f"serial {text!r} is cut short: where there is no issued.txt give all of its"
                " digits, about 40, as in the server's log or `serial_hex` of `semisfl certs list --json`"
            )
        return int(digits, 16), _turn_away(directory, int(digits, 16), "by serial")
    matches = [
        entry
        for entry in listing(directory)
        if f"{entry.serial:x}" == digits
        or (len(digits) >= SHORTEST_PREFIX and f"{entry.serial:x}".startswith(digits))
    ]
    if len(matches) != 1:
        raise CertError(
            f"serial {text!r} is that of {len(matches)} issued certificates:"
            f" give all of it, or at least {SHORTEST_PREFIX} digits, as in `serial_hex` of `semisfl certs list --json`"
        )
    if matches[0].role != "client":
        raise CertError(f"serial {text!r} is the {matches[0].role}'s: only clients are turned away")
    return matches[0].serial, _turn_away(directory, matches[0].serial, matches[0].name)


def revoke_certificate(directory: str | Path, file: str | Path) -> tuple[str, bool]:
    """Revoke the certificate in ``file``; return the client's name and whether that is new.

    Raises `CertError` if the authority in ``directory`` did not sign it, or if it is no client's.
    """
    directory, file = Path(directory), Path(file)
    certificate = read_certificate(file)
    name = identity(read_file(file))
    if not was_signed_by(certificate, read_certificate(directory / "authority.crt")):
        raise CertError(
            f"{file} was not signed by {directory / 'authority.crt'}: wrong --dir or file"
        )
    return name, _turn_away(directory, certificate.serial_number, name)


def revoked_serials(directory: str | Path) -> frozenset[int]:
    """Return the serials of revoked.txt.

    Raises `CertError` if the file is missing, empty or damaged: a list that cannot be read must let nobody in.
    """
    path = Path(directory) / "revoked.txt"
    if is_missing(path):
        raise CertError(
            f"{path} cannot be read: it is missing; copy it from the authority's folder"
        )
    content = read_file(path)
    if not content:
        # `certs init` writes a comment first, so an empty file is an incomplete copy.
        raise CertError(
            f"{path} is empty, which even a list without serials is not: restore it from a copy"
        )
    numbers = set()
    for line_number, line in enumerate(content.decode("utf-8", "replace").splitlines(), 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        if not re.fullmatch(r"[0-9a-fA-F]+", text):
            raise CertError(f"{path} line {line_number} is not a hexadecimal serial: correct it")
        numbers.add(int(text, 16))
    return frozenset(numbers)


def _turn_away(directory: Path, serial: int, owner: str) -> bool:
    """Add to revoked.txt and return whether the serial is new.

    A missing list is not started again: the server would take this one line for the whole list.
    """
    if serial in revoked_serials(directory):
        return False
    today = datetime.now(UTC).date()
    append_line(directory / "revoked.txt", f"{serial:x}  # {owner}, {today}\n")
    return True
