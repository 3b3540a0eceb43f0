"""Test connections to a page that stay silent, and certificates that are renewed while it is served."""

import asyncio
import errno
import http.client
import logging
import resource
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from starlette.types import Receive, Scope, Send

from semisfl.net.tls import certs
from semisfl.watch.address import Address, serving
from semisfl.watch.connections import Limits
from tests.watch.test_app import TOKEN, ask

PATIENT = 600.0
REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    headers = [(b"content-length", b"5")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"hello"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    certs.make_authority(tmp_path / "certs")
    certs.make_server(tmp_path / "certs", ["localhost"])
    return tmp_path / "certs"


@contextmanager
def served(limits: Limits, certificates: Path | None = None) -> Iterator[str]:
    address = Address("127.0.0.1", 0, TOKEN if certificates else None, certificates)
    with serving(hello, address, address.bind(limits)) as url:
        yield url


def test_the_parts_of_an_answer_do_not_wait_for_each_other() -> None:
    """asyncio switches the wait off for sockets whose protocol is named."""
    with (
        Address("127.0.0.1", 0).bind() as listener,
        socket.create_connection(listener.getsockname(), 10),
        listener.accept()[0] as taken,
    ):
        assert taken.proto == socket.IPPROTO_TCP


def connect(url: str) -> socket.socket:
    return socket.create_connection(("127.0.0.1", urlsplit(url).port or 0), timeout=30)


def secured(url: str) -> ssl.SSLSocket:
    while True:
        try:
            return ssl._create_unverified_context().wrap_socket(connect(url))
        except (ConnectionError, ssl.SSLError):
            continue  # a slow machine was not in time


def answer(url: str) -> tuple[int, str]:
    """Ask until there is an answer: a slow machine may not be in time, or have no room."""
    while True:
        try:
            return ask(url)[:2]
        except (ConnectionError, http.client.HTTPException, ssl.SSLError):
            continue


def until_closed(link: socket.socket) -> bytes:
    """Return whatever comes; raise `TimeoutError` if the other side does not close."""
    received = b""
    try:
        while more := link.recv(1000):
            received += more
    except ConnectionResetError:
        pass
    return received


def certificate_of(url: str, host: str = "127.0.0.1") -> str:
    return ssl.get_server_certificate((host, urlsplit(url).port or 0), timeout=30)


@pytest.mark.parametrize("beginning", [b"", b"G", REQUEST[:-2]])
def test_incomplete_requests_are_closed_after_a_while(beginning: bytes) -> None:
    with (
        served(Limits(request_seconds=0.2, idle_seconds=PATIENT)) as url,
        connect(url) as link,
    ):
        link.sendall(beginning)
        assert until_closed(link) == b""
        assert answer(url) == (200, "hello"), "others are answered"


def test_idle_connections_are_closed_after_an_answer() -> None:
    with (
        served(Limits(request_seconds=PATIENT, idle_seconds=0.2)) as url,
        connect(url) as link,
    ):
        link.sendall(REQUEST)
        received = b""
        while not received.endswith(b"hello"):
            received += link.recv(1000)
        link.sendall(REQUEST[:-2])
        assert until_closed(link) == b""


def test_connections_without_a_tls_handshake_are_closed(folder: Path) -> None:
    with (
        served(Limits(request_seconds=1.0), folder) as url,
        connect(url) as silent,
        secured(url) as link,
    ):
        assert until_closed(silent) == b""
        assert until_closed(link) == b""
        assert answer(url)[0] == 401


def test_an_answer_may_take_longer_than_a_request_may() -> None:
    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(5):
            await asyncio.sleep(0.2)
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
        await send({"type": "http.response.body", "body": b"."})

    address = Address("127.0.0.1", 0)
    limits = Limits(request_seconds=0.3, idle_seconds=0.3)
    with serving(slow, address, address.bind(limits)) as url:
        assert answer(url) == (200, "xxxxx.")


@pytest.mark.parametrize("tls", [False, True])
def test_connections_beyond_the_limit_are_closed_at_once(
    folder: Path, caplog: pytest.LogCaptureFixture, tls: bool
) -> None:
    limits = Limits(2, PATIENT, PATIENT)
    with served(limits, folder if tls else None) as url, ExitStack() as held:
        links = [held.enter_context(connect(url)) for _ in range(2)]
        for _ in range(2):
            with connect(url) as link:
                assert until_closed(link) == b""
        links[0].close()
        assert answer(url)[0] == (401 if tls else 200), "one connection was closed"
    (record,) = (record for record in caplog.records if record.name.startswith("semisfl"))
    assert record.getMessage().endswith("2 connections are open; others are turned away")


def test_most_files_are_left_to_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (16, 1024))
    with served(Limits()) as url, connect(url), connect(url), connect(url) as third:
        assert until_closed(third) == b""


def test_without_free_files_connections_are_refused_and_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: socket.socket) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with Address("127.0.0.1", 0).bind() as listener:
        monkeypatch.setattr(socket.socket, "accept", fail)
        for _ in range(2):
            with pytest.raises(BlockingIOError):
                listener.accept()
    (record,) = caplog.records
    assert "no connection can be taken: Too many open files" in record.getMessage()


def test_refused_requests_keep_no_connection() -> None:
    with serving(hello, Address("127.0.0.1", 0, TOKEN)) as url, connect(url) as link:
        link.sendall(REQUEST + REQUEST)
        assert until_closed(link).count(b" 401 ") == 1


def test_a_page_uses_a_renewed_certificate_without_a_restart(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certificate, key = folder / "server.crt", folder / "server.key"
    old = certificate.read_text(), key.read_text()
    with served(Limits(9, PATIENT, PATIENT), folder) as url, secured(url) as before:
        assert certificate_of(url) == old[0]
        certs.renew_server(folder)
        new = certificate.read_text(), key.read_text()
        key.write_text(old[1])
        assert certificate_of(url) == certificate_of(url) == old[0], "the pair is not whole yet"
        certificate.unlink()
        assert certificate_of(url) == old[0]
        key.write_text(new[1])
        certificate.write_text(new[0])
        assert certificate_of(url) == certificate_of(url, "localhost") == new[0] != old[0]
        before.sendall(REQUEST)
        assert before.recv(12) == b"HTTP/1.1 401", "who is here stays"
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 2, "once per state of the files"
    assert all("going on with those read before" in record.getMessage() for record in warnings)
