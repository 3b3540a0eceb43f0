"""Open the server's port and read the first frame of each stream."""

import asyncio
import contextlib
import ipaddress
import resource
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

import grpc
import grpc.aio

from semisfl.net import messages
from semisfl.net.chunks import Assembler
from semisfl.net.frames import Frame, decode
from semisfl.net.server.admission import Refused
from semisfl.net.server.trust import Trust
from semisfl.settings.addresses import split_address
from semisfl.settings.config import ConfigError

IDLE_SECONDS = 30
"""A connection without a stream is closed after this: thousands of them would use up all files."""
UNREAD_SECONDS = 1.0
"""Most time for a client that is refused to send its hello."""
ABORT_SECONDS = 10.0
"""Most time for a client to take the end of its stream."""
SHARE = 4
"""Connections take all files but this fraction, one in so many: a run writes files, and reads a list of those that
are revoked. Anybody can hold a connection until its handshake took too long."""
LARGEST = 2**31 - 1
"""Largest value of an option of gRPC."""
FLOODS = [
    ("grpc.max_concurrent_streams", 8),
    ("grpc.http2.max_ping_strikes", 2),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
]
"""gRPC disconnects a client that sends pings faster than this while the server sends it nothing."""

Serve = Callable[[Any, grpc.aio.ServicerContext], Awaitable[None]]


def open_port(
    listen: str,
    service: str,
    methods: Mapping[str, Serve],
    secure: grpc.ServerCredentials | None,
    options: Sequence[tuple[str, int]],
    seconds: float,
    other: Serve | None = None,
) -> tuple[grpc.aio.Server, int]:
    """Return a server of streams, not started yet, and its port; a handshake may take ``seconds``.

    ``other`` serves the calls of any other method; None: gRPC refuses them without a word to this program.
    """
    handshake = ("grpc.server_handshake_timeout_ms", int(seconds * 1000))
    idle = ("grpc.max_connection_idle_ms", int(IDLE_SECONDS * 1000))
    host, port = split_address(listen)
    with _listening(listen):
        addresses = _addresses(host)
    connections = _most_connections(len(addresses))
    own = [handshake, idle, ("grpc.so_reuseport", 0), *FLOODS, connections]
    server = grpc.aio.server(options=[*options, *own])
    handlers = {
        name: grpc.stream_stream_rpc_method_handler(serve) for name, serve in methods.items()
    }
    known = grpc.method_handlers_generic_handler(service, handlers)
    server.add_generic_rpc_handlers((known, *([_Other(other)] if other else [])))
    with _listening(listen):
        # gRPC, given a name, is content with one of its addresses; another program may have the others.
        for address in addresses:
            port = _add_port(server, address, port, secure)
    return server, port


@contextlib.contextmanager
def _listening(listen: str) -> Iterator[None]:
    """Say of errors inside the block that ``listen`` is no address to listen on."""
    try:
        yield
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"cannot listen on {listen}: {reason}; choose another address or port"
        ) from error


class _Other(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Serve every method alike."""

    def __init__(self, serve: Serve) -> None:
        self._handler = grpc.stream_stream_rpc_method_handler(serve)

    def service(self, _: object) -> Any:
        return self._handler


def _addresses(host: str) -> list[str]:
    """Return the addresses that a name stands for on this machine; an address stands for itself."""
    with contextlib.suppress(ValueError):
        return [str(ipaddress.ip_address(host))]
    known = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
    return list(dict.fromkeys(str(place[0]) for *_, place in known))


def _add_port(
    server: grpc.aio.Server, address: str, port: int, secure: grpc.ServerCredentials | None
) -> int:
    """Open a port at one address; raise `OSError` with the reason, which gRPC does not report."""
    where = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    try:
        if secure is None:
            return server.add_insecure_port(where)
        return server.add_secure_port(where, secure)
    except RuntimeError as error:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        socket.create_server((address, port), family=family).close()
        raise OSError(str(error)) from error


def _most_connections(addresses: int) -> tuple[str, int]:
    """Let this process open as many files as the system allows, and return gRPC's option that leaves it some.

    gRPC counts the connections of each of so many addresses alone.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Where there is no limit, some systems refuse to set none.
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = LARGEST if files == resource.RLIM_INFINITY else min(files - files // SHARE, LARGEST)
    return "grpc.max_allowed_incoming_connections", most // addresses


def credentials(
    trust: Trust, begins: Callable[[], object] = lambda: None
) -> grpc.ServerCredentials:
    """Return credentials for mutual TLS; a gRPC thread calls ``begins`` before each handshake."""

    def handshake_begins() -> grpc.ServerCertificateConfiguration | None:
        begins()
        return trust.renewed()

    return grpc.dynamic_ssl_server_credentials(trust.configuration(), handshake_begins, True)


async def hello(context: grpc.aio.ServicerContext, seconds: float) -> Frame:
    """Return a client's first frame; raise `Refused` if it takes over ``seconds``."""
    assembler = Assembler()
    assembler.expect(0, messages.HELLO.limit)
    complete = None
    try:
        async with asyncio.timeout(seconds):
            while complete is None:
                chunk = await context.read()
                if chunk is grpc.aio.EOF:
                    raise Refused(grpc.StatusCode.UNAVAILABLE, "the stream ended before hello")
                _, complete = assembler.feed(chunk)
            # By itself: if a refusal cancelled the first write with it, gRPC would send no status.
            await context.send_initial_metadata(())
    except TimeoutError as error:
        # Not an offence: the server itself may be too busy.
        late = f"no hello within {seconds:g} s"
        raise Refused(grpc.StatusCode.UNAVAILABLE, late) from error
    return decode(complete[1], {"hello": messages.HELLO})


async def first_message(context: grpc.aio.ServicerContext) -> None:
    """Wait until a client that is refused anyway has sent something, and do not look at it.

    If the end of a stream meets a message on its way, the client hears an internal error of gRPC instead of the
    reason, and tries again.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(UNREAD_SECONDS):
            await context.read()


async def abort(context: grpc.aio.ServicerContext, code: grpc.StatusCode, reason: str) -> None:
    """End a stream; give up on a client that does not take its end, or is gone."""
    with contextlib.suppress(TimeoutError, grpc.aio.InternalError):
        async with asyncio.timeout(ABORT_SECONDS):
            await context.abort(code, reason)
