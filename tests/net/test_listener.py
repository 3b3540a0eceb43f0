"""Test that the listener refuses every client that it should, with one audit line each."""

import asyncio
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from semisfl.net import chunks as transport
from semisfl.net.chunks import CHUNK, MAGIC, PREFIX, cut
from semisfl.net.client.rejection import Rejected
from semisfl.net.frames import PROTOCOL, encode
from semisfl.net.tls import certs
from semisfl.net.tls.certs import Credentials
from tests.net.harness import (
    Network,
    audited,
    certificates,
    network,
    on_loop,
    tiny,
    until,
)

HANDSHAKE = 1.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = certificates(tmp_path_factory.mktemp("authority"), 2, "revoked")
    certs.revoke(place, "revoked")
    return place


@pytest.fixture(scope="module")
def net(folder: Path) -> Iterator[Network]:
    with network(tiny(2), certificates=folder, handshake_seconds=HANDSHAKE) as net:
        yield net


def own(folder: Path, name: str = "client-0") -> Credentials:
    return certs.load_client_credentials(folder, name)


def forged(
    folder: Path,
    subject: str,
    uri: str | None,
    usage: x509.ObjectIdentifier,
    issuer: Path | None = None,
) -> Credentials:
    """A certificate signed by this authority that `semisfl certs` would never make."""
    key = ec.generate_private_key(ec.SECP256R1())
    place = issuer or folder / "authority"
    authority = x509.load_pem_x509_certificate(place.with_suffix(".crt").read_bytes())
    signer = serialization.load_pem_private_key(place.with_suffix(".key").read_bytes(), None)
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
    )
    if uri is not None:
        names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)])
        builder = builder.add_extension(names, critical=False)
    certificate = builder.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    if issuer is not None:
        certificate += place.with_suffix(".crt").read_bytes()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return Credentials((folder / "authority.crt").read_bytes(), certificate, private)


@dataclass
class Outcome:
    frames: int
    code: grpc.StatusCode
    details: str


def channel_to(
    port: int,
    credentials: Credentials | None,
    name: str = "localhost",
    trust: bytes | None = None,
) -> grpc.aio.Channel:
    # By address, so that there is one connection; the name is what the certificate must have.
    options = [*transport.options(), ("grpc.ssl_target_name_override", name)]
    if credentials is None and trust is None:
        return grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options)
    pair = (credentials.key, credentials.certificate) if credentials else ()
    tls = grpc.ssl_channel_credentials(trust or credentials.authority, *pair)
    return grpc.aio.secure_channel(f"127.0.0.1:{port}", tls, options=options)


def knock(
    port: int,
    credentials: Credentials | None,
    chunks: list[bytes] | None = None,
    *,
    name: str = "localhost",
    then: list[bytes] | None = None,
    trust: bytes | None = None,
) -> Outcome:
    """Open a stream by hand, send ``chunks`` and, once welcomed, ``then``; see how it ends."""

    async def attempt() -> Outcome:
        channel = channel_to(port, credentials, name, trust)
        call = channel.stream_stream(transport.METHOD)()
        frames = 0
        try:
            async with asyncio.timeout(60):
                for chunk in good_hello() if chunks is None else chunks:
                    await call.write(chunk)
                while (chunk := await call.read()) is not grpc.aio.EOF:
                    frames += 1
                    for answer in then or []:
                        await call.write(answer)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass
        code, details = await call.code(), await call.details()
        await channel.close()
        return Outcome(frames, code, details or "")

    return on_loop(attempt())


def cut_whole(kind: str, fields: dict[str, Any], ticket: int = 0) -> list[bytes]:
    """The chunks of a frame without tensors."""
    return list(cut(b"".join(encode(kind, fields, {})), ticket))


def good_hello(**changes: object) -> list[bytes]:
    fields = {
        "protocol": PROTOCOL,
        "run": "",
        "name": "",
        "codecs": ["bf16", "fp16", "fp32", "int4", "int8"],
        "methods": ["semisfl"],
        "instance": "",
        "attempt": 1,
        "policy": {},
        **changes,
    }
    return cut_whole("hello", fields)


