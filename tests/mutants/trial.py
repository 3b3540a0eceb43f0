"""Tests run in a copy of the repository, in a forked process: what they import from elsewhere is there."""

import compileall
import contextlib
import importlib
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path
from py_compile import PycInvalidationMode
from typing import NamedTuple

import pytest

from tests.mutants.catalogue import ROOT

LEFT_OUT = {".git", ".venv", ".mutants", ".ci", "runs", "results"}
# Loaded once, not for every change; nothing of this repository may be among it.
for needed in ("numpy", "torch", "torch.func", "pydantic", "safetensors.torch", "PIL.Image"):
    importlib.import_module(needed)


class Outcome(NamedTuple):
    name: str
    """killed, survived, or broken: the tests could not be run."""
    detail: str


def make_tree(folder: Path) -> Path:
    """A copy of the package and its tests, with everything else of the repository in sight."""
    folder.mkdir()
    for path in ROOT.iterdir():
        if path.name in ("semisfl", "tests"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(path, folder / path.name, ignore=ignored)
        elif path.name == "pyproject.toml":
            shutil.copy(path, folder)
        elif path.name not in LEFT_OUT:
            (folder / path.name).symlink_to(path)
    # Known by content: by second and size, as usual, a change could be mistaken for another one.
    mode = PycInvalidationMode.CHECKED_HASH
    compileall.compile_dir(folder / "semisfl", quiet=1, invalidation_mode=mode)
    return folder


class Trial:
    """``tests`` as they go in ``tree``, for at most so many ``seconds``."""

    def __init__(self, tree: Path, tests: tuple[str, ...], seconds: float) -> None:
        self.tree = tree
        self._log = tree / "log"
        self._until = time.monotonic() + seconds
        sys.stdout.flush()
        self._process = os.fork()
        if self._process == 0:
            status = 3
            try:
                os.setsid()  # so that processes which a test starts end with it
                status = _run(tree, tests, self._log)
            finally:
                os._exit(status)

    def outcome(self) -> Outcome | None:
        """None while it goes on."""
        process, status = os.waitpid(self._process, os.WNOHANG)
        if not process and time.monotonic() < self._until:
            return None
        if not process:
            self.end()
            return Outcome("killed", "running out of time")
        code = os.waitstatus_to_exitcode(status)
        output = self._log.read_text(encoding="utf-8", errors="replace")
        if code == pytest.ExitCode.OK:
            return Outcome("survived", "")
        # With -x a file that cannot be imported ends pytest like a test that fails.
        failed = re.search(r"^(?:FAILED|ERROR) tests/(\S+::\S+)", output, re.MULTILINE)
        if code == pytest.ExitCode.TESTS_FAILED and failed:
            return Outcome("killed", failed.group(1))
        return Outcome("broken", output[-2000:])

    def end(self) -> None:
        self._kill()
        os.waitpid(self._process, 0)

    def _kill(self) -> None:
        """Its whole group; or, before it had one, itself."""
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError):
                kill(self._process, signal.SIGKILL)


def _run(tree: Path, tests: tuple[str, ...], log: Path) -> int:
    """In the forked process: pytest's exit status."""
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(out, stream)
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    elsewhere = [path for path in sys.path if Path(path or ".").resolve() not in (ROOT, tree)]
    sys.path[:] = [str(tree), *elsewhere]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "semisfl")]:
        del sys.modules[name]
    options = ["-x", "-q", "-rfE", "-p", "no:cacheprovider", "-m", "not slow and not gpu"]
    status = pytest.main([*options, *(f"tests/{test}" for test in tests)])
    sys.stdout.flush()
    return int(status)
