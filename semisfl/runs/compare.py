"""Compare methods: list the runs (methods, seeds, swept settings, variants), execute them, sum up their results.

A run that an earlier call finished is not repeated. Several runs are executed at once in processes of this machine or
on a Ray cluster, whose machines all need this package and the folder of the runs. A run whose process, worker or
machine is lost is started again, and continues from its last checkpoint.
"""

import contextlib
import ctypes
import itertools
import os
import re
import shlex
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import Any, Literal

from semisfl.runs.advice import DIVERGED
from semisfl.runs.directory import RunDirectory
from semisfl.runs.lock import EXIT_CODE, Taken, take
from semisfl.runs.reading import METRICS
from semisfl.runs.report import Group, Summary, find_runs, group_runs, read_run, summarise
from semisfl.runs.start import PreparedRun, begin, go_on
from semisfl.settings import catalog, config as configs, lookup
from semisfl.settings.config import Config, ConfigError
from semisfl.settings.plain_values import flatten, words_of
from semisfl.settings.toml import to_toml
from semisfl.stopping import StopFlag

Status = Literal["new", "unfinished", "finished"]


@dataclass(frozen=True)
class Sweep:
    """A setting and the values it takes, as text."""

    key: str
    values: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> "Sweep":
        """Return the sweep that ``KEY=V1,V2,...`` describes; raise `ConfigError` for other text."""
        key, _, values = text.partition("=")
        chosen = tuple(words_of(values))
        if not key.strip() or not chosen:
            raise ConfigError(
                f"--sweep {text!r} is not KEY=V1,V2,..., e.g. --sweep data.labeled=10,20,40"
            )
        return cls(key.strip(), chosen)


@dataclass(frozen=True)
class Variant:
    """A named group of settings of `compare --variants`."""

    name: str = ""
    assignments: tuple[str, ...] = ()
    """``key=value`` each, as ``--set`` takes them."""


def read_variants(path: Path) -> list[Variant]:
    """Read named variants from a TOML file: ``name = ["key=value", ...]``; ``[]`` is the preset as it is.

    Raises `ConfigError` for another form, and for a name that cannot be part of a directory's.
    """
    variants = []
    for name, settings in configs.read(path).items():
        listed = isinstance(settings, list) and all(isinstance(one, str) for one in settings)
        if not listed or not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            raise ConfigError(
                f'{path}: {name} = {settings!r} is not NAME = ["key=value", ...] with a name of letters, digits, _ and -'
            )
        variants.append(Variant(name, tuple(settings)))
    return variants


@dataclass(frozen=True)
class Job:
    """One run of several: what to train and where. The directory may hold part of the run already."""

    config: Config
    path: Path
    name: str = ""
    """The name of its group in a table; empty: the title of its method."""
    differs: Mapping[str, str] = field(default_factory=dict)
    """The swept settings with this run's values; empty: nothing is swept."""

    @property
    def status(self) -> Status:
        """Return how far the run has got by now; another process may be training it.

        A run that its limit ended is unfinished if ``config`` has another limit; one that diverged is finished. Raises
        `ConfigError` if there is a run with other settings.
        """
        if not (self.path / "config.toml").is_file():
            return "new"
        there = RunDirectory.open(self.path).config()
        # Limits and sinks change nothing that a run computes, so it may continue with other ones.
        changeable = {"stop": self.config.stop, "sinks": self.config.sinks}
        if there.model_copy(update=changeable) != self.config:
            theirs, ours = flatten(there.model_dump()), flatten(self.config.model_dump())
            key = next(key for key in ours if theirs.get(key) != ours[key])
            raise ConfigError(
                f"{self.path} holds a run with other settings ({key} = {theirs.get(key)} there, {ours[key]} here); "
                "choose another --out"
            )
        run = read_run(self.path)
        limited = run.finished and there.stop == self.config.stop
        return "finished" if run.complete or run.diverged or limited else "unfinished"

    @property
    def changed(self) -> list[str]:
        """Return the settings that replace those of an unfinished run: its limits."""
        limits = self.config.stop.model_dump()
        return [f"stop.{key}={'none' if limit is None else limit}" for key, limit in limits.items()]

    def prepare(self, **arguments: Any) -> AbstractContextManager[PreparedRun]:
        """Start the run, or continue it from its last checkpoint, as `begin` and `go_on` do.

        ``arguments`` are those of `semisfl.train`, such as ``device`` and ``stop``.
        """
        if self.status == "unfinished":
            return go_on(self.path, settings=self.changed, **arguments)
        return begin(self.config, out=self.path, **arguments)


