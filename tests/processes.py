"""Processes that run Python code and start at once, because torch is imported already.

Each is a process of its own: its pid, signals, limits and exit status are real. It is forked from a
process that has imported torch and does nothing else, so it begins where ``python`` would have been
after several seconds. Tests of loading, and a few others, start ``python`` itself.

Whatever tests start ends with them, also when pytest is killed: see `guarded`.
"""

import contextlib
import ctypes
import functools
import gc
import importlib
import inspect
import json
import os
import resource
import runpy
import secrets
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen  # by its name, as tests put `Forked` in its place
from typing import Any

BEFOREHAND = ("torch", "numpy", "PIL.Image", "rich.console", "typer", "semisfl.runs.start")
"""gRPC is not among them, as it does not survive a fork, nor `semisfl.cli`, which reads the terminal."""
MOST_BYTES = 1 << 20
PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
MARK = "SEMISFL_TESTS"
"""A variable in the environment of every process that tests start."""
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl(2)


def free_port() -> int:
    """Return a port of this machine that nobody listens on."""
    with socket.create_server(("localhost", 0)) as free:
        return int(free.getsockname()[1])


class Forked(Popen[Any]):
    """A `subprocess.Popen` whose command is ``[sys.executable, "-m", MODULE, …]`` or
    ``[sys.executable, "-c", CODE, …]``; ``largest_file`` limits the bytes of a file it writes."""

    def __init__(self, command: list[str], largest_file: int | None = None, **options: Any) -> None:
        assert command[0] == sys.executable and command[1] in ("-m", "-c"), command
        self._largest_file = largest_file
        super().__init__(command, **options)

    def _execute_child(self, *arguments: Any) -> None:
        bound = inspect.signature(super()._execute_child).bind(*arguments).arguments  # type: ignore[misc]
        # ``preexec_fn`` is not called: the process that forks is not the one that asks for it.
        assert not bound["pass_fds"] and not bound["shell"]
        streams = [bound[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        request = {
            "words": bound["args"][1:],
            "folder": os.fspath(bound["cwd"] or os.getcwd()),
            "environment": dict(os.environ if bound["env"] is None else bound["env"]),
            "session": bound["start_new_session"],
            "largest_file": self._largest_file,
        }
        parent = _parent()
        # The process is the child of a process that ends at once: it becomes ours, to wait for.
        _adopt_orphans(True)
        try:
            files = [own if file == -1 else file for own, file in enumerate(streams)]
            socket.send_fds(parent, [json.dumps(request).encode()], files)
            self.pid = int(parent.recv(100))
        finally:
            _adopt_orphans(False)
        self._child_created = True
        self._close_pipe_fds(*(bound[name] for name in PIPES))  # type: ignore[attr-defined]


def run(command: list[str], **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end, as `subprocess.run` does with ``capture_output`` and ``text``."""
    seconds = options.pop("timeout", None)
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    with Forked(command, **options) as process:
        try:
            out, err = process.communicate(timeout=seconds)
        finally:
            process.kill()
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _adopt_orphans(adopt: bool) -> None:
    ctypes.CDLL(None).prctl(SUBREAPER, int(adopt), 0, 0, 0)


@functools.cache
def _parent() -> socket.socket:
    """Start the process that forks, and return the socket to ask it; it ends when we do."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MOST_BYTES)
    command = [sys.executable, "-m", "tests.processes", str(theirs.fileno())]
    Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
    theirs.close()
    return ours


# --- the guard ------------------------------------------------------------------------------------


@contextmanager
def guarded() -> Iterator[None]:
    """Kill every process that is started inside the block when this process ends, however it does.

    A process of its own waits for that. It knows the others by a mark in their environment, which their own
    children inherit, whatever sessions and parents they have.
    """
    mark = f"{MARK}={os.getpid()}-{secrets.token_hex(8)}"
    os.environ[MARK] = mark.partition("=")[2]
    command = [sys.executable, "-m", "tests.processes", "guard", mark]
    folder = Path(__file__).parent.parent
    with Popen(command, stdin=subprocess.PIPE, cwd=folder, start_new_session=True):
        yield
    del os.environ[MARK]


def _guard(mark: bytes) -> None:
    """Wait until the other end of the standard input is closed, and kill what has the ``mark``."""
    sys.stdin.read()
    for place in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # another user's process, or one that has ended
            if mark in place.read_bytes() and int(place.parent.name) != os.getpid():
                os.kill(int(place.parent.name), signal.SIGKILL)


# --- in the process that forks -------------------------------------------------------------------


def _serve(requests: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return in a new process for each request, with the request and its open files."""
    while True:
        message, files, *_ = socket.recv_fds(requests, MOST_BYTES, 3)
        if not message:
            os._exit(0)
        read, write = os.pipe()
        middle = os.fork()
        if middle == 0:
            pid = os.fork()
            if pid == 0:
                for file in (read, write):
                    os.close(file)
                requests.close()
                return json.loads(message), files
            os.write(write, str(pid).encode())
            os._exit(0)
        os.waitpid(middle, 0)
        requests.send(os.read(read, 100))
        for file in (read, write, *files):
            os.close(file)


def _become(request: dict[str, Any], files: list[int]) -> None:
    """Make this process what a new ``python`` would be for the request, and run its code."""
    if request["session"]:
        os.setsid()
    for own, file in enumerate(files):
        os.dup2(file, own)
        os.close(file)
    # Whether they are a terminal decides how they buffer, and that was looked at for other files.
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False, buffering=1, errors="backslashreplace")
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[:0] = ["", *request["environment"].get("PYTHONPATH", "").split(os.pathsep)]
    importlib.invalidate_caches()
    if request["largest_file"] is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["largest_file"],) * 2)
    option, code, *words = request["words"]
    sys.argv = [code if option == "-m" else "-c", *words]
    if option == "-m":
        runpy.run_module(code, run_name="__main__", alter_sys=True)
    else:
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), sys.modules["__main__"].__dict__)


def _main() -> None:
    if sys.argv[1] == "guard":
        _guard(sys.argv[2].encode())
        return
    requests = socket.socket(fileno=int(sys.argv[1]))
    for name in BEFOREHAND:
        importlib.import_module(name)
    # A collection in a child would write to every object, and so copy all memory shared with it.
    gc.freeze()
    request, files = _serve(requests)
    _become(request, files)


if __name__ == "__main__":
    _main()
