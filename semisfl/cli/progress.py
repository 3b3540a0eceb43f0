"""Show on stderr how far a run, or several runs, have come.

On a terminal there is a bar of rich. Elsewhere, in a log or a pipe, there is a line per round or per finished run. With
``--quiet`` nothing is shown.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from semisfl.cli import console, output
from semisfl.metrics import RoundMetrics
from semisfl.runs.sinks import RunInfo


class RunProgress:
    """A sink that shows the rounds of a run, its latest accuracy and the time left: a bar on a terminal, elsewhere lines.

    The time left is that of the rounds so far, from where the run was begun or resumed, without waits for devices.
    """

    def __init__(self, title: str) -> None:
        """Take ``title``, the name of the run in its progress."""
        self._title = title
        self._accuracy = "accuracy   –   "
        self._spent = 0.0
        """Seconds of the rounds so far, without waits for devices."""
        self._bar = _bar(
            TextColumn("round"),
            MofNCompleteColumn(),
            TextColumn("{task.fields[accuracy]}"),
            TimeElapsedColumn(),
            TextColumn("left {task.fields[left]}"),
        )

    def start(self, run: RunInfo) -> None:
        """Begin to show a run, from its first round to do: 0, or after a resume the first that is left."""
        self._first, self._rounds = run.first, run.config.rounds
        self._bar.start()
        self._task = self._bar.add_task(
            self._title,
            total=self._rounds,
            completed=self._first,
            accuracy=self._accuracy,
            left=output.UNKNOWN,
        )

    def write(self, metrics: RoundMetrics) -> None:
        """Show one more round."""
        seconds, done = metrics.seconds or 0.0, metrics.round + 1
        self._spent += seconds
        left = console.clock(self._spent / (done - self._first) * (self._rounds - done))
        if metrics.accuracy is not None:
            self._accuracy = f"accuracy {metrics.accuracy:5.1f} %"
        self._bar.update(self._task, completed=done, accuracy=self._accuracy, left=left)
        if self._bar.disable:
            console.say(
                f"{self._title}: round {done}/{self._rounds}  {self._accuracy}  {seconds:.1f} s  left {left}"
            )

    def close(self) -> None:
        """End the bar; its last state stays on the terminal."""
        self._bar.stop()


@contextmanager
def many_runs(quiet: bool) -> Iterator[Callable[[int, int, int, int], None]]:
    """Yield a function that shows how far several runs have come together.

    It takes four counts: finished runs, all runs, finished rounds of all runs, and all rounds.
    """
    before = -1
    with _bar(TextColumn("rounds"), MofNCompleteColumn(), TimeElapsedColumn(), quiet=quiet) as bar:
        task = bar.add_task("")

        def tell(runs: int, of_runs: int, rounds: int, of_rounds: int) -> None:
            nonlocal before
            share = f"{runs} of {of_runs} runs"
            bar.update(task, description=share, completed=rounds, total=of_rounds)
            if bar.disable and not quiet and runs != before:
                console.say(f"{share}, {rounds} of {of_rounds} rounds")
            before = runs

        yield tell


def _bar(*columns: ProgressColumn, quiet: bool = False) -> Progress:
    """Return a progress bar on stderr, which draws nothing where there is no terminal.

    Args:
        columns: what the bar shows behind its description and the bar itself.
        quiet: draw nothing on a terminal either.
    """
    first = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=None))
    disable = quiet or not console.shows_bars()
    return Progress(*first, *columns, console=console.err, expand=True, disable=disable)
