"""Train one run for a command: start or continue it, show progress, obey signals."""

import importlib.util
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import typer

from semisfl.cli import console, progress
from semisfl.cli.signals import StopSignals
from semisfl.data import holdings
from semisfl.data.holdings import Holdings
from semisfl.runs import grouping
from semisfl.runs import start as runs
from semisfl.runs.advice import DIVERGED
from semisfl.runs.result import Result
from semisfl.runs.sinks import Guarded, Sink
from semisfl.settings.config import Config


def start(
    config: Config,
    out: Path,
    signals: StopSignals,
    *,
    device: str,
    quiet: bool,
    title: str | None = None,
) -> Result:
    """Train a new run in ``out``. If it cannot start, ``out`` is not changed."""
    with runs.begin(config, out=out, device=device, stop=signals.flag) as run:
        _picture(run.experiment.holdings, out / "partition.png")
        return rounds(run, signals, quiet=quiet, title=title)


def resume(
    path: Path,
    signals: StopSignals,
    *,
    settings: Sequence[str],
    cluster: bool = False,
    device: str,
    quiet: bool,
    title: str | None = None,
) -> Result:
    """Continue the run in a directory from its latest checkpoint, or from the checkpoint named."""
    with runs.go_on(
        path, settings=settings, cluster=cluster, device=device, stop=signals.flag
    ) as run:
        return rounds(run, signals, quiet=quiet, title=title)


def rounds(
    run: runs.PreparedRun,
    signals: StopSignals,
    *,
    quiet: bool = False,
    title: str | None = None,
    sinks: Sequence[Sink] = (),
    busy: Callable[[], bool] = lambda: True,
) -> Result:
    """Train the rounds of a run; raise if its end could not be saved.

    ``busy`` returns whether a round is under way, for the line that answers a signal.
    """
    directory = run.directory
    assert directory is not None
    with signals.running(busy):
        bars = progress.progress(title or run.experiment.config.method, quiet)
        result = run.go([*bars, *map(Guarded, sinks)])
    if directory.unsaved:
        raise OSError(
            f"the run's end could not be saved: {', '.join(directory.unsaved)} in "
            f"{directory.path}; make room, then --resume {console.quoted(directory.path)} repeats what is missing"
        )
    return result


def leave_if_diverged(result: Result) -> None:
    """End the command with `DIVERGED` if the run's losses or weights left all bounds."""
    if result.diverged:
        console.say(
            "the run diverged: its weights are of no use; start again with the change that its run.log names",
            "error",
        )
        raise typer.Exit(DIVERGED)


def leave_if_any_diverged(trained: Sequence[grouping.Run]) -> None:
    """End the command with `DIVERGED` if one of several runs did; the remarks below the table name it."""
    if bad := sum(run.diverged for run in trained):
        console.say(
            f"{bad} of {len(trained)} runs diverged, so their means say nothing; their run.log names the setting to change",
            "error",
        )
        raise typer.Exit(DIVERGED)


def judged(config: Config) -> str:
    """Return the name of a run's accuracy."""
    return f"{grouping.judged_on(config.model_dump())} accuracy"


def at_the_end(result: Result) -> str:
    """Return the test accuracy if rounds were judged on validation images; else an empty text."""
    tested = result.test_accuracy
    return "" if tested is None else f", test accuracy {tested:.1f} %"


def how_it_ended(result: Result, config: Config, resume: str) -> str | None:
    """Return why a run ended early and how to continue it; None if it reached its last round."""
    if result.stopped:
        return f"stopped; continue with: {resume}"
    if result.stopped_by and len(result.rounds) < config.rounds:
        limit = f"stop.{result.stopped_by}"
        value = getattr(config.stop, result.stopped_by)
        return f"ended as {limit} = {value:g} is met; go on beyond it with: {resume} --set {limit}=none"
    return None


def _picture(held: Holdings, path: Path) -> None:
    """Draw who holds what if matplotlib is installed; a failure is only a warning."""
    if importlib.util.find_spec("matplotlib") is None:
        return
    try:
        holdings.draw(held, path)
    except OSError as error:
        console.say(f"cannot write {path}: {error.strerror or error}", "warning")


def free_directory(stem: str) -> Path:
    """Return a new path ``runs/<stem>-<time>``."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    path = Path("runs") / f"{stem}-{stamp}"
    number = 2
    while path.exists():
        path = Path("runs") / f"{stem}-{stamp}-{number}"
        number += 1
    return path
