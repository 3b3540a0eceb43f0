"""Show on stderr how far a run, or several runs, have come."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

from semisfl.cli import console, output
from semisfl.metrics import RoundMetrics
from semisfl.runs.sinks import RunInfo, Sink


def _accuracy_text(accuracy: float | None) -> str:
    return "accuracy   –   " if accuracy is None else f"accuracy {accuracy:5.1f} %"


def progress(title: str, quiet: bool) -> list[Sink]:
    """Return a progress bar on a terminal, progress lines elsewhere, and nothing if ``quiet``."""
    if quiet:
        return []
    return [ProgressBar(title) if console.shows_bars() else ProgressLines(title)]


class _TimeLeft:
    """Estimate the time left from the rounds so far, which do not count waits for devices."""

    def __init__(self, run: RunInfo) -> None:
        self._first, self._rounds, self._spent = run.first, run.config.rounds, 0.0

    def after(self, metrics: RoundMetrics) -> float:
        """Count one more round and return the seconds that the others will take."""
        self._spent += metrics.seconds or 0.0
        done = metrics.round + 1
        return self._spent / (done - self._first) * (self._rounds - done)


class ProgressBar:
    """One bar for a run, with its latest accuracy and the time left."""

    def __init__(self, title: str) -> None:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            TextColumn("round"),
            MofNCompleteColumn(),
            TextColumn("{task.fields[accuracy]}"),
            TimeElapsedColumn(),
            TextColumn("left {task.fields[left]}"),
        )
        self._title = title
        self._bar = Progress(*columns, console=console.err, expand=True)

    def start(self, run: RunInfo) -> None:
        self._left = _TimeLeft(run)
        self._bar.start()
        self._task = self._bar.add_task(
            self._title,
            total=run.config.rounds,
            completed=run.first,
            accuracy=_accuracy_text(None),
            left=output.UNKNOWN,
        )

    def write(self, metrics: RoundMetrics) -> None:
        left = console.clock(self._left.after(metrics))
        self._bar.update(self._task, completed=metrics.round + 1, left=left)
        if metrics.accuracy is not None:
            self._bar.update(self._task, accuracy=_accuracy_text(metrics.accuracy))

    def close(self) -> None:
        self._bar.stop()


class ProgressLines:
    """One line per round, for logs and pipes."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._accuracy: float | None = None

    def start(self, run: RunInfo) -> None:
        self._left, self._rounds = _TimeLeft(run), run.config.rounds

    def write(self, metrics: RoundMetrics) -> None:
        seconds, left = metrics.seconds or 0.0, self._left.after(metrics)
        self._accuracy = self._accuracy if metrics.accuracy is None else metrics.accuracy
        console.say(
            f"{self._title}: round {metrics.round + 1}/{self._rounds}  {_accuracy_text(self._accuracy)}  "
            f"{seconds:.1f} s  left {console.clock(left)}"
        )
        console.err.file.flush()

    def close(self) -> None: ...


@contextmanager
def many_runs(quiet: bool) -> Iterator[Callable[[int, int, int, int], None]]:
    """Yield a function that shows how far several runs are: runs done, all runs, rounds done, all rounds."""
    if quiet:
        yield lambda *done: None
        return
    if not console.shows_bars():
        last = [-1]

        def line(runs: int, of_runs: int, rounds: int, of_rounds: int) -> None:
            if runs != last[0]:
                last[0] = runs
                console.say(f"{runs} of {of_runs} runs, {rounds} of {of_rounds} rounds")

        yield line
        return
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), TextColumn("rounds"))
    with Progress(*columns, MofNCompleteColumn(), TimeElapsedColumn(), console=console.err) as bar:
        task = bar.add_task("")
        yield lambda runs, of_runs, rounds, of_rounds: bar.update(
            task, description=f"{runs} of {of_runs} runs", completed=rounds, total=of_rounds
        )
