"""Limit the connections of a page and how long it waits for them: training needs open files too."""

import asyncio
import errno
import logging
import resource
import selectors
import socket
import time
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from semisfl.watch.pacing import PIECE

log = logging.getLogger(__name__)

SHARE = 8
"""A page uses at most this fraction, one in so many, of the files that this process may open."""
BACKLOG = 32
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
HOUR = 3600.0
REST = 3.0
"""Seconds that the page's thread rests for each second that it computes: anybody can make it busy, and training needs
the interpreter too."""
BURST_SECONDS = 0.1
"""Rest that may be due before the thread takes it."""


@dataclass(frozen=True)
class Limits:
    connections: int = 200
    request_seconds: float = 10.0
    """Time for a new connection to finish its TLS handshake, and then to send the head of a request."""
    idle_seconds: float = 60.0
    """Time between an answer and the head of the next request."""
    answer_seconds: float = 120.0
    """Time to make an answer and to send it: 6 MB at 0.4 Mbit/s."""


class Listener(socket.socket):
    """Close a connection beyond the limit at once, before TLS or HTTP."""

    def __init__(self, family: int, limits: Limits) -> None:
        # Only where the protocol is named does asyncio send each part of an answer at once, and not 40 ms later.
        super().__init__(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self.limits = limits
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        share = limits.connections if files == resource.RLIM_INFINITY else files // SHARE
        self._room = max(1, min(limits.connections, share))
        self._taken: list[socket.socket] = []
        self._last_warning = -HOUR

    def accept(self) -> tuple[socket.socket, Any]:
        try:
            taken, peer = super().accept()
        except OSError as error:
            if error.errno not in EXHAUSTED:
                raise
            self._tell(f"no connection can be taken: {error.strerror}")
            time.sleep(0.1)  # the clients that wait are still there
            raise BlockingIOError from error
        self._taken = [one for one in self._taken if one.fileno() != -1]
        if len(self._taken) >= self._room:
            taken.close()
            self._tell(f"{self._room} connections are open; others are turned away")
            raise ConnectionAbortedError
        self._taken.append(taken)
        return taken, peer

    def _tell(self, text: str) -> None:
        """Log a warning, at most once an hour."""
        now = time.monotonic()
        if now - self._last_warning >= HOUR:
            self._last_warning = now
            log.warning("%s:%d: %s", *self.getsockname()[:2], text)


class Resting(selectors.DefaultSelector):
    """Rest between two looks at the sockets, if the thread has computed too much."""

    def __init__(self) -> None:
        super().__init__()
        self._due = 0.0
        self._time, self._computed = time.monotonic(), time.thread_time()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        now, computed = time.monotonic(), time.thread_time()
        busy = computed - self._computed
        rested = now - self._time - busy
        self._due = max(0.0, self._due + REST * busy - rested)
        self._time, self._computed = now, computed
        if self._due > BURST_SECONDS:
            time.sleep(self._due)
        return super().select(timeout)


class Loop(asyncio.SelectorEventLoop):
    """Wait for TLS handshakes no longer than for requests, and leave time to training."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(Resting())
        self._limits = limits

    async def create_server(self, *args: Any, **options: Any) -> asyncio.Server:
        if options.get("ssl"):
            options["ssl_handshake_timeout"] = self._limits.request_seconds
        return await super().create_server(*args, **options)


def protocol(limits: Limits) -> type[H11Protocol]:
    """Return HTTP that limits the time for a request's head, for its answer and for the pause after it."""

    class Impatient(H11Protocol):
        _waiting: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            transport.set_write_buffer_limits(PIECE)  # over TLS the default is 512 KiB
            self._wait(limits.request_seconds)

        def handle_events(self) -> None:
            before = self.cycle
            super().handle_events()
            if self.cycle is not before and not self.cycle.response_complete:
                self._wait(limits.answer_seconds)

        def on_response_complete(self) -> None:
            self._wait(limits.idle_seconds)
            super().on_response_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def _wait(self, seconds: float) -> None:
            self._stop_waiting()
            self._waiting = self.loop.call_later(seconds, self.transport.abort)

        def _stop_waiting(self) -> None:
            if self._waiting is not None:
                self._waiting.cancel()
                self._waiting = None

    return Impatient
