"""Train runs for the commands: show progress, obey signals, and print how runs ended.

`semisfl.runs.start` prepares a run, for the library and for the commands alike. This module adds what only a command
has: a progress display, a picture of who holds what, and the lines and exit codes at the end. Importing it loads torch,
so commands import it only when they train.
"""

import importlib.util
import json
import logging
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import typer

from semisfl.cli import console, output, progress
from semisfl.cli.signals import SIGNALS, StopSignals
from semisfl.data import holdings
from semisfl.engine.hardware import Hardware
from semisfl.fleet.cluster.ranks import Launch, RankLost, Ranks
from semisfl.runs import compare, report
from semisfl.runs.advice import DIVERGED
from semisfl.runs.compare import Job, Pool
from semisfl.runs.directory import RunDirectory
from semisfl.runs.loop import Result
from semisfl.runs.sinks import Guarded, Sink
from semisfl.runs.start import PreparedRun, serve_rank
from semisfl.settings.config import Config, ConfigError
from semisfl.settings.counts import amount
from semisfl.settings.lookup import title_of
from semisfl.stopping import Stopped


def train(
    prepared: AbstractContextManager[PreparedRun],
    signals: StopSignals,
    *,
    quiet: bool,
    title: str | None = None,
) -> Result:
    """Train a run that `begin`, `go_on` or `Job.prepare` prepares in a directory, and return its result.

    Args:
        prepared: the context manager of the run; it is entered here, and left when the run has ended.
        signals: those of the command; their flag must be the ``stop`` of the run.
        quiet: show no progress.
        title: the name of the run in its progress; default: its method's title.
    """
    signals.flag.check()
    with prepared as run:
        assert run.directory is not None
        picture, held = run.directory.path / "partition.png", run.experiment.holdings
        if not picture.exists() and importlib.util.find_spec("matplotlib") is not None:
            output.draw(picture, lambda file: holdings.draw(held, file))
        return finish(run, signals, quiet=quiet, title=title)


def finish(
    run: PreparedRun,
    signals: StopSignals,
    *,
    quiet: bool = False,
    title: str | None = None,
    sinks: Sequence[Sink] = (),
    busy: Callable[[], bool] = lambda: True,
) -> Result:
    """Train the remaining rounds of a run and return its result.

    Args:
        run: a prepared run that has a directory.
        signals: those of the command.
        quiet: show no progress.
        title: the name of the run in its progress; default: its method.
        sinks: get the metrics of each round too. One that fails is not called again.
        busy: returns whether a round is under way, for the line that answers a signal; a server may only be waiting.

    Raises `OSError` if the end of the run could not be saved, for example on a full disk.
    """
    directory = run.directory
    assert directory is not None
    with signals.running(busy):
        shown = (
            [] if quiet else [progress.RunProgress(title or title_of(run.experiment.config.method))]
        )
        result = run.go([*shown, *map(Guarded, sinks)])
    if directory.unsaved:
        raise OSError(
            f"the run's end could not be saved: {', '.join(directory.unsaved)} in "
            f"{directory.path}; make room, then --resume {console.quoted(directory.path)} repeats what is missing"
        )
    return result


