"""Readers of a page that take their time: they hold neither memory nor a connection."""

import asyncio
import contextlib
import gc
import socket
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from urllib.parse import urlsplit

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from semisfl.watch import pacing
from semisfl.watch.address import Address, serving
from semisfl.watch.connections import Limits, Listener
from tests.watch.test_app import ask
from tests.watch.test_connections import PATIENT, answer, until_closed

LONG = 4_000_000
READERS = 20


async def letters(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer ``?letter.length`` with so many of that letter, in a new copy for each reader."""
    letter, _, length = Request(scope).url.query.partition(".")
    await Response((letter or "x") * int(length or LONG))(scope, receive, send)


def await_closed(listener: Listener) -> None:
    """Wait until the server has closed all its connections."""
    until = time.monotonic() + 30
    while any(link.fileno() != -1 for link in listener._taken):
        assert time.monotonic() < until, "the server keeps a connection"
        time.sleep(0.01)


@contextmanager
def served(limits: Limits, app: ASGIApp = letters) -> Iterator[tuple[str, Listener]]:
    address = Address("127.0.0.1", 0)
    listener = address.bind(limits)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with serving(app, address, listener) as url:
        yield url, listener


@contextmanager
def slow_reader(url: str, query: str = "") -> Iterator[socket.socket]:
    """Ask, read the first bytes of the answer, and then nothing more."""
    with socket.socket() as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        link.settimeout(30)
        link.connect(("127.0.0.1", urlsplit(url).port or 0))
        link.sendall(f"GET /?{query} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert link.recv(12) == b"HTTP/1.1 200"
        yield link


def test_slow_readers_of_one_thing_share_its_bytes() -> None:
    limits = Limits(answer_seconds=PATIENT)
    with served(limits) as (url, _), ExitStack() as held:
        gc.collect()
        tracemalloc.start()
        held.callback(tracemalloc.stop)
        for _ in range(READERS):
            held.enter_context(slow_reader(url))
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0]
        assert LONG < taken < 2 * LONG + READERS * 3 * pacing.PIECE
        assert answer(url) == (200, "x" * LONG), "a quick reader has it whole"


def test_a_reader_that_takes_too_long_is_disconnected() -> None:
    with served(Limits(answer_seconds=0.3)) as (url, listener), slow_reader(url) as link:
        await_closed(listener)
        assert len(until_closed(link)) < LONG


def test_a_reader_that_leaves_the_end_of_an_answer_is_disconnected() -> None:
    length = pacing.PIECE  # sent at once: the answer is complete, its bytes still wait
    limits = Limits(idle_seconds=0.3, answer_seconds=PATIENT)
    with served(limits) as (url, listener), slow_reader(url, f"x.{length}") as link:
        await_closed(listener)
        assert len(until_closed(link)) < length


def test_different_answers_have_a_limit_together() -> None:
    limits = Limits(answer_seconds=PATIENT)
    with served(limits, pacing.Paced(letters, most=LONG + 1000)) as (url, _):
        with slow_reader(url, "a"):
            assert ask(url, "/?b")[0] == 503
            assert ask(url, "/?a")[:2] == (200, "a" * LONG), "the same one needs no room"
            assert ask(url, "/?b.100")[:2] == (200, "b" * 100), "and a short one little"
        while ask(url, "/?b")[0] == 503:
            pass  # until the server notices that the slow reader has gone


# --- floods of requests ---------------------------------------------------------------------------


def test_few_answers_are_made_at_a_time_and_none_for_readers_who_left() -> None:
    """Else a minute of requests keeps the page, and a run in the same process, busy for an hour."""
    begun, gate = [0], threading.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/slow":
            begun[0] += 1
            await asyncio.to_thread(gate.wait, 60)
        await Response("done")(scope, receive, send)

    def ask_slow(port: int) -> socket.socket:
        link = socket.create_connection(("127.0.0.1", port), 10)
        link.sendall(b"GET /slow HTTP/1.1\r\nHost: localhost\r\n\r\n")
        return link

    with served(Limits(), slow) as (url, listener), ExitStack() as patient:
        port = urlsplit(url).port or 0
        until = time.monotonic() + 30
        for _ in range(pacing.AT_ONCE):
            patient.enter_context(ask_slow(port))
        while begun[0] < pacing.AT_ONCE:
            assert time.monotonic() < until
        for _ in range(READERS):
            ask_slow(port).close()
        while sum(link.fileno() != -1 for link in listener._taken) > pacing.AT_ONCE:
            assert time.monotonic() < until
        assert ask(url, "/healthz")[0] == 200, "a probe waits"
        assert begun[0] == pacing.AT_ONCE
        gate.set()
        assert ask(url, "/slow")[0] == 200
    assert begun[0] == pacing.AT_ONCE + 1


def test_readers_who_wait_at_the_end_are_told_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    begun, gate = [0], threading.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        begun[0] += 1
        await asyncio.to_thread(gate.wait, 60)
        await Response("done")(scope, receive, send)

    with ExitStack() as held:
        held.callback(gate.set)
        with served(Limits(), slow) as (url, _):
            links = [
                held.enter_context(socket.create_connection(("127.0.0.1", urlsplit(url).port), 30))
                for _ in range(pacing.AT_ONCE + 3)
            ]
            for link in links:
                link.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            until = time.monotonic() + 30
            while begun[0] < pacing.AT_ONCE:
                assert time.monotonic() < until
        assert [link.recv(12) for link in links] == [b"HTTP/1.1 503"] * len(links)
    assert "Traceback" not in capsys.readouterr().err


def test_a_flood_of_probes_leaves_the_interpreter_to_training() -> None:
    looks: list[tuple[float, float]] = []

    async def probe(scope: Scope, receive: Receive, send: Send) -> None:
        looks.append((time.monotonic(), time.thread_time()))
        await Response("ok")(scope, receive, send)

    with served(Limits(), probe) as (url, _), socket.socket() as link:
        link.connect(("127.0.0.1", urlsplit(url).port or 0))

        def read() -> None:
            with contextlib.suppress(OSError):
                while link.recv(1 << 16):
                    pass

        threading.Thread(target=read, daemon=True).start()
        requests = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n" * 100
        until = time.monotonic() + 1
        while time.monotonic() < until:
            link.sendall(requests)
        link.shutdown(socket.SHUT_RDWR)
    (began, before), (ended, after) = looks[0], looks[-1]
    assert len(looks) > 100 and after - before < 0.4 * (ended - began)
