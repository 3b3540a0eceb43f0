"""Speak HTTP/2 by hand as a device with a valid certificate, and send cheap frames in masses."""

import contextlib
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

from semisfl.net import chunks, messages
from semisfl.net.chunks import METHOD
from semisfl.net.frames import encode

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RESET, SETTINGS, PING, WINDOW = 0, 1, 3, 4, 6, 8
BATCH = 200
"""Frames written at once."""


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _text(text: bytes) -> bytes:
    return bytes([len(text)]) + text


def _header(name: bytes, value: bytes) -> bytes:
    """Return a header as HPACK writes it without any table."""
    return b"\x00" + _text(name) + _text(value)


def opened(stream: int, method: str = METHOD) -> bytes:
    fields = {
        b":method": b"POST",
        b":scheme": b"https",
        b":path": method.encode(),
        b":authority": b"localhost",
        b"te": b"trailers",
        b"content-type": b"application/grpc",
    }
    call = b"".join(_header(name, value) for name, value in fields.items())
    return frame(HEADERS, 4, stream, call)


def no_room() -> bytes:
    """Return settings by which the server may not send a byte of any answer."""
    return frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 0))


def message(parts: chunks.Parts) -> bytes:
    """Return a message as gRPC writes it."""
    content = b"".join(parts)
    return b"\0" + struct.pack(">I", len(content)) + content


def hello() -> bytes:
    """Return a stream with a valid hello."""
    parts = encode("hello", messages.hello(["semisfl"]), {})
    return opened(1) + frame(DATA, 0, 1, message([*chunks.cut([b"".join(parts)], 0, 0)]))


def resets(number: int) -> bytes:
    stream = 2 * number + 3
    return opened(stream) + frame(RESET, 0, stream, struct.pack(">I", 8))


def half_streams(number: int) -> bytes:
    """Open a stream and end it at once, without a hello."""
    stream = 2 * number + 3
    return opened(stream) + frame(DATA, 1, stream)


def nowhere(number: int) -> bytes:
    """Open a stream to a method that there is not, and end it at once."""
    stream = 2 * number + 3
    return opened(stream, f"{METHOD}s") + frame(DATA, 1, stream)


def pings(number: int) -> bytes:
    return frame(PING, 0, 0, bytes(8))


def settings(number: int) -> bytes:
    return frame(SETTINGS, 0, 0)


def windows(number: int) -> bytes:
    return frame(WINDOW, 0, 1, struct.pack(">I", 1))


def empty_data(number: int) -> bytes:
    return frame(DATA, 0, 1)


def unfinished(size: int) -> bytes:
    """Return what a server begins an answer of ``size`` bytes with."""
    fields = {b":status": b"200", b"content-type": b"application/grpc"}
    answer = b"".join(_header(name, value) for name, value in fields.items())
    opens = frame(SETTINGS, 0, 0) + frame(SETTINGS, 1, 0) + frame(HEADERS, 4, 1, answer)
    return opens + begun(size)


def begun(size: int) -> bytes:
    """Return the first bytes of a message of ``size``."""
    return frame(DATA, 0, 1, b"\0" + struct.pack(">I", size))


def crumb() -> bytes:
    """Return a little of an answer, and a frame that nobody knows: gRPC keeps the memory of both."""
    return frame(DATA, 0, 1, bytes(24)) + frame(0x77, 0, 0, bytes(8120))


def crumbs_taken(most: int, size: int = 1 << 22) -> tuple[int, threading.Thread, list[int]]:
    """Serve one device without TLS an answer of ``size`` bytes in crumbs, ``most`` bytes of them.

    Return the port, a thread that ends with the device's connection, and a list: how many it took.
    """
    listener, taken = socket.create_server(("127.0.0.1", 0)), [0]

    def read(link: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while link.recv(1 << 16):
                pass

    def serve() -> None:
        with listener:
            link, _ = listener.accept()
        with link, contextlib.suppress(OSError):
            threading.Thread(target=read, args=(link,), daemon=True).start()
            link.sendall(unfinished(size))
            piece = crumb() * BATCH
            while taken[0] < most:
                link.sendall(piece)
                taken[0] += len(piece)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return listener.getsockname()[1], thread, taken


FLOODS: dict[str, Callable[[int], bytes]] = {
    flood.__name__: flood
    for flood in (resets, half_streams, nowhere, pings, settings, windows, empty_data)
}


def identity(folder: Path, name: str) -> ssl.SSLContext:
    """Return what shows the certificate of ``name``."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(folder / "authority.crt")
    own = folder / "clients" / name
    context.load_cert_chain(own / "client.crt", own / "client.key")
    context.set_alpn_protocols(["h2"])
    return context


def connect(
    folder: Path,
    name: str,
    port: int,
    first: bytes | None = None,
    context: ssl.SSLContext | None = None,
    ticket: ssl.SSLSession | None = None,
) -> ssl.SSLSocket:
    """Return a connection with the certificate of ``name``; by default one stream is open and silent.

    With a ``ticket`` of an earlier connection of the ``context`` its handshake shows no certificate.
    """
    context = context or identity(folder, name)
    link = socket.create_connection(("127.0.0.1", port), timeout=10)
    secured = context.wrap_socket(link, server_hostname="localhost", session=ticket)
    secured.sendall(PREFACE + frame(SETTINGS, 0, 0) + (opened(1) if first is None else first))
    return secured


def flood(link: ssl.SSLSocket, make: Callable[[int], bytes], seconds: float, start: int = 0) -> int:
    """Send frames for so long, or until the server disconnects; return how many."""
    until, number = time.monotonic() + seconds, start
    link.settimeout(0.0)
    with contextlib.suppress(ConnectionError, ssl.SSLZeroReturnError, ssl.SSLEOFError, OSError):
        while time.monotonic() < until:
            piece = b"".join(make(n) for n in range(number, number + BATCH))
            number += BATCH
            _send(link, piece, until)
    return number - start


def _send(link: ssl.SSLSocket, piece: bytes, until: float) -> None:
    """Write all of ``piece``, and read and forget what comes meanwhile."""
    left = memoryview(piece)
    while left and time.monotonic() < until:
        with contextlib.suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError):
            left = left[link.send(left) :]
        with contextlib.suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError):
            while link.recv(1 << 16):
                pass
            raise ConnectionError("the server closed the connection")
