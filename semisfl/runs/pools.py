"""Run several jobs at once and report their progress and failures.

A `Pool` executes them: processes of this machine here, a Ray cluster in `ray_pool`.
"""

import ctypes
import os
import shlex
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import Protocol

from semisfl.runs.advice import DIVERGED
from semisfl.runs.compare import Job
from semisfl.runs.gpu_sharing import SharedGPU
from semisfl.runs.lock import EXIT_CODE, Taken
from semisfl.settings.toml import to_toml
from semisfl.stopping import StopFlag

POLL_SECONDS = 0.2
ATTEMPTS = 3
"""Attempts at a run whose process is lost; each continues from the last checkpoint."""
PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
_prctl = ctypes.CDLL(None).prctl  # looked up here: between fork and exec little is safe


class Pool(Protocol):
    """A place that executes runs."""

    def has_room(self) -> bool: ...

    def start(self, job: Job) -> None: ...

    def ended(self) -> Mapping[Path, Exception | None]:
        """Return the runs that ended since the last call, with their errors: `Taken` if another process has one."""
        ...

    def stop(self) -> None:
        """End the active runs; they can be continued."""
        ...


Tell = Callable[[int, int, int, int], None]
"""Called with runs done, all runs, rounds done, all rounds."""


Leave = Callable[[Path], None]
"""Called with a run that is left to the process that works on it."""


def run_in_pool(
    jobs: Sequence[Job], pool: Pool, stop: StopFlag, tell: Tell, leave: Leave | None = None
) -> bool:
    """Run the jobs that are not finished; return False if stopped. If one fails, the others continue.

    Without ``leave``, a run that another process works on counts as failed.
    """
    left = deque(job for job in jobs if job.again().status != "finished")
    under_way: set[Path] = set()
    left_to_others: set[Path] = set()
    failed: dict[Path, Exception] = {}
    try:
        while left or under_way:
            if stop.requested:
                return False
            while left and pool.has_room():
                job = left.popleft().again()  # another process may have finished it by now
                if job.status != "finished":
                    under_way.add(job.path)
                    pool.start(job)
            for path, problem in pool.ended().items():
                under_way.remove(path)
                if isinstance(problem, Taken) and leave is not None:
                    left_to_others.add(path)
                    leave(path)
                elif problem is not None:
                    failed[path] = problem
            runs = len(jobs) - sum(map(len, (left, under_way, left_to_others, failed)))
            tell(runs, len(jobs), sum(map(rounds_of, jobs)), sum(job.config.rounds for job in jobs))
            if under_way:
                time.sleep(POLL_SECONDS)
    finally:
        pool.stop()
    if failed:
        path, problem = next(iter(failed.items()))
        message = f"{len(failed)} of {len(jobs)} runs failed; {path}: {problem}"
        if len(failed) < len(jobs):
            folder = os.path.commonpath([job.path for job in jobs])
            message += f"; `semisfl report {shlex.quote(folder)}` shows the others"
        raise OSError(message)
    return True


def rounds_of(job: Job) -> int:
    """Return the number of rounds done: the lines of the metrics file."""
    try:
        return (job.path / "metrics.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def _stop_with_parent() -> None:
    """Let the kernel stop this process cleanly when its parent is killed, which can pass on no signal."""
    _prctl(PARENT_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)


class Processes:
    """``count`` runs at a time, each in a process of its own on this machine."""

    def __init__(self, count: int, device: str = "auto") -> None:
        self._count, self._device = count, device
        self._running: dict[Path, tuple[Job, Popen[bytes], Path]] = {}
        """The job, its process and the file with the process's errors."""
        self._attempts: dict[Path, int] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="semisfl-")
        self._gpu = SharedGPU(Path(self._folder.name), device)

    def has_room(self) -> bool:
        return len(self._running) < self._count

    def start(self, job: Job) -> None:
        self._attempts[job.path] = self._attempts.get(job.path, 0) + 1
        cores = max(1, (os.cpu_count() or 1) // self._count)
        stem = Path(self._folder.name) / str(sum(self._attempts.values()))
        # A file, because a pipe that nobody reads until the end blocks the process once it is full.
        errors = stem.with_suffix(".err")
        with errors.open("wb") as file:
            # A session of its own: only this process gets Ctrl-C, and passes it on once.
            process = Popen(
                [sys.executable, "-m", "semisfl", *self._words(job, stem.with_suffix(".toml"))],
                env={"OMP_NUM_THREADS": str(cores), **os.environ, **self._gpu.environment},
                stdout=DEVNULL,
                stderr=file,
                start_new_session=True,
                preexec_fn=_stop_with_parent,
            )
        self._running[job.path] = job, process, errors

    def _words(self, job: Job, file: Path) -> list[str]:
        """Return the words of the command that starts or continues a job; a new one is written to ``file``."""
        common = ["--device", self._device, "--quiet"]
        if job.status == "unfinished":
            # The method was imported by this process, and the sinks are those asked for: both are trusted.
            names = [name for name in (job.config.method, *job.config.sinks) if ":" in name]
            allowed = [word for name in names for word in ("--allow-method", name)]
            return ["run", "--resume", str(job.path), *common, *allowed, "--set", *job.changed]
        file.write_text(to_toml(job.config), encoding="utf-8")
        return ["run", str(file), "--out", str(job.path), *common]

    def ended(self) -> Mapping[Path, Exception | None]:
        ended: dict[Path, Exception | None] = {}
        for path, (job, process, errors) in list(self._running.items()):
            if process.poll() is None:
                continue
            del self._running[path]
            lines = errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            problem = (lines or [f"exit code {process.returncode}"])[-1]
            if process.returncode == DIVERGED:  # it did all its rounds
                ended[path] = None
            elif process.returncode > 0:
                ended[path] = (Taken if process.returncode == EXIT_CODE else OSError)(problem)
            elif (now := job.again()).status == "finished":
                ended[path] = None
            elif self._attempts[path] < ATTEMPTS:
                self.start(now)
            else:
                ended[path] = OSError(f"its process was ended {ATTEMPTS} times: {problem}")
        return ended

    def stop(self) -> None:
        for _, process, _ in self._running.values():
            process.terminate()
        for _, process, _ in self._running.values():
            process.wait()
        self._gpu.stop()
        self._folder.cleanup()