def free_directory(stem: str) -> Path:
    """Return a new path ``runs/<stem>-<time>``; a number is added if it exists already.

    Args:
        stem: the beginning of the directory's name: preset, method and seed.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    path = Path("runs") / f"{stem}-{stamp}"
    number = 2
    while path.exists():
        path = Path("runs") / f"{stem}-{stamp}-{number}"
        number += 1
    return path


# --- how runs ended -----------------------------------------------------------------------------------


def print_result(result: Result, again: str, *, as_json: bool = False) -> None:
    """Print the result of a run that has a directory, and how to continue it.

    Args:
        result: what the run returned.
        again: the command that continues the run.
        as_json: print one JSON object instead of sentences.

    Raises `typer.Exit` with `DIVERGED` if the run diverged.
    """
    assert result.directory is not None
    config, done = RunDirectory.open(result.directory).config(), len(result.rounds)
    judged_on = report.judged_on(config.model_dump())
    sent = result.rounds[-1]["bytes_total"] if done else 0
    seconds = sum(one["seconds"] for one in result.rounds)
    tested = any("accuracy" in one for one in result.rounds)
    if as_json:
        values = {
            "directory": str(result.directory),
            "method": config.method,
            "seed": config.seed,
            "rounds": done,
            "stopped": result.stopped,
            "stopped_by": result.stopped_by,
            "diverged": result.diverged,
            "warnings": result.warnings,
            "accuracy": result.accuracy if tested else None,
            "best": result.best if tested else None,
            "judged_on": judged_on,
            "test_accuracy": result.test_accuracy,
            "bytes": sent,
            "seconds": seconds,
        }
        print(json.dumps(values))
    else:
        if tested:
            at_the_end = result.test_accuracy
            test = "" if at_the_end is None else f", test accuracy {at_the_end:.1f} %"
            print(
                f"{title_of(config.method)}: {judged_on} accuracy {result.accuracy:.1f} % after the last round ({done} of "
                f"{config.rounds}; best {result.best:.1f} %){test}, {amount(sent)} sent, "
                f"{console.clock(seconds)} min"
            )
        if result.stopped:
            print(f"stopped; continue with: {again}")
        elif result.stopped_by and done < config.rounds:
            limit = f"stop.{result.stopped_by}"
            value = getattr(config.stop, result.stopped_by)
            print(
                f"ended as {limit} = {value:g} is met; go on beyond it with: {again} --set {limit}=none"
            )
        if not result.stopped:
            place = console.quoted(result.directory)
            print(f"saved in {result.directory}; draw it with: semisfl report {place}")
    leave_if_diverged([result.diverged])


def leave_if_diverged(diverged: Sequence[bool]) -> None:
    """End the command with `DIVERGED` if one of its runs diverged: its losses or weights are NaN or Inf.

    Args:
        diverged: for each run of the command, whether it diverged.
    """
    if not any(diverged):
        return
    line = "the run diverged: its weights are of no use; start again with the change that its run.log names"
    if len(diverged) > 1:
        line = (
            f"{sum(diverged)} of {len(diverged)} runs diverged, so their means say nothing; "
            "their run.log names the setting to change"
        )
    console.say(line, "error")
    raise typer.Exit(DIVERGED)


# --- several runs -------------------------------------------------------------------------------------


def run_all(
    jobs: Sequence[Job],
    signals: StopSignals,
    *,
    engine: str | None,
    at_once: int,
    device: str,
    quiet: bool,
    share: bool = False,
    apart: bool = False,
) -> bool:
    """Train the unfinished runs of ``jobs``; return False if a signal stopped them.

    Args:
        jobs: runs with their directories; finished ones are skipped.
        signals: those of the command.
        engine: the option ``--engine``: None, or ray with an address.
        at_once: the option ``--jobs``: the number of runs at a time.
        device: the option ``--device``.
        quiet: show no progress.
        share: skip runs that another process is training now, instead of failing.
        apart: give each run a process of its own also if it is one at a time; one that fails ends no other.
    """

    def skip(path: Path) -> None:
        """Say that another process has a run."""
        if not quiet:
            console.say(f"{path} is skipped: another process is training it")

    def train_here(job: Job) -> bool:
        """Train a run in this process; return whether it reached its end."""
        if share and not compare.claim(job.path):
            skip(job.path)
            return True
        title = job.path.name  # a method, what is swept and a seed, or a cell of the paper
        prepared = job.prepare(device=device, stop=signals.flag)
        return not train(prepared, signals, quiet=quiet, title=title).stopped

    if pool := pool_for(engine, at_once, device, apart):
        with progress.many_runs(quiet) as tell, signals.running():
            return compare.run_in_pool(jobs, pool(), signals.flag, tell, skip if share else None)
    try:
        return compare.run_in_turn(jobs, train_here)
    except Stopped:  # before the first round of one of them
        return False


def pool_for(
    engine: str | None, count: int, device: str, apart: bool = False
) -> Callable[[], Pool] | None:
    """Return a function that makes the pool of runs that ``--engine`` and ``--jobs`` ask for.

    None means: train one run after another in this process, which ``apart`` forbids. Raises `ConfigError` for an engine that is not known.
    """
    kind, _, address = (engine or "").partition("=")
    if kind == "ray":
        return lambda: compare.RayPool(address or None, count, device)
    if kind:
        raise ConfigError(f"--engine {engine!r} is not known; use ray or ray=ADDRESS")
    return (lambda: compare.Processes(count, device)) if count > 1 or apart else None


# --- the ranks of torchrun ----------------------------------------------------------------------------


def lead(launch: Launch, config: Config, out: Path | None) -> tuple[Config, Path | None]:
    """Return rank 0's configuration, and the run to continue if torchrun may have started it before.

    Args:
        launch: what torchrun passed to this process.
        config: the configuration of a run; its simulated clients are spread over the ranks.
        out: the option ``--out``. It is needed if torchrun may restart the ranks, as it names the run to continue.
    """
    if config.fleet.kind == "local":
        config = config.in_fleet("cluster")
    if not launch.max_restarts:
        return config, None
    if out is None:
        raise ConfigError(
            "torchrun --max-restarts needs --out DIR, where a restarted run continues"
        )
    # Not by torchrun's count of restarts: with several machines each has its own.
    return config, out if Job(config, out).status != "new" else None


def take_part(launch: Launch, device: str, signals: StopSignals) -> None:
    """Work as a rank other than 0, which writes nothing and prints only its failure. Rank 0 sends the settings.

    Args:
        launch: what torchrun passed to this process.
        device: the option ``--device``.
        signals: those of the command.

    Raises `typer.Exit`: 0 after a signal, 1 if another rank is gone or this one failed.
    """
    logging.getLogger("semisfl").setLevel(logging.ERROR)
    signals.quiet = True
    try:
        for number in SIGNALS:  # until all ranks have met: Python handles none during that wait
            signal.signal(number, signal.SIG_DFL)
        device = launch.device(device)
        ranks = Ranks.join(Hardware(device).device)
        with signals, signals.running():
            serve_rank(ranks, device, signals.flag)
    except (Stopped, RankLost) as end:
        # The lost rank, or torchrun, prints the reason.
        raise typer.Exit(int(isinstance(end, RankLost))) from None
    except Exception as error:
        console.say(f"rank {launch.rank}: {type(error).__name__}: {error}", "error")
        raise typer.Exit(1) from error
