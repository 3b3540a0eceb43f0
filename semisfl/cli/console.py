"""Print results on stdout, progress and warnings on stderr."""

import codecs
import contextlib
import errno
import io
import json
import logging
import os
import select
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar, cast

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from semisfl.files import printable as printable
from semisfl.files import timestamp

T = TypeVar("T")

NARROW = 70
"""On a terminal of fewer columns all columns of a table shrink, as numbers leave names no room to fold."""
FEW_LETTERS, ENOUGH_LETTERS = 8, 16
"""Letters of a name in one line: with fewer a table is printed wider than the terminal, and then with enough."""
UNKNOWN = "–"
"""Stands in a table for a value that is not known."""


class _Lossy:
    """A stream that drops what cannot be written, because its reader left or its disk is full."""

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
    """The console for stderr. A run does not end because nobody reads its progress."""

    @property  # type: ignore[misc]  # there is no setter
    def file(self) -> IO[str]:
        return cast(IO[str], _Lossy(super().file))


class _Results(Console):
    """The console for stdout."""

    def on_broken_pipe(self) -> None:
        """Raise as `print` does: the command decides what a broken pipe means."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    def print(self, *objects: Any, **options: Any) -> None:
        """Print, with room for every number of a table: a longer line is better than a number cut off."""
        before = self._width
        for table in (one for one in objects if isinstance(one, Table)):
            if NARROW <= self.width < _needed(table, FEW_LETTERS):
                self.width = _needed(table, ENOUGH_LETTERS)
        try:
            super().print(*objects, **options)
        finally:
            self._width = before


def _needed(table: Table, letters: int) -> int:
    """Return the width at which numbers are whole and each line of a text has so many letters."""
    widths = (
        max(cell_len(str(cell)) for cell in (column.header, *column.cells))
        for column in table.columns
    )
    folds = (column.overflow == "fold" for column in table.columns)
    room = (
        min(width, letters) if fold else width for width, fold in zip(widths, folds, strict=True)
    )
    return sum(room) + 2 * len(table.columns)


# Without markup: names of classes and files may hold brackets.
out = _Results(highlight=False, emoji=False, markup=False)
err = _Progress(stderr=True, highlight=False, emoji=False, markup=False)


# --- streams ------------------------------------------------------------------------------------------


def accept_all_letters() -> None:
    """Let stdout write letters that its encoding lacks as escapes, and names of files as their bytes."""
    stdout = sys.stdout
    # Python itself chooses surrogateescape in the locale C, where letters such as ü would be errors.
    if isinstance(stdout, io.TextIOWrapper) and stdout.errors in ("strict", "surrogateescape"):
        codecs.register_error("semisfl", _byte_or_escape)
        stdout.reconfigure(errors="semisfl")


def _byte_or_escape(error: UnicodeError) -> tuple[str | bytes, int]:
    assert isinstance(error, UnicodeEncodeError)
    error.end = error.start + 1
    try:
        return codecs.lookup_error("surrogateescape")(error)
    except UnicodeEncodeError:
        return codecs.lookup_error("backslashreplace")(error)


def discard(stream: IO[str]) -> None:
    """Send everything that is written to ``stream`` from now on to nowhere."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def results_file() -> os.stat_result | None:
    """Return what stdout is now; None if it is not a file, as in a test."""
    try:
        return os.fstat(sys.stdout.fileno())
    except (OSError, ValueError):
        return None


def reader_left(before: os.stat_result | None) -> bool:
    """Return whether nobody reads stdout any more, as after ``| head``; if so, discard the rest.

    ``before`` is what stdout was at the start. Other consoles of rich, such as typer's for its help,
    have replaced stdout themselves by the time they raise.
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
    """Flush stderr, so that Python does not replace the exit code if that fails."""
    if sys.stderr is not None:
        try:
            sys.stderr.flush()
        except (OSError, ValueError):
            discard(sys.stderr)


# --- lines -------------------------------------------------------------------------------------------


class _Warnings(logging.Handler):
    """Print log messages above the progress bar, not through it."""

    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage(), record.levelname.lower())


_as_json = False


def say(text: str, level: str = "") -> None:
    """Print a line on stderr, with its ``level`` if it has one; as JSON with ``--log-format json``."""
    if not _as_json:
        text = "\n".join(map(printable, text.split("\n")))
        line = f"{level}: {text}" if level else text
    else:
        line = json.dumps({"time": timestamp(), "level": level or "info", "message": text})
    err.print(line, soft_wrap=True)


def quoted(path: object) -> str:
    """Return a path as a shell takes it, for a command that is suggested."""
    return shlex.quote(str(path))


def shows_bars() -> bool:
    """Return whether stderr is a terminal that a progress bar can be drawn on."""
    return err.is_terminal and not _as_json


def set_up_logging(log_format: str = "text") -> None:
    global _as_json
    _as_json = log_format == "json"
    logger = logging.getLogger("semisfl")
    logger.setLevel(logging.INFO)
    handler = _Warnings(logging.WARNING)
    logger.handlers = [handler]
    logger.propagate = False
    # A log that a full disk refuses must not fill the screen with tracebacks.
    logging.raiseExceptions = False


# --- tables ------------------------------------------------------------------------------------------


def table(title: str, columns: Sequence[str], *, text: int = 1) -> Table:
    """Return an empty table. The first ``text`` columns hold text, the others numbers."""
    printed = Table(
        title=title or None,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),  # names may be long
        pad_edge=False,
        min_width=len(title),
    )
    for place, column in enumerate(columns):
        if place < text:
            printed.add_column(column, overflow="fold", no_wrap=text == 1 and out.width < NARROW)
        else:
            printed.add_column(column, justify="right", no_wrap=True)
    return printed


def known(value: T | None, show: Callable[[T], str] = str) -> str:
    """Return the cell of a value; `UNKNOWN` for None."""
    return UNKNOWN if value is None else show(value)


# --- files ------------------------------------------------------------------------------------------


def check_file(place: Path, option: str = "--out") -> None:
    """Refuse a file that cannot be written at this place, before anything costly is done."""
    if place.is_dir():
        raise ValueError(f"{option} {place} is a folder; name a file in it")
    another = f"choose another {option}"
    if not place.parent.is_dir():
        raise ValueError(
            f"{option} {place}: there is no folder {place.parent}; make it, or {another}"
        )
    if not os.access(place.parent, os.W_OK):
        raise ValueError(f"{option} {place}: its folder cannot be written to; {another}")


def check_writable(folder: Path) -> None:
    """Refuse a folder that cannot be made or written to, before anything costly is done."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ValueError(f"{there} is no folder that can be written to; choose another --out")


# --- amounts -----------------------------------------------------------------------------------------


def clock(seconds: float) -> str:
    """Return seconds as ``1:02:03``, or ``2:03`` below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
