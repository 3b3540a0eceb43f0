"""Print results on stdout, and progress and warnings on stderr.

A run must not end because nobody reads its progress: what is written to stderr after its reader left, or while its
disk is full, is lost, and the run goes on. If the reader of stdout leaves, the command ends (`semisfl.cli.main`).
"""

import json
import logging
import os
import shlex
from contextlib import suppress
from typing import IO, Any, cast

from rich.console import Console

from semisfl.files import printable as printable, timestamp


class _Lossy:
    """A stream that drops all text from the first error on: its reader left, or its disk is full."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write ``text`` and return its length, also if it is lost."""
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:
            discard(self._stream)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Progress(Console):
    """The console for stderr. A run does not end because nobody reads its progress."""

    @property  # type: ignore[misc]  # there is no setter
    def file(self) -> IO[str]:
        """The stream that the console writes to."""
        return cast(IO[str], _Lossy(super().file))


# Without markup: names of classes and files may hold brackets.
out = Console(highlight=False, emoji=False, markup=False)
"""The console for stdout: results."""
err = _Progress(stderr=True, highlight=False, emoji=False, markup=False)
"""The console for stderr: progress, warnings and errors."""


def discard(stream: IO[str]) -> None:
    """Send everything that is written to ``stream`` from now on to nowhere."""
    with suppress(OSError), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


class _Warnings(logging.Handler):
    """Prints log messages above the progress bar, not through it."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record of the log with its level."""
        say(record.getMessage(), record.levelname.lower())


_as_json = False


def set_up_logging(log_format: str = "text") -> None:
    """Print warnings of the package's log on stderr.

    Args:
        log_format: text, or json for one JSON object per line, with its time, level and message.
    """
    global _as_json
    _as_json = log_format == "json"
    logger = logging.getLogger("semisfl")
    logger.setLevel(logging.INFO)
    logger.handlers = [_Warnings(logging.WARNING)]
    logger.propagate = False
    # A log that a full disk refuses must not fill the screen with tracebacks.
    logging.raiseExceptions = False


def show_log() -> None:
    """Print also what the log says below warnings: servers and devices run unattended for long."""
    for handler in logging.getLogger("semisfl").handlers:
        handler.setLevel(logging.INFO)


def say(text: str, level: str = "") -> None:
    """Print a line on stderr.

    Args:
        text: the line, or several. Control characters in it are replaced, as it may hold names of files.
        level: a level of logging to print before the text, such as warning or error; empty: none.
    """
    if _as_json:
        line = json.dumps({"time": timestamp(), "level": level or "info", "message": text})
    else:
        text = "\n".join(map(printable, text.split("\n")))
        line = f"{level}: {text}" if level else text
    err.print(line, soft_wrap=True)


def quoted(path: object) -> str:
    """Return a path as a shell takes it, for a command that is suggested."""
    return shlex.quote(str(path))


def shows_bars() -> bool:
    """Return whether stderr is a terminal that a progress bar can be drawn on."""
    return err.is_terminal and not _as_json


def clock(seconds: float) -> str:
    """Return seconds as ``1:02:03``, or ``2:03`` below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
