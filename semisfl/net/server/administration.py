"""Let the operator ask a running server to do something, over a Unix socket in the run's directory.

Only the user who runs the server may connect: the socket has mode 0600, and the kernel names the
user of each connection, on both sides. A question is one line of JSON, and so is its answer.
"""

import asyncio
import contextlib
import json
import logging
import os
import shlex
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `semisfl fleet` starts without torch
    from semisfl.net.chunks import LoopThread

log = logging.getLogger(__name__)

SOCKET = "fleet.sock"
SECONDS = 10.0
"""Most time for a question or its answer."""

Actions = Mapping[str, Callable[[str], dict[str, Any]]]
"""Requests of the operator: a name to a function of the device's name, which may be empty."""


class Administration:
    """Answer the operator on the server's loop."""

    def __init__(self, directory: Path, actions: Actions, thread: "LoopThread") -> None:
        self._path, self._actions, self._thread = directory / SOCKET, actions, thread
        self._server: asyncio.Server | None = None
        try:
            self._server = thread.call(self._listen(directory))
        except OSError as error:
            # Some file systems have no sockets; training needs none.
            log.warning("%s cannot be made, so `semisfl fleet` cannot ask: %s", self._path, error)

    async def _listen(self, directory: Path) -> asyncio.Server:
        # A socket that is left over is a killed server's: this one holds the run's lock.
        self._path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with _address(directory) as address:
            listener.bind(address)
        # Before it listens: until then nobody can connect.
        self._path.chmod(0o600)
        return await asyncio.start_unix_server(self._serve, sock=listener)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answer: dict[str, Any]
        try:
            async with asyncio.timeout(SECONDS):
                line = await reader.readline()
                if (user := _user(writer.get_extra_info("socket"))) not in (None, os.geteuid()):
                    log.warning("user %s may not administer this server and was refused", user)
                    answer = {"error": f"user {user} does not run this server"}
                else:
                    answer = self._answer(json.loads(line))
                writer.write((json.dumps(answer) + "\n").encode())
                await writer.drain()
        except (OSError, ValueError, TypeError, KeyError, TimeoutError) as error:
            log.warning("a question on %s was not understood: %r", self._path, error)
        finally:
            writer.close()

    def _answer(self, question: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._actions[question["action"]](str(question.get("name", "")))
        except (ValueError, OSError) as error:
            return {"error": str(error)}

    def close(self) -> None:
        if self._server is not None:
            self._thread.call(self._stop(self._server))
            self._server = None

    async def _stop(self, server: asyncio.Server) -> None:
        server.close()
        self._path.unlink(missing_ok=True)


def ask(directory: Path, action: str, name: str = "") -> dict[str, Any]:
    """Ask the server that runs in ``directory``, and return its answer; raise `ValueError` if it refuses."""
    if not (directory / "config.toml").is_file():
        raise ValueError(f"{directory} holds no run (no config.toml); name a run's directory")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link, _address(directory) as address:
        link.settimeout(SECONDS)
        try:
            link.connect(address)
        except (FileNotFoundError, ConnectionRefusedError):
            raise ValueError(
                f"no server runs in {directory}; a run of devices goes on with "
                f"`semisfl serve --resume {shlex.quote(str(directory))} --labeled DIR`"
            ) from None
        except PermissionError:
            raise ValueError(
                f"{directory / SOCKET} is another user's; run this as the user of the server"
            ) from None
        if (user := _user(link)) not in (None, os.geteuid()):
            raise ValueError(
                f"user {user} answers at {directory / SOCKET}, who did not start this command; run it as "
                "the user of the server, and let no other user write to that folder"
            )
        try:
            link.sendall((json.dumps({"action": action, "name": name}) + "\n").encode())
            with link.makefile("rb") as lines:
                answer: dict[str, Any] = json.loads(lines.readline())
        except TimeoutError:
            raise ValueError(
                f"the server of {directory} did not answer within {SECONDS:g} s; is its process "
                "stopped? It may do this later: look with `semisfl fleet`, or at run.log"
            ) from None
        except (ConnectionError, ValueError):  # reset, or no whole line
            raise ValueError(
                f"the server of {directory} ended before it answered; look at {directory / 'run.log'}"
            ) from None
    if "error" in answer:
        raise ValueError(answer["error"])
    return answer


@contextlib.contextmanager
def _address(directory: Path) -> Iterator[str]:
    """Yield the socket's address; a short one, because it may have 107 bytes at most."""
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        short = f"/proc/self/fd/{folder}"
        yield f"{short if os.path.exists(short) else directory}/{SOCKET}"
    finally:
        os.close(folder)


def _user(connection: socket.socket) -> int | None:
    """Return the number of the user at the other end; None where the kernel does not tell."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int(struct.unpack("3i", credentials)[1])
