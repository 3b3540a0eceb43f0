"""Test that the listener refuses every client that it should, with one audit line each."""

import asyncio
import contextlib
import resource
import socket
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
from grpc._cython import cygrpc

from semisfl.net import chunks as transport
from semisfl.net.chunks import CHUNK, MAGIC, PREFIX, cut
from semisfl.net.client.rejection import FINAL, Rejected
from semisfl.net.frames import PROTOCOL, encode
from semisfl.net.server import endpoint, refusals
from semisfl.net.server.session import Session
from semisfl.net.tls import certs
from semisfl.net.tls.certs import Credentials
from tests.net.harness import (
    Network,
    audited,
    certificates,
    loop_thread,
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
    return list(cut(encode("hello", fields, {}), 0, 0))


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


def test_refused_in_the_handshake(
    net: Network, folder: Path, other: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, make in TLS_REFUSALS.items():
        outcome = knock(net.port, **make(folder, other))
        assert (outcome.frames, outcome.code) == (0, grpc.StatusCode.UNAVAILABLE), name
    with socket.create_connection(("localhost", net.port)) as scan:
        scan.sendall(b"GET / HTTP/1.1\r\n\r\n")
    until(lambda: len(audited(caplog)) >= len(TLS_REFUSALS) + 1)
    time.sleep(0.3)
    assert len(audited(caplog)) == len(TLS_REFUSALS) + 1
    assert all("TLS" in line for line in audited(caplog))
    assert net.fleet.present() == []


def test_many_failed_handshakes_leave_few_lines_that_say_so(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "AUDIT_SECONDS", 900.0)
    with network(tiny(2), certificates=folder, handshake_seconds=HANDSHAKE) as net:
        for _ in range(50):
            with socket.create_connection(("localhost", net.port)) as scan:
                scan.sendall(b"GET / HTTP/1.1\r\n\r\n")
        until(lambda: net.fleet.device_log.events["refused"] == 50)
    lines = audited(caplog)
    assert len(lines) == refusals.AUDIT_LINES + 1
    assert f"{50 - refusals.AUDIT_LINES} more refused within 900 s" in lines[-1]
    assert "the last: TLS: not TLS" in lines[-1]


def test_a_revoked_device_that_comes_again_and_again_leaves_few_lines(
    net: Network, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    device_log, times = net.fleet.device_log, refusals.AUDIT_LINES + 5
    device_log._refusals.sum_up()
    before = device_log.events["refused"]

    async def knocks() -> None:
        async with channel_to(net.port, own(folder, "revoked")) as channel:
            for _ in range(times):
                call = channel.stream_stream(transport.METHOD)()
                await call.done_writing()
                assert await call.code() in FINAL

    device_log.open(tmp_path, lambda: [])
    on_loop(knocks())
    device_log.close()
    lines = [line for line in audited(caplog) if "identity=revoked" in line]
    assert len(lines) == refusals.AUDIT_LINES + 1
    assert "reason=5 more refused" in lines[-1] and "of revoked is revoked" in lines[-1]
    written = (tmp_path / "fleet.jsonl").read_text().splitlines()
    assert sum('"name": "revoked"' in row for row in written) == len(lines)
    assert device_log.events["refused"] - before >= times


def next_epoch(net: Network) -> int:
    return net.fleet._listener.table.epochs["client-1"] + 1


def ready(net: Network, **changes: object) -> list[bytes]:
    fields = {"model": net.fleet._schemas.digest, "images": 3, "skipped": 0, **changes}
    return list(cut(encode("ready", fields, {}), next_epoch(net), 1))


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
    "another protocol": (good_hello(protocol=1), "protocol 1 but 3 here"),
    "another frame version": ([_other_version(good_hello()[0])], "protocol 9"),
    "another kind": (list(cut(encode("bottom", {"round": 1}, {}), 0, 0)), "not expected"),
    "extra field": (good_hello(image="x"), "fields are"),
    "garbage": ([b"\x00" * 40], "instead of"),
    "too short": ([b"SSF1"], "its prefix has"),
    "oversize": (list(cut([bytes(3 * CHUNK)], 0, 0)), "this phase allows"),
    "claims the earth": ([PREFIX.pack(MAGIC, 0, 0, 2**63) + b"x"], "any frame may have"),
    "silence": ([], "no hello within"),
    "a message longer than a chunk": (
        [PREFIX.pack(MAGIC, 0, 0, CHUNK) + bytes(CHUNK)],
        "of a chunk",
    ),
}
ONCE_WELCOMED = {
    "another model": (lambda net: ready(net, model="f" * 32), "built model"),
    "a much longer message": (lambda net: [bytes(8 * CHUNK)], "of a chunk"),
    "something else": (lambda net: list(cut([b"x" * 50], next_epoch(net), 1)), "not semisfl"),
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
    net.fleet.device_log._refusals.sum_up()
    caplog.clear()
    net.fleet._listener.penalties.strikes.clear()
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
    if reason == "of a chunk":
        assert net.strikes == {"client-1": 1}
    assert outcome.frames == (1 if "then" in how else 0)
    # Handshakes that came to nothing on a busy machine are nobody's: their lines name no peer.
    (line,) = [line for line in audited(caplog) if "refused peer=?" not in line]
    assert "refused peer=ipv" in line and reason in line
    assert net.fleet.present() == []


def test_a_revoked_device_may_send_its_hello_before_it_hears_why(
    net: Network, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An end that meets the hello on its way is an internal error of gRPC to the device, which tries again."""
    monkeypatch.setattr(endpoint, "UNREAD_SECONDS", 60.0)
    before = net.fleet.device_log.events["refused"]

    async def slow() -> tuple[bool, grpc.StatusCode]:
        async with channel_to(net.port, own(folder, "revoked")) as channel:
            call = channel.stream_stream(transport.METHOD)()
            while net.fleet.device_log.events["refused"] == before:
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.2)
            waits = not call.done()
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await call.write(b"whatever it is")
                await call.read()
            return waits, await call.code()

    assert on_loop(slow()) == (True, grpc.StatusCode.PERMISSION_DENIED)


def test_a_device_that_is_refused_while_its_welcome_is_sent_hears_why(
    net: Network, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = net.fleet._listener.table
    opened = table.open

    def refuse(*arguments: Any) -> Session:
        session = opened(*arguments)
        session.close(grpc.StatusCode.PERMISSION_DENIED, "client-1 was removed")
        return session

    monkeypatch.setattr(table, "open", refuse)
    outcome = knock(net.port, own(folder, "client-1"))
    assert outcome.code is grpc.StatusCode.PERMISSION_DENIED
    assert outcome.details == "client-1 was removed"


def test_a_client_revoked_while_it_is_connected_is_out_before_the_next_round(
    net: Network, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net.fleet._listener.penalties.strikes.clear()
    client = net.enrol(1)
    net.fleet._listener.penalties.check_certificates()
    assert net.fleet.present() == [1]
    certs.revoke(folder, "client-1")
    net.fleet._listener.penalties.check_certificates()
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


def test_nothing_private_is_in_a_credential_s_text(folder: Path) -> None:
    assert "PRIVATE" not in repr(own(folder))


def test_a_connection_that_was_given_up_does_not_fence_its_successor(
    net: Network, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A hello that a busy server reads late, of a client that has connected again since."""
    credentials = own(folder, "client-0")
    net.fleet._listener.penalties.strikes.clear()

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


def test_connections_that_do_not_even_begin_leave_files_for_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    option = endpoint._most_connections(1)[0]
    if option.encode() not in Path(cygrpc.__file__).read_bytes():
        pytest.skip("this version of gRPC has no such limit")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (40, 40))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: None)
    thread = loop_thread()

    async def start() -> tuple[grpc.aio.Server, int]:
        server, port = endpoint.open_port("127.0.0.1:0", "some", {}, None, [], 600.0)
        await server.start()
        return server, port

    server, port = thread.call(start())
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: thread.call(server.stop(None)))
        links = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(40)
        ]
        until(lambda: sum(map(_is_closed, links)) == 10)


def _is_closed(link: socket.socket) -> bool:
    try:
        return not link.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
