"""Execute several runs at once, in processes of this machine or on a Ray cluster, and report progress and failures.

On a Ray cluster, every machine needs this package and the folder of the runs. A run whose process, worker or machine
is lost is started again, and continues from its last checkpoint.
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
from typing import Any, Protocol

from semisfl.runs.advice import DIVERGED
from semisfl.runs.compare import Job
from semisfl.runs.lock import EXIT_CODE, Taken
from semisfl.runs.reading import METRICS
from semisfl.settings import config as configs
from semisfl.settings.config import ConfigError
from semisfl.settings.toml import to_toml
from semisfl.stopping import StopFlag

POLL_SECONDS = 0.2
ATTEMPTS = 3
"""Attempts at a run whose process is lost; each continues from the last checkpoint."""
RAY_ATTEMPTS = 10
"""Attempts at a run whose worker or machine is lost."""
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


def run_in_pool(
    jobs: Sequence[Job],
    pool: Pool,
    stop: StopFlag,
    tell: Callable[[int, int, int, int], None],
    leave: Callable[[Path], None] | None = None,
) -> bool:
    """Run the jobs that are not finished; return False if stopped. If one fails, the others continue.

    ``tell`` is called with the numbers of finished runs, all runs, finished rounds and all rounds. ``leave`` is called
    with a run that another process works on; without it such a run counts as failed. Raises `OSError` at the end if
    runs failed.
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
        folder = os.path.commonpath([job.path for job in jobs])
        raise OSError(
            f"{len(failed)} of {len(jobs)} runs failed; {path}: {problem}; `semisfl report {shlex.quote(folder)}` shows "
            "the others"
        )
    return True


def rounds_of(job: Job) -> int:
    """Return the number of rounds done: the lines of the metrics file."""
    try:
        return (job.path / METRICS).read_bytes().count(b"\n")
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
                env={"OMP_NUM_THREADS": str(cores), **os.environ},
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
            code = process.poll()
            if code is None:
                continue
            del self._running[path]
            lines = errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            problem = (lines or [f"exit code {code}"])[-1]
            if code > 0:
                kind = Taken if code == EXIT_CODE else OSError
                ended[path] = None if code == DIVERGED else kind(problem)
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
        self._folder.cleanup()


class RayPool:
    """The runs of a Ray cluster: one per GPU or share of it, or one per core without GPUs."""

    def __init__(self, address: str | None, share: int = 1, device: str = "auto") -> None:
        """Connect to the cluster at ``address`` (None: start one here); place ``share`` runs on each GPU."""
        try:
            import ray  # an extra
        except ImportError as error:
            raise ImportError("--engine ray needs Ray: pip install 'semisfl[ray]'") from error
        self._ray, self._device = ray, device
        if not ray.is_initialized():
            dashboard = False if address is None else None
            try:
                ray.init(address, log_to_driver=False, include_dashboard=dashboard)
            except Exception as error:  # of many classes, with texts for Ray's own users
                raise ConfigError(
                    "Ray does not start on this machine; --debug shows its reason, --jobs needs no Ray"
                    if address is None
                    else f"no Ray cluster answers at {address!r}; give HOST:PORT of one, or auto, or use --engine ray"
                ) from error
        gpus = 1 / share if ray.cluster_resources().get("GPU", 0) else 0
        remote = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=RAY_ATTEMPTS - 1)
        self._train = remote(train_one)
        self._running: dict[Any, Path] = {}

    def has_room(self) -> bool:
        """Return True: the cluster queues what does not fit yet."""
        return True

    def start(self, job: Job) -> None:
        values = job.config.model_dump(mode="json")
        answer = self._train.remote(values, str(job.path.absolute()), self._device)
        self._running[answer] = job.path

    def ended(self) -> Mapping[Path, Exception | None]:
        waiting = list(self._running)
        done = self._ray.wait(waiting, num_returns=len(waiting), timeout=0)[0] if waiting else []
        return {self._running.pop(answer): self._problem(answer) for answer in done}

    def _problem(self, answer: Any) -> Exception | None:
        try:
            self._ray.get(answer)
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, Taken):
                return error.cause
            return OSError(f"{type(error.cause).__name__}: {error.cause}")
        except self._ray.exceptions.RayError as error:
            return OSError(f"lost {RAY_ATTEMPTS} times: {str(error).splitlines()[0]}")
        return None

    def stop(self) -> None:
        """Cancel the active runs; they can continue from their last checkpoints."""
        for answer in self._running:
            self._ray.cancel(answer, force=True)
        self._ray.shutdown()


def train_one(values: dict[str, Any], path: str, device: str) -> None:
    """Start or continue one run, in a worker of a Ray cluster."""
    job = Job.of(configs.parse(values), Path(path))
    if job.status != "finished":
        with job.prepare(device=device) as run:
            run.go()
