"""What a person sees: results on stdout, progress and warnings on stderr."""

import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)
Observer = Callable[[dict[str, Any]], None]


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


@contextmanager
def progress(title: str, first: int, rounds: int, quiet: bool) -> Iterator[Observer]:
    """An observer of rounds: a bar on a terminal, lines elsewhere, nothing if ``quiet``."""
    if quiet:
        yield lambda row: None
    elif err.is_terminal:
        with _bar(title, first, rounds) as observe:
            yield observe
    else:
        yield _lines(title, first, rounds)


@contextmanager
def _bar(title: str, first: int, rounds: int) -> Iterator[Observer]:
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
    with Progress(*columns, console=err, speed_estimate_period=600, expand=True) as bar:
        task = bar.add_task(title, total=rounds, completed=first, accuracy=accuracy_text(None))

        def observe(row: dict[str, Any]) -> None:
            bar.update(task, completed=row["round"] + 1)
            if "accuracy" in row:
                bar.update(task, accuracy=accuracy_text(row["accuracy"]))

        yield observe


def _lines(title: str, first: int, rounds: int) -> Observer:
    spent = 0.0
    known: float | None = None

    def observe(row: dict[str, Any]) -> None:
        nonlocal spent, known
        spent += row["seconds"]
        known = row.get("accuracy", known)
        done = row["round"] + 1
        left = spent / (done - first) * (rounds - done)
        say(
            f"{title}: round {done}/{rounds}  {accuracy_text(known)}  "
            f"{row['seconds']:.1f} s  left {clock(left)}"
        )
        sys.stderr.flush()

    return observe


def can_draw() -> bool:
    """Whether matplotlib is installed, which is an extra; said where it is not."""
    if importlib.util.find_spec("matplotlib") is not None:
        return True
    say("warning: no picture, as matplotlib is not installed; pip install 'semisfl[plots]'")
    return False


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def amount(size: float) -> str:
    """Bytes for a person."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"
