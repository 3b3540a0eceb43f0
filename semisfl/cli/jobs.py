"""Several runs from the command line, one after another or in processes side by side."""

import subprocess
import sys
from collections.abc import Callable, Sequence

from semisfl.cli import console, training
from semisfl.cli.signals import StopSignals
from semisfl.config import ConfigError
from semisfl.runs import compare, pools
from semisfl.runs.compare import Job
from semisfl.runs.directory import Taken
from semisfl.runs.pools import Pool
from semisfl.stopping import Stopped

POLL_SECONDS = 0.2


def carry_out(jobs: Sequence[Job], *, device: str, quiet: bool, share: bool = False) -> bool:
    """Do what is left of ``jobs``; False: stopped by a signal.

    With ``share``, what another process works on at this moment is left to it.
    """
    with StopSignals() as signals:
        train = _trainer(signals, device, quiet)
        try:
            return compare.carry_out(jobs, _leaving_taken(train, quiet) if share else train)
        except Stopped:  # before the first round of one of them
            return False


def at_once(jobs: Sequence[Job], pool: Callable[[], Pool], quiet: bool) -> bool:
    """Do what is left of ``jobs`` in a pool; False: stopped by a signal."""
    with StopSignals() as signals, console.many_runs(quiet) as tell:
        made = pool()
        with signals.running():
            return pools.carry_out(jobs, made, signals.flag, tell)


def pool_for(engine: str | None, count: int, device: str) -> Callable[[], Pool] | None:
    """What ``--engine`` and ``--jobs`` ask for; None: one run after another, in this process."""
    kind, _, address = (engine or "").partition("=")
    if kind == "ray":
        # Imported when asked for: it is an extra.
        from semisfl.runs.ray_pool import RayPool

        return lambda: RayPool(address or None, count, device)
    if kind:
        raise ConfigError(f"--engine {engine!r} is not known; use ray or ray=ADDRESS")
    return (lambda: pools.Processes(count, device)) if count > 1 else None


def _trainer(signals: StopSignals, device: str, quiet: bool) -> Callable[[Job], bool]:
    def train(job: Job) -> bool:
        title = job.path.name  # a method, what is swept and a seed, or a cell of the paper
        if job.status == "unfinished":
            result = training.carry_on(
                job.path, signals, settings=job.changed, device=device, quiet=quiet, title=title
            )
        else:
            result = training.start(
                job.config, job.path, signals, device=device, quiet=quiet, title=title
            )
        return not result.stopped

    return train


def _leaving_taken(train: Callable[[Job], bool], quiet: bool) -> Callable[[Job], bool]:
    def shared(job: Job) -> bool:
        try:
            return train(job)
        except Taken:
            if not quiet:
                console.say(f"{job.path} is left to another process, which works on it")
            return True

    return shared


def in_processes(words: Sequence[str], count: int) -> bool:
    """``semisfl WORDS`` in ``count`` processes at once; False: stopped by a signal.

    They share work through the locks of run directories. A signal is passed on to each of them.
    """
    with StopSignals() as signals:
        # A session of their own: Ctrl-C comes to this process alone, which tells them once.
        command = [sys.executable, "-m", "semisfl", *words]
        workers = [subprocess.Popen(command, start_new_session=True) for _ in range(count)]
        try:
            with signals.running():
                _wait(workers, signals)
        finally:
            for worker in workers:
                if worker.poll() is None:
                    worker.terminate()
            codes = [worker.wait() for worker in workers]
    if signals.flag.requested:
        return False
    if failed := [code for code in codes if code]:
        raise OSError(
            f"{len(failed)} of {count} processes failed (exit code {failed[0]}); their errors are above"
        )
    return True


def _wait(workers: Sequence["subprocess.Popen[bytes]"], signals: StopSignals) -> None:
    told = False
    for worker in workers:
        while worker.poll() is None:
            if signals.flag.requested and not told:
                told = True
                for other in workers:
                    other.terminate()
            try:
                worker.wait(POLL_SECONDS)
            except subprocess.TimeoutExpired:
                continue
