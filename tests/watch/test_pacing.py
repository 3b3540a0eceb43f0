"""Readers of a page that take their time: they hold neither memory nor a connection."""

import gc
import socket
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from urllib.parse import urlsplit

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
