"""Serve a web app from a thread: on loopback, or over TLS to those who have the token.

The page of `semisfl watch` and the metrics for Prometheus share this. uvicorn's own limits bound the number of
connections and how long they may be idle.
"""

import contextlib
import functools
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn

from semisfl.files import stamp
from semisfl.settings.addresses import is_loopback, split_address
from semisfl.settings.sections import ConfigError

if TYPE_CHECKING:
    from starlette.types import ASGIApp

SHORTEST_TOKEN = 16
"""Fewest characters of a token."""
MOST_REQUESTS = 100
"""Most connections and requests at a time; uvicorn answers 503 beyond."""
START_SECONDS = 30.0
"""Most time for the server to start."""


@dataclass(frozen=True)
class Address:
    """The address to listen on, and what protects it. `parse` makes one from options and checks the rules."""

    host: str
    port: int
    """0: a free port."""
    token: str | None = None
    """What a reader must know; None: nothing."""
    certificates: Path | None = None
    """The folder with server.crt and server.key; None: no TLS."""

    @classmethod
    def parse(
        cls, option: str, listen: str, token_file: Path | None, certificates: Path | None
    ) -> "Address":
        """Return the address that an option asks for.

        Args:
            option: the option's name, for messages.
            listen: its value, HOST:PORT.
            token_file: a file with the token that readers must give; needed beyond loopback.
            certificates: the folder with server.crt and server.key; needed, and used, only beyond loopback.

        Raises `ConfigError` for another form, and if something that is needed is missing.
        """
        try:
            host, port = split_address(listen)
        except ConfigError as error:
            raise ConfigError(f"{option} {error}") from None
        token = _read_token(token_file) if token_file is not None else None
        if is_loopback(host):
            return cls(host, port, token)
        if token is None or certificates is None:
            raise ConfigError(
                f"{option} {listen} is not a loopback address, so a token and TLS are needed: --token-file FILE, "
                "and --certs DIR, the folder with server.crt and server.key (`semisfl certs server`)"
            )
        return cls(host, port, token, certificates)

    def bind(self) -> socket.socket:
        """Return a socket that listens; raise `ConfigError` if another program has the port."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        # asyncio sends each part of an answer at once only where the protocol is named.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((self.host, self.port))
            listener.listen()
        except OSError as error:
            listener.close()
            raise ConfigError(
                f"cannot listen on {self.host}:{self.port}: {error.strerror or error}; "
                "choose another address or port"
            ) from error
        return listener

    def url(self, port: int) -> str:
        """Return the URL of a server at this address that listens on ``port``."""
        scheme = "https" if self.certificates else "http"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}://{host}:{port}/"


def _read_token(file: Path) -> str:
    """Return the token in a file; raise `ConfigError` if it is too short to be safe."""
    token = file.read_text(encoding="utf-8").strip()
    if len(token) < SHORTEST_TOKEN or not (token.isascii() and token.isalnum()):
        raise ConfigError(
            f"the token in {file} needs {SHORTEST_TOKEN} or more letters and digits, e.g. of `openssl rand -hex 24`"
        )
    return token


@contextlib.contextmanager
def serve_app(app: "ASGIApp", address: Address) -> Iterator[str]:
    """Serve ``app`` from a thread while the block runs, and yield its URL.

    Raises `ConfigError` if the address or the certificates cannot be used.
    """
    from semisfl.watch.app import Guard

    with address.bind() as listener:
        config = uvicorn.Config(
            Guard(app, address.token, address.certificates is not None),
            limit_concurrency=MOST_REQUESTS,
            ws="none",
            log_level="error",
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=1,
        )
        config.load()
        if address.certificates is not None:
            config.ssl = _renewed_context(address.certificates)
        server = uvicorn.Server(config)
        run = functools.partial(server.run, sockets=[listener])
        thread = threading.Thread(target=run, name="semisfl-watch", daemon=True)
        thread.start()
        try:
            _await_start(server, thread)
            yield address.url(listener.getsockname()[1])
        finally:
            server.should_exit = True
            thread.join(5)


def _await_start(server: uvicorn.Server, thread: threading.Thread) -> None:
    """Wait until the server accepts connections; raise `RuntimeError` if its thread ended instead."""
    until = time.monotonic() + START_SECONDS
    while not server.started:
        if not thread.is_alive() or time.monotonic() > until:
            raise RuntimeError("the page's server did not start")
        time.sleep(0.01)


def _renewed_context(folder: Path) -> ssl.SSLContext:
    """Return a TLS context of ``folder``'s certificate, which it reads again after `semisfl certs renew`."""
    files = folder / "server.crt", folder / "server.key"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    read = stamp(*files)
    try:
        context.load_cert_chain(*files)
    except OSError as error:
        raise ConfigError(
            f"cannot use server.crt and server.key in {folder}: {error}; make them with `semisfl certs server`"
        ) from error

    def look(connection: Any, name: str | None, _: ssl.SSLContext) -> None:
        nonlocal read
        # While only one of the files is new they do not fit; the next connection looks again.
        if (now := stamp(*files)) != read:
            with contextlib.suppress(OSError):
                fresh = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                fresh.load_cert_chain(*files)
                context.load_cert_chain(*files)
                connection.context, read = fresh, now

    context.sni_callback = look  # called at every handshake
    return context
