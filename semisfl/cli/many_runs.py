"""Train several runs for a command: one after another here, or several at once in a pool."""

from collections.abc import Callable, Sequence
from pathlib import Path

from semisfl.cli import console, one_run, progress
from semisfl.cli.signals import StopSignals
from semisfl.runs import compare, pools
from semisfl.runs.compare import Job
from semisfl.runs.lock import Taken
from semisfl.runs.pools import Pool
from semisfl.settings.config import ConfigError
from semisfl.stopping import Stopped


def run_all(
    jobs: Sequence[Job],
    *,
    engine: str | None,
    at_once: int,
    device: str,
    quiet: bool,
    share: bool = False,
) -> bool:
    """Train the unfinished runs of ``jobs``; return False if a signal stopped them.

    With ``share``, runs that another process is training now are skipped.
    """

    def leave(path: Path) -> None:
        if not quiet:
            console.say(f"{path} is skipped: another process is training it")

    def train(job: Job) -> bool:
        try:
            return _train(job, signals, device, quiet)
        except Taken:
            if not share:
                raise
            leave(job.path)
            return True

    pool = pool_for(engine, at_once, device)
    with StopSignals() as signals:
        if pool is not None:
            with progress.many_runs(quiet) as tell:
                made = pool()
                with signals.running():
                    return pools.run_in_pool(
                        jobs, made, signals.flag, tell, leave if share else None
                    )
        try:
            return compare.run_in_turn(jobs, train)
        except Stopped:  # before the first round of one of them
            return False


def pool_for(engine: str | None, count: int, device: str) -> Callable[[], Pool] | None:
    """Return the pool that ``--engine`` and ``--jobs`` ask for; None: one run after another, here."""
    kind, _, address = (engine or "").partition("=")
    if kind == "ray":
        # Imported when asked for: it is an extra.
        from semisfl.runs.ray_pool import RayPool

        return lambda: RayPool(address or None, count, device)
    if kind:
        raise ConfigError(f"--engine {engine!r} is not known; use ray or ray=ADDRESS")
    return (lambda: pools.Processes(count, device)) if count > 1 else None


def _train(job: Job, signals: StopSignals, device: str, quiet: bool) -> bool:
    """Train a run here; return whether it reached its end."""
    title = job.path.name  # a method, what is swept and a seed, or a cell of the paper
    if job.status == "unfinished":
        result = one_run.resume(
            job.path, signals, settings=job.changed, device=device, quiet=quiet, title=title
        )
    else:
        result = one_run.start(
            job.config, job.path, signals, device=device, quiet=quiet, title=title
        )
    return not result.stopped