def choose_methods(names: str, values: Mapping[str, Any] | None = None) -> list[str]:
    """Return the names of the methods that ``a,b`` or ``all`` lists; raise `ConfigError` for one that is unknown.

    ``all`` leaves out what the settings ``values`` do not allow: the probe without trained weights, and whole-model
    methods with a frozen bottom.
    """
    if names.strip() == "all":
        values = values or {}
        pretrained = values.get("model", {}).get("weights") not in (None, "none")
        frozen = values.get("clients", {}).get("bottom") == "frozen"
        return [
            name
            for name, entry in catalog.METHODS.items()
            if (pretrained or name != "probe") and not (frozen and entry.works)
        ]
    chosen = words_of(names)
    for name in chosen:
        lookup.method(name)
    return chosen


def list_jobs(
    values: dict[str, Any],
    methods: Sequence[str],
    seeds: int,
    out: Path,
    sweeps: Sequence[Sweep] = (),
    variants: Sequence[Variant] = (),
) -> list[Job]:
    """Return the runs of a comparison, seed by seed, so that a stopped one still compares equal seeds.

    There is a run for every method, seed, combination of swept values and variant, each in a directory of its own
    below ``out``. ``values`` are the plain settings that they share; ``seeds`` is the number of seeds, which count up
    from the configured one. Raises `ConfigError` if two of them would be the same run.
    """
    entries = {name: lookup.method(name) for name in methods}
    first = configs.parse(values, others=entries.values()).seed
    keys = [sweep.key for sweep in sweeps]
    assigned = [
        one.partition("=")[0].strip() for variant in variants for one in variant.assignments
    ]
    if len(set(keys)) < len(keys) or {"method", "seed"} & {*keys, *assigned}:
        raise ConfigError(
            "give all values of a key in one --sweep, and methods and seeds by --methods and --seeds"
        )
    cells = [
        dict(zip(keys, chosen, strict=True))
        for chosen in itertools.product(*(sweep.values for sweep in sweeps))
    ]
    jobs: list[Job] = []
    seen: dict[str, Path] = {}
    for seed, cell, variant in itertools.product(
        range(first, first + seeds), cells, variants or [Variant()]
    ):
        settings = [*variant.assignments, *(f"{key}={value}" for key, value in cell.items())]
        changed = configs.override(values, settings)
        place = "-".join(f"{key}-{value}" for key, value in cell.items())
        place = re.sub(r"[^A-Za-z0-9._+-]", "_", place)
        for method, entry in entries.items():
            config = configs.parse(
                {**changed, "method": method, "seed": seed}, others=entries.values()
            )
            # A method named ``package.module:Class`` gives its class alone.
            parts = (entry.name.rpartition(":")[2], variant.name, place, f"seed{seed}")
            path = out / "-".join(part for part in parts if part)
            other = seen.setdefault(config.model_dump_json(exclude={"sinks"}), path)
            if other is not path:
                raise ConfigError(
                    f"{other.name} and {path.name} would be the same run; give each value and each variant once, and "
                    f"leave {method} out of --methods if it does not read what is swept"
                )
            jobs.append(Job(config, path, f"{entry.title} {variant.name}".strip(), cell))
    return jobs


def run_in_turn(jobs: Sequence[Job], train: Callable[[Job], bool]) -> bool:
    """Run the jobs that are not finished, one after another, in this process.

    ``train`` returns whether a run reached its end. Returns False once one was stopped; the others are then left.
    """
    return all(train(job) for job in jobs if job.status != "finished")


def results(jobs: Sequence[Job], target: float | None = None) -> list[tuple[Group, Summary]]:
    """Return the groups of runs with their summaries, in the order of the jobs.

    A group has the runs that differ only in their seed. ``target`` is an accuracy in percent; the summaries then say
    what reaching it took.
    """
    by_path = {job.path.resolve(): job for job in jobs}
    groups = []
    for group in group_runs(find_runs([job.path for job in jobs])):
        job = by_path[group.runs[0].path.resolve()]
        groups.append(replace(group, name=job.name or group.name, differs=job.differs))
    return [(group, summarise(group, target)) for group in groups]


# --- running several at once -----------------------------------------------------------------------

POLL_SECONDS = 0.2
ATTEMPTS = 3
"""Attempts at a run whose process is lost; each continues from the last checkpoint."""
RAY_ATTEMPTS = 10
"""Attempts at a run whose worker or machine is lost."""
PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
_prctl = ctypes.CDLL(None).prctl  # looked up here: between fork and exec little is safe


