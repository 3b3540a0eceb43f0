"""Explain why a TLS handshake with the server fails; gRPC reports little or nothing.

A gRPC server that refuses a client's certificate closes the connection without an alert, and the
client reports "Socket closed". So this module repeats the handshake with Python's ssl and the same
credentials, and describes the error in one line.
"""

import asyncio
import contextlib
import ssl
import tempfile
from dataclasses import dataclass
from typing import Any

import grpc
from cryptography import x509

from semisfl.net.client.lines import plain
from semisfl.net.client.rejection import Rejected, kind_of
from semisfl.net.tls import credentials as own
from semisfl.net.tls.credentials import Credentials
from semisfl.settings.addresses import split_address

SECONDS = 5.0
FEW = 3
"""Refusals in succession that end the client. A server that is starting or stopping can look like one
once."""
NOT_CONNECTED = "failed to connect to all addresses"
"""gRPC's message for every failure before the first frame, from an absent server to TLS."""

EXPIRED, NOT_YET_VALID = 10, 9  # OpenSSL's X509_V_ERR_*
OTHER_NAME = {62, 63, 64}
OTHER_AUTHORITY = {2, 18, 19, 20, 21}


@dataclass(frozen=True)
class Finding:
    """Describe a fault. ``enough`` of them in succession end the client; 0: it goes on, as the fault may pass."""

    reason: str
    enough: int = 0


async def diagnose(address: str, credentials: Credentials) -> Finding | None:
    """Return what stops a handshake with ``address``; None if nothing does, or if it is not TLS."""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(SECONDS):
            return await _handshake(address, credentials)
    return None


def explained(error: Any, address: str, credentials: Credentials | None) -> Exception:
    """Return the failed call ``error`` as an `OSError`; as `Rejected` if the server refused or no attempt can help."""
    code, details = error.code(), plain(error.details() or "")
    if code not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return Rejected(f"{address} refuses: {details}", kind_of(details))
    finding = None
    if credentials is not None and NOT_CONNECTED in details:
        finding = asyncio.run(diagnose(address, credentials))
    if finding is not None and finding.enough == 1:
        return Rejected(finding.reason)
    return OSError(finding.reason if finding else f"no answer from {address}: {details}")


async def _handshake(address: str, credentials: Credentials) -> Finding | None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=credentials.authority.decode())
    context.set_alpn_protocols(["h2"])
    with tempfile.NamedTemporaryFile() as file:  # of mode 0600; ssl reads keys from files only
        file.write(credentials.certificate + credentials.key)
        file.flush()
        context.load_cert_chain(file.name)
    try:
        reader, writer = await _open(address, context)
    except ssl.SSLCertVerificationError as error:
        return await _bad_server(address, credentials, error)
    except ssl.SSLError as error:
        return _alert(address, credentials, error)
    try:
        if writer.get_extra_info("ssl_object").selected_alpn_protocol() != "h2":
            return Finding(
                f"{address} speaks TLS but is not a semisfl server: is the port right?", FEW
            )
        # In TLS 1.3 a client is done before the server has looked at its certificate. Who is
        # accepted is sent HTTP/2 settings at once.
        return None if await reader.read(1) else _unwanted(address, credentials)
    except ssl.SSLError as error:
        return _alert(address, credentials, error)
    except ConnectionError:
        return _unwanted(address, credentials)
    finally:
        writer.transport.abort()


async def _open(
    address: str, context: ssl.SSLContext
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = split_address(address)
    return await asyncio.open_connection(host, port, ssl=context, server_hostname=host)


async def _bad_server(
    address: str, credentials: Credentials, error: ssl.SSLCertVerificationError
) -> Finding:
    """Return why the server's certificate is not accepted, by what it contains."""
    certificate = await _certificate_of(address)
    code = error.verify_code
    if certificate is None:
        words = f"the certificate of {address} is not accepted: {error.verify_message}"
        return Finding(words, 0 if code == NOT_YET_VALID else 1)
    if code == EXPIRED:
        return Finding(
            f"the certificate of {address} expired on {own.moment(certificate.not_valid_after_utc)} (now"
            f" {own.now()}): the server needs a new one, `semisfl certs renew --server`",
            1,
        )
    if code == NOT_YET_VALID:
        return Finding(
            f"the certificate of {address} is valid from {own.moment(certificate.not_valid_before_utc)}"
            f" only, and this machine's clock says {own.now()}: set the clock, or wait"
        )
    if code in OTHER_NAME:
        host = split_address(address)[0]
        names = (
            ", ".join(name for name in own.hosts(certificate) if name.isprintable()) or "no host"
        )
        return Finding(
            f"the certificate of {address} is for {names:.200}, not"
            f" for {host}: join by a name it has, or give it one more where the authority is,"
            f" `semisfl certs renew --server --host {host}`",
            1,
        )
    if code in OTHER_AUTHORITY:
        mine = own.parse(credentials.authority).subject.rfc4514_string()
        return Finding(
            f"the certificate of {address} is signed by {certificate.issuer.rfc4514_string()!r:.80}, this"
            f" device trusts {mine!r}: another server, or this folder was made by another authority",
            1,
        )
    return Finding(f"the certificate of {address} is not accepted: {error.verify_message}", 1)


async def _certificate_of(address: str) -> x509.Certificate | None:
    """Return the server's certificate without checking it. Nothing else is sent to that server."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with contextlib.suppress(Exception):  # a stranger's certificate can raise nearly anything
        _, writer = await _open(address, context)
        der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.transport.abort()
        return x509.load_der_x509_certificate(der)
    return None


def _alert(address: str, credentials: Credentials, error: ssl.SSLError) -> Finding | None:
    reason = error.reason or ""
    if "ALERT" in reason:
        words = reason.partition("ALERT_")[2].replace("_", " ").lower()
        if not any(word in words for word in ("certificate", "unknown ca", "access denied")):
            return Finding(f"{address} ends the TLS handshake: {words}")
        if fault := _own_fault(credentials):
            return fault
        return Finding(f"{address} does not accept this device's certificate: {words}", FEW)
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return None
    return Finding(
        f"{address} does not speak TLS: is this the port of `semisfl serve`, and was it started"
        " with certificates?",
        FEW,
    )


def _unwanted(address: str, credentials: Credentials) -> Finding:
    """Return the possible reasons for a server that closes the connection without an alert.

    If this device's certificate is valid by its own clock, two are left and cannot be told apart here.
    """
    if fault := _own_fault(credentials):
        return fault
    return Finding(
        f"{address} does not accept this device's certificate, valid until"
        f" {own.moment(own.ending(credentials))}, and does not say why: the server's authority.crt"
        " is not the one that signed it, or one of the two clocks is wrong",
        FEW,
    )


def _own_fault(credentials: Credentials) -> Finding | None:
    """Return that this device's certificate is not valid by its own clock; None if it is."""
    if fault := own.expired(credentials):
        return Finding(fault, 1)
    fault = own.early(credentials)
    return Finding(fault) if fault else None
