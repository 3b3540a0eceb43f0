"""Serve a page on loopback, or over TLS to those who have the token."""

import asyncio
import contextlib
import functools
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn

from semisfl.settings.addresses import is_loopback, split_address
from semisfl.settings.counts import counted
from semisfl.settings.sections import ConfigError
from semisfl.watch.connections import BACKLOG, Limits, Listener, Loop, protocol
from semisfl.watch.renewal import Certificate

if TYPE_CHECKING:
    from starlette.types import ASGIApp

SHORTEST_TOKEN = 16
START_SECONDS = 30.0


@dataclass(frozen=True)
class Address:
    """The address to listen on, and what protects it. `parse` makes it and checks the rules."""

    host: str
    port: int
    token: str | None = None
    certificates: Path | None = None
    """The folder with server.crt and server.key; None: no TLS."""

    @classmethod
    def parse(
        cls, option: str, listen: str, token_file: Path | None, certificates: Path | None
    ) -> "Address":
        """Return the address of HOST:PORT, the value of ``option``. TLS is used only beyond loopback."""
        try:
            host, port = split_address(listen)
        except ConfigError as error:
            raise ConfigError(f"{option} {error}") from None
        token = _read_token(token_file) if token_file is not None else None
        if is_loopback(host):
            return cls(host, port, token)
        if token is None:
            raise ConfigError(
                f"{option} {listen} is not a loopback address, so a token is needed: "
                f"--token-file FILE, with {SHORTEST_TOKEN} letters or more"
            )
        if certificates is None:
            raise ConfigError(
                f"{option} {listen} is not a loopback address, so TLS is needed: --certs DIR, the "
                "folder with server.crt and server.key (`semisfl certs server`)"
            )
        for name in ("server.crt", "server.key"):
            if not (certificates / name).is_file():
                raise ConfigError(
                    f"{certificates} has no {name}; make it with `semisfl certs server`"
                )
        return cls(host, port, token, certificates)

    def bind(self, limits: Limits | None = None) -> Listener:
        """Bind the port now, so that a wrong one fails before anything starts."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        listener = Listener(family, limits or Limits())
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((self.host, self.port))
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            raise ConfigError(
                f"cannot listen on {self.host}:{self.port}: {error.strerror or error}; "
                "choose another address or port"
            ) from error
        return listener

    def url(self, port: int) -> str:
        scheme = "https" if self.certificates else "http"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}://{host}:{port}/"


def _read_token(file: Path) -> str:
    try:
        token = file.read_text(encoding="ascii").strip()
    except OSError as error:
        raise ConfigError(f"cannot read a token from {file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the token in {file} is not ASCII text; use another") from error
    if len(token) < SHORTEST_TOKEN or not token.isprintable() or " " in token:
        raise ConfigError(
            f"the token in {file} has {counted(len(token), 'letter')}; it needs {SHORTEST_TOKEN} or more on one "
            "line, without blanks, e.g. of `openssl rand -hex 24`"
        )
    return token


@contextlib.contextmanager
def serving(app: "ASGIApp", address: Address, listener: Listener | None = None) -> Iterator[str]:
    """Serve ``app`` from a thread inside the block and yield its URL; ``listener`` is a port bound before."""
    from semisfl.watch.app import PROBES, Guard
    from semisfl.watch.pacing import Paced, Turns

    with listener or address.bind() as listener:
        secure = address.certificates is not None
        config = uvicorn.Config(
            Guard(Paced(Turns(app, PROBES)), address.token, secure),
            http=protocol(listener.limits),
            ws="none",
            backlog=BACKLOG,
            log_level="error",
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=1,
        )
        config.load()
        if address.certificates is not None:
            try:
                config.ssl = Certificate(address.certificates).context
            except OSError as error:
                raise ConfigError(f"cannot use server.crt and server.key: {error}") from error
        server = uvicorn.Server(config)
        thread = threading.Thread(
            target=_run, args=(server, listener), name="semisfl-watch", daemon=True
        )
        thread.start()
        try:
            _await_start(server, thread)
            yield address.url(listener.getsockname()[1])
        finally:
            server.should_exit = True
            thread.join(5)


def _run(server: uvicorn.Server, listener: Listener) -> None:
    with asyncio.Runner(loop_factory=functools.partial(Loop, listener.limits)) as runner:
        runner.run(server.serve(sockets=[listener]))


def _await_start(server: object, thread: threading.Thread) -> None:
    until = time.monotonic() + START_SECONDS
    while not getattr(server, "started", False):
        if not thread.is_alive() or time.monotonic() > until:
            raise RuntimeError("the page's server did not start")
        time.sleep(0.01)
