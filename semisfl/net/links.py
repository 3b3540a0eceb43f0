"""See this process's connections, which gRPC does not hand out, and the bytes on them that are no messages.

gRPC handles frames of HTTP/2 without a word to this program. Of an unfinished message it keeps the blocks of
8 KB in which it came: 24 bytes a block, and other frames around them, hold 340 times their size.
"""

import contextlib
import ipaddress
import os
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

CHECK_SECONDS = 0.25
"""Between two looks of a server at its connections."""
LOOK_SECONDS = 0.1
"""Between two looks of a client at its own: what a link carries meanwhile may come before the end."""
BESIDE_BYTES = 32 * 1024 * 1024
"""Bytes that a connection may bring beside our messages. Messages in the buffers of the operating system
and of gRPC look the same; the buffers hold less."""
BESIDE_RATE = 16 * 1024
"""More of them per second: attempts that are refused, and answers to pings."""
BESIDE_SHARE = 0.1
"""More of them per byte of our messages in either direction: TLS records, frame heads, flow control."""
TCP_INFO_RECEIVED = 128
"""Where Linux's struct tcp_info has the number of bytes received."""

Where = tuple[str, int]


class Beside:
    """Count the bytes of a connection that are no messages. What it leaves unused is not saved up for later."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._least = 0.0

    def excess(self, reached: int, received: int, sent: int, due: int = 0) -> int | None:
        """Return the bytes beside our messages if they are too many, else None.

        ``reached``: bytes that reached the socket so far; ``received``, ``sent``: those of our messages.
        ``due``: most bytes of a message that is received only once it is complete.
        """
        beside = reached - received
        earned = BESIDE_SHARE * (received + sent) + BESIDE_RATE * (time.monotonic() - self._since)
        self._least = min(self._least, beside - earned)
        # Counted as received, it would lower the least before it comes.
        most = BESIDE_BYTES + (1 + BESIDE_SHARE) * due
        return beside if beside - earned - self._least > most else None


def flood_of(beside: int) -> str:
    """Return the reason to disconnect whoever sent so many bytes beside our messages."""
    return f"{beside} bytes of frames that are no messages"


def where(peer: str) -> Where:
    """Return the address and port of a peer as gRPC writes it: ``ipv6:%5B::1%5D:4711``."""
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    return (_plain(host.strip("[]")), int(port)) if port.isdigit() else (peer, 0)


def _plain(host: str) -> str:
    """Return an address as text; without the link that it is on, which gRPC names and sockets do not."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)


def accepted(port: int) -> Iterator[tuple[Where, int, socket.socket]]:
    """Yield the other end of each connection to ``port``, how many bytes came from it, and its socket."""
    for place, link in connected():
        with contextlib.suppress(OSError):
            if link.getsockname()[1] == port:
                yield place, _reached(link), link


class Fetched:
    """See what comes from a server's port, beside our messages, over the connection that is opened next."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.pause = LOOK_SECONDS
        """Seconds to wait before the next look, which goes through all connections of this process."""
        # An earlier one may not have ended yet.
        self._earlier = {place for _, place in self._all()}
        self._beside: dict[Where, Beside] = {}

    def excess(self, received: int, sent: int, due: int = 0) -> tuple[int, Where] | None:
        """Return the bytes beside our messages if they are too many, and this end of the connection.

        Clients that share a process cannot tell whose is whose: all that may be ours must have too many.
        """
        every = list(self._all())
        self.pause = LOOK_SECONDS * max(1, len(every))
        ours = [(size, place) for size, place in every if place not in self._earlier]
        self._beside = {place: self._beside.get(place, Beside()) for _, place in ours}
        found = [
            (self._beside[place].excess(size, received, sent, due), place) for size, place in ours
        ]
        beside = [(excess, place) for excess, place in found if excess is not None]
        return max(beside) if beside and len(beside) == len(found) else None

    def end_flood(self, received: int, sent: int, due: int = 0) -> str | None:
        """Disconnect if there are too many bytes beside our messages; return the reason, None if not."""
        if (found := self.excess(received, sent, due)) is None:
            return None
        beside, place = found
        disconnect(place)  # gRPC would go on reading
        return flood_of(beside)

    def _all(self) -> Iterator[tuple[int, Where]]:
        for (_, port), link in connected():
            with contextlib.suppress(OSError):
                if port == self._port:
                    yield _reached(link), _place(link.getsockname())


def _reached(link: socket.socket) -> int:
    """Return how many bytes have reached a socket; 0 elsewhere than on Linux, where that is not known."""
    info = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_RECEIVED + 8)
    return int.from_bytes(info[TCP_INFO_RECEIVED:], sys.byteorder)


def disconnect(place: Where) -> None:
    """End the connections of a peer, or the one with this end, whatever waits on them."""
    for other_end, link in connected():
        with contextlib.suppress(OSError):  # or it has ended
            if place in (other_end, _place(link.getsockname())):
                link.shutdown(socket.SHUT_RDWR)


def connected() -> Iterator[tuple[Where, socket.socket]]:
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
            if link.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            try:
                place = _place(link.getpeername())
            except OSError:
                continue  # not connected
            yield place, link


def _place(name: Any) -> Where:
    host, port = name[:2]
    return _plain(host), port
