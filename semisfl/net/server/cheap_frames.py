"""Disconnect clients that send masses of frames which cost them nothing: stream resets, pings, settings.

gRPC handles such frames without a word to this program. What can be seen is how many streams a
connection opens, and how many bytes reached its socket beside those of our messages.
"""

import asyncio
import contextlib
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc

from semisfl.net import links
from semisfl.net.links import Beside, Where, connected, disconnect, where
from semisfl.net.server.admission import Refused

CHECKED_AT_ONCE = 500
"""Connections looked at in CHECK_SECONDS; with more of them each is looked at less often."""
MOST_STREAMS = 40
"""Streams that a connection may open within STREAMS_SECONDS; a device opens one per attempt."""
STREAMS_SECONDS = 10.0
MOST_CONNECTIONS = 8
"""Connections that a device may have at a time, whether or not they have sent a hello: each takes a file. It uses
one, and may have left others behind when it lost them."""
UNSERVED_SECONDS = 60.0
"""A connection without a stream that is served ends after this. gRPC ends idle ones sooner; these have
streams whose end waits behind bytes that the client does not take."""
UNSERVED_SENDER_SECONDS = 10.0
"""The same for one that goes on sending: gRPC gives up on a flood of pings, but may stay to read it."""
FORGET_SECONDS = 60.0
"""A connection that was not seen for so long has ended."""


@dataclass
class Connection:
    """Hold what one connection did so far."""

    seen: float = field(default_factory=time.monotonic)
    identity: str = "?"
    streams: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_STREAMS + 1))
    received: int = 0
    sent: int = 0
    """Bytes of our messages."""
    beside: Beside = field(default_factory=Beside)
    reached: int = 0
    """Bytes that had reached the socket when it was last looked at."""
    serving: int = 0
    served: float = field(default_factory=time.monotonic)
    """How many streams are served, and when the last one ended."""


class Crowds:
    """Limit the connections of each device."""

    def __init__(self) -> None:
        self._places: dict[str, set[Where]] = {}

    def check(self, peer: str, identity: str) -> None:
        """Note whose connection this is; raise `Refused` if it has too many, and disconnect this one."""
        place = where(peer)
        known = self._places.get(identity, set()) | {place}
        if len(known) > MOST_CONNECTIONS:
            # Some of them have ended, which is not known at once.
            known &= {one for one, _ in connected()}
        if crowded := len(known) > MOST_CONNECTIONS:
            known.discard(place)
        self._places[identity] = known
        if crowded:
            disconnect(place)
            reason = f"{identity} has over {MOST_CONNECTIONS} connections"
            raise Refused(grpc.StatusCode.UNAVAILABLE, reason)


class CheapFrames:
    """Watch the connections of a port. Lives on the loop."""

    def __init__(
        self, offended: Callable[[str, str, str], None], *, idle_may_stay: bool = False
    ) -> None:
        """Take ``offended``, which is called with the peer, the identity and the reason.

        ``idle_may_stay``: only gRPC ends connections without a stream.
        """
        self._offended, self._idle_may_stay = offended, idle_may_stay
        self._connections: dict[Where, Connection] = {}
        self._crowds = Crowds()
        self._watching: asyncio.Task[None] | None = None

    def watch(self, port: int) -> None:
        """Begin to compare what reaches the sockets of ``port`` with what arrives as messages."""
        self._watching = asyncio.create_task(self._watch(port))

    def stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()

    def stream_opened(self, peer: str) -> bool:
        """Note a stream; return whether the connection may have it, and disconnect it if not."""
        connection, now = self.of(peer), time.monotonic()
        opened = connection.streams
        opened.append(now)
        if len(opened) <= MOST_STREAMS or now - opened[0] > STREAMS_SECONDS:
            connection.serving += 1
            return True
        self._offend(
            where(peer), f"over {MOST_STREAMS} streams within {STREAMS_SECONDS:g} s on a connection"
        )
        return False

    def stream_closed(self, peer: str) -> None:
        """Note that a stream is served no longer."""
        connection = self.of(peer)
        connection.serving, connection.served = max(0, connection.serving - 1), time.monotonic()

    def of(self, peer: str) -> Connection:
        """Return the connection of a peer as gRPC names it."""
        return self._connections.setdefault(where(peer), Connection())

    def check_crowd(self, peer: str, identity: str) -> None:
        """Note whose connection this is; raise `Refused` if it has too many, and disconnect this one."""
        self.of(peer).identity = identity
        try:
            self._crowds.check(peer, identity)
        except Refused:
            self._connections.pop(where(peer), None)
            raise

    async def _watch(self, port: int) -> None:
        while True:
            await asyncio.sleep(links.CHECK_SECONDS)
            now = time.monotonic()
            for number, (place, received, link) in enumerate(links.accepted(port), 1):
                if number % CHECKED_AT_ONCE == 0:
                    await asyncio.sleep(links.CHECK_SECONDS)
                connection = self._connections.setdefault(place, Connection())
                connection.seen = now
                sends, connection.reached = received > connection.reached, received
                unserved = UNSERVED_SENDER_SECONDS if sends else UNSERVED_SECONDS
                excess = connection.beside.excess(received, connection.received, connection.sent)
                if excess is not None:
                    self._offend(place, links.flood_of(excess))
                elif self._is_idle(connection) and now - connection.served > unserved:
                    with contextlib.suppress(OSError):
                        link.shutdown(socket.SHUT_RDWR)
            self._connections = {
                place: connection
                for place, connection in self._connections.items()
                if now - connection.seen < FORGET_SECONDS
            }

    def _is_idle(self, connection: Connection) -> bool:
        return not connection.serving and not self._idle_may_stay

    def _offend(self, place: Where, reason: str) -> None:
        connection = self._connections.pop(place, None)
        if connection is not None:
            self._offended(f"{place[0]}:{place[1]}", connection.identity, reason)
        disconnect(place)
