"""Ctrl-C and SIGTERM, from a command's first moment to its last.

Loads nothing large: it is there before torch is.
"""

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any

from semisfl.cli.renamed import COMMANDS
from semisfl.stopping import StopFlag

SIGNALS = (signal.SIGINT, signal.SIGTERM)
LONG = {"run", "compare", "poisoning", "reproduce", "serve", "join", "demo-network", "serve-model"}
"""Commands that a signal ends cleanly; it interrupts the others."""

_early = StopFlag()


def note_early(words: Sequence[str]) -> None:
    """Until `StopSignals` takes over, a signal is only noted: in the middle of an import an exception
    could be swallowed, or leave a module half made."""
    command = next((word for word in words if not word.startswith("-")), "")
    if COMMANDS.get(command, command) in LONG:
        for number in SIGNALS:
            signal.signal(number, lambda *_: _early.request())


def ignore() -> None:
    """The command is over: while Python shuts down, a signal would turn its success into a failure."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def end_at_once() -> None:
    """From now on a signal ends this process, as one did that came earlier."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    _early.check()


@contextmanager
def noted(flag: StopFlag) -> Iterator[None]:
    """Inside, the first signal sets ``flag``; a second one ends this process."""

    def handle(number: int, frame: FrameType | None) -> None:
        flag.request()
        signal.signal(number, signal.SIG_DFL)

    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class StopSignals:
    """A signal before a run's first round ends the command at once, as nothing is lost by that.

    Later the first one lets the run finish its iteration, and after the last one what is left to
    say; a second one ends it at once.
    """

    def __init__(self) -> None:
        self.flag = StopFlag()
        self._began = self._running = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopSignals":
        self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        _early.check()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, there is something to finish, and it looks at ``flag``."""
        self._began = self._running = True
        try:
            self.flag.check()
            yield
        finally:
            self._running = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.flag.requested:
            raise KeyboardInterrupt
        self.flag.request()
        if not self._began:
            self.flag.check()
        rest = b"this iteration" if self._running else b"what is under way"
        # Not through the console: a handler may interrupt a write there.
        with suppress(OSError):  # a disk under it that is full, or nobody who reads
            os.write(2, b"\nstopping after " + rest + b"; once more to stop at once\n")
