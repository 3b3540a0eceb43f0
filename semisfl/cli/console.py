"""What a person sees: results on stdout, progress and warnings on stderr."""

import contextlib
import errno
import importlib.util
import logging
import os
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from semisfl.metrics import RoundMetrics
from semisfl.runs.sinks import RunInfo, Sink


class _Lossy:
    """A stream whose reader may leave and whose disk may be full: what it refuses is lost, and no more."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, call: Callable[[], object]) -> None:
        try:
            call()
        except BrokenPipeError:
            discard(self._stream)  # for good: nobody will read there again
        except OSError:
            pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Progress(Console):
    """A run does not end because nobody reads how far it is."""

    @property  # type: ignore[misc]  # nobody sets another
    def file(self) -> IO[str]:
        return cast(IO[str], _Lossy(super().file))


def discard(stream: IO[str]) -> None:
    """From now on, what is written there goes nowhere."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


class _Results(Console):
    def on_broken_pipe(self) -> None:
        """As `print`: the command decides what that means."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def results_file() -> os.stat_result | None:
    """What stdout is now; None where it is no file, as in a test."""
    try:
        return os.fstat(sys.stdout.fileno())
    except (OSError, ValueError):
        return None


def reader_left(before: os.stat_result | None) -> bool:
    """Whether nobody reads the results any more, as after ``| head``; then the rest goes nowhere.

    ``before``: what stdout was. Consoles of rich that are not ours, as typer's for its help, have
    put it away themselves when they come to tell.
    """
    now = results_file()
    if before is None or now is None:
        return False
    if not os.path.samestat(before, now):
        return True
    watched = select.poll()
    watched.register(sys.stdout.fileno(), 0)
    left = any(event & select.POLLERR for _, event in watched.poll(0))
    if left:
        discard(sys.stdout)
    return left


def end() -> None:
    """What could not be written is no reason for Python to end a command with a status of its own."""
    if sys.stderr is not None:
        try:
            sys.stderr.flush()
        except (OSError, ValueError):
            discard(sys.stderr)


out = _Results(highlight=False, emoji=False)
err = _Progress(stderr=True, highlight=False, emoji=False)

PICTURES = (".png", ".svg", ".pdf", ".jpg", ".jpeg")


class _Warnings(logging.Handler):
    """Above the progress bar, not through it."""

    def emit(self, record: logging.LogRecord) -> None:
        say(f"{record.levelname.lower()}: {record.getMessage()}")


def say(text: str) -> None:
    """A line on stderr."""
    err.print(text, markup=False, soft_wrap=True)


def set_up_logging() -> None:
    logger = logging.getLogger("semisfl")
    logger.setLevel(logging.INFO)
    handler = _Warnings(logging.WARNING)
    logger.handlers = [handler]
    logger.propagate = False
    # A log that a full disk refuses must not fill the screen with tracebacks.
    logging.raiseExceptions = False


def accuracy_text(accuracy: float | None) -> str:
    return "accuracy   –   " if accuracy is None else f"accuracy {accuracy:5.1f} %"


def progress(title: str, quiet: bool) -> list[Sink]:
    """A bar on a terminal, lines elsewhere, nothing if ``quiet``."""
    if quiet:
        return []
    return [ProgressBar(title) if err.is_terminal else ProgressLines(title)]


class ProgressBar:
    def __init__(self, title: str) -> None:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            TextColumn("round"),
            MofNCompleteColumn(),
            TextColumn("{task.fields[accuracy]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self._title = title
        self._bar = Progress(*columns, console=err, speed_estimate_period=600, expand=True)

    def start(self, run: RunInfo) -> None:
        self._bar.start()
        self._task = self._bar.add_task(
            self._title,
            total=run.config.rounds,
            completed=run.first,
            accuracy=accuracy_text(None),
        )

    def write(self, metrics: RoundMetrics) -> None:
        self._bar.update(self._task, completed=metrics.round + 1)
        if metrics.accuracy is not None:
            self._bar.update(self._task, accuracy=accuracy_text(metrics.accuracy))

    def close(self) -> None:
        self._bar.stop()


class ProgressLines:
    def __init__(self, title: str) -> None:
        self._title = title
        self._spent = 0.0
        self._accuracy: float | None = None

    def start(self, run: RunInfo) -> None:
        self._first, self._rounds = run.first, run.config.rounds

    def write(self, metrics: RoundMetrics) -> None:
        seconds = metrics.seconds or 0.0
        self._spent += seconds
        self._accuracy = self._accuracy if metrics.accuracy is None else metrics.accuracy
        done = metrics.round + 1
        left = self._spent / (done - self._first) * (self._rounds - done)
        say(
            f"{self._title}: round {done}/{self._rounds}  {accuracy_text(self._accuracy)}  "
            f"{seconds:.1f} s  left {clock(left)}"
        )
        err.file.flush()

    def close(self) -> None: ...


@contextmanager
def many_runs(quiet: bool) -> Iterator[Callable[[int, int, int, int], None]]:
    """How far several runs are: call with the runs and rounds done, and of how many."""
    if quiet:
        yield lambda *done: None
        return
    if not err.is_terminal:
        last = [-1]

        def line(runs: int, of_runs: int, rounds: int, of_rounds: int) -> None:
            if runs != last[0]:
                last[0] = runs
                say(f"{runs} of {of_runs} runs, {rounds} of {of_rounds} rounds")

        yield line
        return
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), TextColumn("rounds"))
    with Progress(*columns, MofNCompleteColumn(), TimeElapsedColumn(), console=err) as bar:
        task = bar.add_task("")
        yield lambda runs, of_runs, rounds, of_rounds: bar.update(
            task, description=f"{runs} of {of_runs} runs", completed=rounds, total=of_rounds
        )


def is_narrow() -> bool:
    """Whether a table's numbers leave its names no room to fold: then all columns give some of theirs."""
    return out.width < 70


def can_draw() -> bool:
    """Whether matplotlib is installed, which is an extra; said where it is not."""
    if importlib.util.find_spec("matplotlib") is not None:
        return True
    say("warning: no picture, as matplotlib is not installed; pip install 'semisfl[plots]'")
    return False


def picture_at(place: Path) -> Path | None:
    """Where a picture is to be drawn, as PNG unless its name says otherwise; None: it cannot be."""
    if not can_draw():
        return None
    return place if place.suffix in PICTURES else place.with_name(f"{place.name}.png")


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def amount(size: float) -> str:
    """Bytes for a person."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 999.5 or unit == "TB":
            break
        size /= 1000
    whole = unit == "B" or size >= 99.95
    return f"{size:.0f} {unit}" if whole else f"{size:.3g} {unit}"