def test_the_right_client_is_welcomed(
    net: Network, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The control: everything below differs from this in one thing."""
    client = net.enrol(0)
    time.sleep(HANDSHAKE + 0.7)
    assert audited(caplog) == [] and client.error is None
    client.kill()
    client.join(30)
    until(lambda: net.fleet.present() == [])


TLS_REFUSALS = {
    "none": lambda folder, other: {"credentials": None, "trust": own(folder).authority},
    "plaintext": lambda folder, other: {"credentials": None},
    "another authority": lambda folder, other: {
        "credentials": replace(own(other), authority=own(folder).authority)
    },
    "another authority on both sides": lambda folder, other: {"credentials": own(other)},
    "expired": lambda folder, other: {"credentials": own(folder, "expired")},
    "not yet valid": lambda folder, other: {"credentials": own(folder, "early")},
    "the server's own": lambda folder, other: {
        "credentials": certs.load_server_credentials(folder)
    },
    "server usage with a client's name": lambda folder, other: {
        "credentials": forged(
            folder, "client-0", "semisfl://client/client-0", ExtendedKeyUsageOID.SERVER_AUTH
        )
    },
    "signed by a client": lambda folder, other: {
        "credentials": forged(
            folder,
            "client-1",
            "semisfl://client/client-1",
            ExtendedKeyUsageOID.CLIENT_AUTH,
            folder / "clients" / "client-0" / "client",
        )
    },
    "wrong host name": lambda folder, other: {"credentials": own(folder), "name": "elsewhere"},
}


@pytest.fixture(scope="module")
def other(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    now = datetime.now(UTC)
    certs.make_client(
        folder, "expired", valid_from=now - timedelta(days=9), valid_until=now - timedelta(days=1)
    )
    certs.make_client(
        folder, "early", valid_from=now + timedelta(days=1), valid_until=now + timedelta(days=9)
    )
    return certificates(tmp_path_factory.mktemp("other"), 1)


def test_refused_in_the_handshake(net: Network, folder: Path, other: Path) -> None:
    for name, make in TLS_REFUSALS.items():
        outcome = knock(net.port, **make(folder, other))
        assert (outcome.frames, outcome.code) == (0, grpc.StatusCode.UNAVAILABLE), name
    assert net.fleet.present() == []


def ready(net: Network, **changes: object) -> list[bytes]:
    fields = {"model": net.fleet._schemas.digest, "images": 3, "skipped": 0, **changes}
    return cut_whole("ready", fields, 1)


def _other_version(chunk: bytes) -> bytes:
    at = PREFIX.size + 4
    return chunk[:at] + struct.pack("<I", 9) + chunk[at + 4 :]


CLIENT_AUTH = ExtendedKeyUsageOID.CLIENT_AUTH
CERTIFICATES = {
    "revoked": (lambda folder: own(folder, "revoked"), "revoked"),
    "no name": (lambda folder: forged(folder, "client-0", None, CLIENT_AUTH), ""),
    "two names": (
        lambda folder: forged(folder, "client-0", "semisfl://client/client-1", CLIENT_AUTH),
        "",
    ),
    "stranger when all places are taken": (
        lambda folder: forged(folder, "client-7", "semisfl://client/client-7", CLIENT_AUTH),
        "all clients.total = 2 places are taken",
    ),
}
# `test_admission.py` has every reason to refuse a hello or what a client says it holds; here is one of each.
HELLOS = {
    "another protocol": (good_hello(protocol=1), "protocol 1 but 4 here"),
    "another frame version": ([_other_version(good_hello()[0])], "protocol 9"),
    "another kind": (cut_whole("bottom", {"round": 1}), "not expected"),
    "extra field": (good_hello(image="x"), "hello has fields"),
    "garbage": ([b"\x00" * 40], "a frame begins with"),
    "too short": ([b"SSF2"], "a prefix has"),
    "oversize": (list(cut(bytes(3 * CHUNK), 0)), "are due"),
    "claims the earth": ([PREFIX.pack(MAGIC, 0, 2**63) + b"x"], "are due"),
    "silence": ([], "no hello within"),
}
ONCE_WELCOMED = {
    "another model": (lambda net: ready(net, model="f" * 32), "built model"),
    "something else": (lambda net: list(cut(b"x" * 50, 1)), "not semisfl"),
}


@pytest.mark.parametrize("name", [*CERTIFICATES, *HELLOS, *ONCE_WELCOMED])
def test_refused_at_hello(
    name: str, net: Network, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    how: dict[str, Any] = {"credentials": own(folder, "client-1")}
    if name in CERTIFICATES:
        make, reason = CERTIFICATES[name]
        how["credentials"] = make(folder)
    elif name in HELLOS:
        how["chunks"], reason = HELLOS[name]
    else:
        answer, reason = ONCE_WELCOMED[name]
        how["then"] = answer(net)
    caplog.clear()
    net.fleet.sessions.strikes.clear()
    outcome = knock(net.port, **how)
    final = {
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INVALID_ARGUMENT,
    }
    if name == "silence":
        # A busy server may be the reason itself: the client may try again, and it is no strike.
        final = {grpc.StatusCode.UNAVAILABLE}
        assert "client-1" not in net.strikes
    # Who is cut off while still writing may see gRPC's own words instead of ours.
    cut_off = (outcome.code, outcome.details) == (
        grpc.StatusCode.INTERNAL,
        "Internal error from Core",
    )
    assert cut_off or (outcome.code in final and reason in outcome.details), outcome
    assert outcome.frames == (1 if "then" in how else 0)
    (line,) = audited(caplog)
    assert "refused peer=ipv" in line and reason in line
    assert net.fleet.present() == []


def test_a_client_revoked_while_it_is_connected_is_out_before_the_next_round(
    net: Network, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net.fleet.sessions.strikes.clear()
    client = net.enrol(1)
    net.fleet.sessions.review()
    assert net.fleet.present() == [1]
    certs.revoke(folder, "client-1")
    net.fleet.sessions.review()
    client.join(30)
    assert isinstance(client.error, Rejected) and "revoked" in str(client.error)
    assert net.fleet.present() == [] and len(audited(caplog)) == 1


def test_a_client_revoked_while_the_run_is_paused_does_not_take_part(tmp_path: Path) -> None:
    certificates(tmp_path, 3)
    settings = {"quorum": 2, "deadline": 1.0}
    with network(tiny(3, network=settings), certificates=tmp_path) as net:
        net.enrol(0)
        ready = threading.Thread(target=net.fleet.wait_ready)
        ready.start()
        certs.revoke(tmp_path, "client-0")
        net.join(1)
        until(lambda: net.fleet.present() == [1])
        assert ready.is_alive(), "one of two is no quorum"
        net.join(2)
        ready.join(30)
        assert not ready.is_alive() and net.fleet.present() == [1, 2]


def test_a_connection_that_was_given_up_does_not_fence_its_successor(
    net: Network, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A hello that a busy server reads late, of a client that has connected again since."""
    credentials = own(folder, "client-0")
    net.fleet.sessions.strikes.clear()

    async def late() -> tuple[grpc.StatusCode, int]:
        newest = channel_to(net.port, credentials)
        given_up = channel_to(net.port, credentials)
        try:
            first = newest.stream_stream(transport.METHOD)()
            await first.write(good_hello(instance="a", attempt=2)[0])
            assert await first.read() is not grpc.aio.EOF
            second = given_up.stream_stream(transport.METHOD)()
            await second.write(good_hello(instance="a", attempt=1)[0])
            code = await second.code()
            return code, int(first.done())
        finally:
            await newest.close()
            await given_up.close()

    assert on_loop(late()) == (grpc.StatusCode.UNAVAILABLE, 0)
    assert "a later connection of client-0 is here" in audited(caplog)[0]
