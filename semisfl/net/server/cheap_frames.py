"""Disconnect clients that send masses of frames which cost them nothing: stream resets, pings, settings.

gRPC handles such frames without a word to this program. What can be seen is how many streams a
connection opens, and how many bytes reached its socket beside those of our messages.
"""

import asyncio
import contextlib
import ipaddress
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from urllib.parse import unquote

import grpc

from semisfl.net.server.admission import Refused

CHECK_SECONDS = 0.25
CHECKED_AT_ONCE = 500
"""Connections looked at in CHECK_SECONDS; with more of them each is looked at less often."""
MOST_STREAMS = 40
"""Streams that a connection may open within STREAMS_SECONDS; a device opens one per attempt."""
STREAMS_SECONDS = 10.0
MOST_CONNECTIONS = 8
"""Connections that a device may have at a time, whether or not they have sent a hello: each takes a file. It uses
one, and may have left others behind when it lost them."""
BESIDE_BYTES = 32 * 1024 * 1024
"""Bytes that a connection may bring beside our messages. Messages in the buffers of the operating system
and of gRPC look the same; the buffers hold less."""
BESIDE_RATE = 16 * 1024
"""More of them per second of its life: attempts that are refused, and answers to pings."""
BESIDE_SHARE = 0.1
"""More of them per byte of our messages in either direction: TLS records, frame heads, flow control."""
UNSERVED_SECONDS = 60.0
"""A connection without a stream that is served ends after this. gRPC ends idle ones sooner; these have
streams whose end waits behind bytes that the client does not take."""
UNSERVED_SENDER_SECONDS = 10.0
"""The same for one that goes on sending: gRPC gives up on a flood of pings, but may stay to read it."""
FORGET_SECONDS = 60.0
"""A connection that was not seen for so long has ended."""
TCP_INFO_RECEIVED = 128
"""Where Linux's struct tcp_info has the number of bytes received."""

Where = tuple[str, int]


@dataclass
class Connection:
    """Hold what one connection did so far."""

    since: float = field(default_factory=time.monotonic)
    seen: float = field(default_factory=time.monotonic)
    identity: str = "?"
    streams: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_STREAMS + 1))
    received: int = 0
    sent: int = 0
    """Bytes of our messages."""
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
            known &= {one for one, _ in _sockets()}
        if crowded := len(known) > MOST_CONNECTIONS:
            known.discard(place)
        self._places[identity] = known
        if crowded:
            disconnect(place)
            reason = f"{identity} has over {MOST_CONNECTIONS} connections"
            raise Refused(grpc.StatusCode.UNAVAILABLE, reason)


class CheapFrames:
    """Watch the connections of a port. Lives on the loop."""

    def __init__(self, offended: Callable[[str, str, str], None]) -> None:
        """Take ``offended``, which is called with the peer, the identity and the reason."""
        self._offended = offended
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
            await asyncio.sleep(CHECK_SECONDS)
            now = time.monotonic()
            for number, (place, received, link) in enumerate(_accepted(port), 1):
                if number % CHECKED_AT_ONCE == 0:
                    await asyncio.sleep(CHECK_SECONDS)
                connection = self._connections.setdefault(place, Connection())
                connection.seen = now
                sends, connection.reached = received > connection.reached, received
                unserved = UNSERVED_SENDER_SECONDS if sends else UNSERVED_SECONDS
                beside = received - connection.received
                allowed = BESIDE_BYTES + BESIDE_SHARE * (connection.received + connection.sent)
                if beside > allowed + BESIDE_RATE * (now - connection.since):
                    self._offend(place, f"{beside} bytes of frames that are no messages")
                elif not connection.serving and now - connection.served > unserved:
                    with contextlib.suppress(OSError):
                        link.shutdown(socket.SHUT_RDWR)
            self._connections = {
                place: connection
                for place, connection in self._connections.items()
                if now - connection.seen < FORGET_SECONDS
            }

    def _offend(self, place: Where, reason: str) -> None:
        connection = self._connections.pop(place, None)
        if connection is not None:
            self._offended(f"{place[0]}:{place[1]}", connection.identity, reason)
        disconnect(place)


def where(peer: str) -> Where:
    """Return the address and port of a peer as gRPC writes it: ``ipv6:%5B::1%5D:4711``."""
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    return (_plain(host.strip("[]")), int(port)) if port.isdigit() else (peer, 0)


def _plain(host: str) -> str:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)


def _accepted(port: int) -> Iterator[tuple[Where, int, socket.socket]]:
    """Yield the other end of each connection to ``port``, how many bytes came from it, and its socket."""
    for place, link in _sockets():
        with contextlib.suppress(OSError):
            if link.getsockname()[1] == port:
                info = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_RECEIVED + 8)
                # Elsewhere than on Linux it is shorter: then only streams are counted.
                received = info[TCP_INFO_RECEIVED:] or bytes(8)
                yield place, int.from_bytes(received, sys.byteorder), link


def disconnect(place: Where) -> None:
    """End the connections of a peer, whatever waits on them."""
    for other_end, link in _sockets():
        if other_end == place:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)


def _sockets() -> Iterator[tuple[Where, socket.socket]]:
    """Yield this process's connected sockets, which gRPC does not hand out; none without /proc."""
    try:
        numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return
    for number in numbers:
        try:
            if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                continue
            link = socket.socket(fileno=os.dup(number))
        except OSError:
            continue  # closed since it was listed
        with link:
            try:
                host, port = link.getpeername()[:2]
            except (OSError, ValueError):
                continue  # not connected, or not by TCP
            yield (_plain(host), port), link