def run_in_pool(
    jobs: Sequence[Job],
    pool: "Pool",
    stop: StopFlag,
    tell: Callable[[int, int, int, int], None],
    leave: Callable[[Path], None] | None = None,
) -> bool:
    """Run the jobs that are not finished; return False if stopped. If one fails, the others continue.

    ``tell`` is called with the numbers of finished runs, all runs, finished rounds and all rounds. With ``leave``
    several processes share the jobs: each run is locked before it is begun, and ``leave`` is called with a run that
    another process has. Without it such a run counts as failed. Raises `OSError` at the end if runs failed.
    """
    left = deque(job for job in jobs if job.status != "finished")
    under_way: set[Path] = set()
    left_to_others: set[Path] = set()
    failed: dict[Path, Exception] = {}
    try:
        while left or under_way:
            if stop.requested:
                return False
            while left and pool.has_room():
                job = left.popleft()
                if leave is not None and not claim(job.path):
                    left_to_others.add(job.path)
                    leave(job.path)
                elif job.status != "finished":  # another process may have finished it by now
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


def claim(path: Path) -> bool:
    """Lock a run that several processes share, until this process ends; return False if another process has it.

    A run's own lock comes later, once its images are loaded: of a hundred processes that begin at once, most would
    load them in vain.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(Taken):
        return take(path, "claim.lock") >= 0
    return False


def rounds_of(job: Job) -> int:
    """Return the number of rounds done, by the lines of the metrics file, without reading them."""
    try:
        return (job.path / METRICS).read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def _stop_with_parent() -> None:
    """Let the kernel stop this process cleanly when its parent is killed, which can pass on no signal."""
    _prctl(PARENT_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)


class Processes:
    """A pool of ``count`` runs at a time, each in a process of its own on this machine.

    A process runs ``semisfl run`` with its share of the cores, and ends if this process is killed.
    """

    def __init__(self, count: int, device: str = "auto") -> None:
        self._count, self._device = count, device
        self._running: dict[Path, tuple[Job, Popen[bytes], Path]] = {}
        """The job, its process and the file with the process's errors."""
        self._attempts: dict[Path, int] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="semisfl-")

    def has_room(self) -> bool:
        """Return whether another run may start now."""
        return len(self._running) < self._count

    def start(self, job: Job) -> None:
        """Start or continue a run, and count the attempt."""
        self._attempts[job.path] = self._attempts.get(job.path, 0) + 1
        cores = max(1, len(os.sched_getaffinity(0)) // self._count)
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
        """Return the runs that ended since the last call, with their errors: `Taken` if another process has one."""
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
            elif job.status == "finished":
                ended[path] = None
            elif self._attempts[path] < ATTEMPTS:
                self.start(job)
            else:
                ended[path] = OSError(f"its process was ended {ATTEMPTS} times: {problem}")
        return ended

    def stop(self) -> None:
        """End the active runs; they can be continued."""
        for _, process, _ in self._running.values():
            process.terminate()
        for _, process, _ in self._running.values():
            process.wait()
        self._folder.cleanup()


class RayPool:
    """A pool of all runs at once on a Ray cluster: one per GPU or share of it, or one per core without GPUs."""

    def __init__(self, address: str | None, share: int = 1, device: str = "auto") -> None:
        """Connect to the cluster at ``address``, which is HOST:PORT or "auto"; None: start one on this machine.

        ``share`` runs are placed on each GPU. Raises ImportError if Ray is not installed.
        """
        try:
            import ray  # an extra
        except ImportError as error:
            raise ImportError("--engine ray needs Ray: pip install 'semisfl[ray]'") from error
        self._ray, self._device = ray, device
        if not ray.is_initialized():
            dashboard = False if address is None else None
            ray.init(address, log_to_driver=False, include_dashboard=dashboard)
        gpus = 1 / share if ray.cluster_resources().get("GPU", 0) else 0
        remote = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=RAY_ATTEMPTS - 1)
        self._train = remote(train_one)
        self._running: dict[Any, Path] = {}

    def has_room(self) -> bool:
        """Return True: the cluster queues what does not fit yet."""
        return True

    def start(self, job: Job) -> None:
        """Queue a run on the cluster."""
        values = job.config.model_dump(mode="json")
        answer = self._train.remote(values, str(job.path.absolute()), self._device)
        self._running[answer] = job.path

    def ended(self) -> Mapping[Path, Exception | None]:
        waiting = list(self._running)
        done = self._ray.wait(waiting, num_returns=len(waiting), timeout=0)[0] if waiting else []
        return {self._running.pop(answer): self._problem(answer) for answer in done}

    def _problem(self, answer: Any) -> Exception | None:
        """Return the error of a run that ended; None if it reached its end."""
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
    """Start or continue one run, in a worker of a Ray cluster.

    ``values`` are the plain settings, ``path`` is the run's directory, which all machines see.
    """
    job = Job(configs.parse(values), Path(path))
    if job.status != "finished":
        with job.prepare(device=device) as run:
            run.go()


Pool = Processes | RayPool
"""A place that executes runs."""
