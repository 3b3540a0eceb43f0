"""Turn Ctrl-C, SIGTERM and SIGHUP into a clean stop of a command that trains or serves.

Such a command has a `StopSignals` from its start to its end (`semisfl.cli.main.STOPPABLE`). It goes through two phases:

- **Before** `StopSignals.running` it imports torch, reads settings and loads images. The first signal raises `Stopped`
  wherever the program is, and the command ends with "nothing was written".
- **Inside** `StopSignals.running` it trains. The first signal only sets a flag, which the run looks at between two
  iterations; it then saves a checkpoint and ends.

In both, a second signal ends the command at once, without a checkpoint. Commands that only read keep Python's own
behaviour: a signal interrupts them at once, and nothing is lost.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from semisfl.stopping import StopFlag

SIGNALS = [signal.SIGINT, signal.SIGTERM]
"""The signals that stop a command. Under nohup SIGHUP is ignored from the start, and stays so."""
if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as it is under nohup
    SIGNALS.append(signal.SIGHUP)
SAME_SECONDS = 0.5
"""Seconds in which a second signal counts as the first one: timeout(1) and other wrappers send theirs twice."""

LOOK_SECONDS = 0.2
"""Seconds between two looks at the flag of a command that only waits for a signal."""


class StopSignals:
    """Handles the signals inside its ``with`` block, and sets ``flag`` on the first of them.

    Before `running`, the first signal also raises `Stopped`: nothing is lost yet. Inside `running` the command looks at
    ``flag`` and finishes its iteration. A second signal raises `KeyboardInterrupt`. SIGHUP is never the second: a lost
    terminal sends it twice, from the shell and from the kernel.
    """

    def __init__(self) -> None:
        self.flag = StopFlag()
        self.quiet = False
        """Do not print that the command is stopping."""
        self._began = self._running = False
        self._busy: Callable[[], bool] = lambda: True
        self._first = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopSignals":
        """Handle the signals from now on."""
        self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        """Let the former handlers have the signals again."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def running(self, busy: Callable[[], bool] = lambda: True) -> Iterator[None]:
        """Mark the part of a command that looks at ``flag``; raise `Stopped` if a signal came before.

        ``busy`` returns whether an iteration is under way now; a server or device may only be waiting.
        """
        self._began = self._running = True
        self._busy = busy
        try:
            self.flag.check()
            yield
        finally:
            self._running = False

    def wait(self) -> None:
        """Return when the first signal comes."""
        self.quiet = True
        with self.running():
            while not self.flag.requested:
                time.sleep(LOOK_SECONDS)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Handle one signal: set the flag, and raise `Stopped` or `KeyboardInterrupt` where that is due."""
        if self.flag.requested:
            if number != signal.SIGHUP and time.monotonic() - self._first >= SAME_SECONDS:
                raise KeyboardInterrupt
            return
        self._first = time.monotonic()
        self.flag.request()
        # An exception in the middle of an import could be swallowed, or leave the module half imported.
        if not self._began and not _importing(frame):
            self.flag.check()
        when = b" after this iteration" if self._running and self._busy() else b""
        if not self.quiet:
            # Not through the console: a handler may interrupt a write there.
            with suppress(OSError):  # a full disk, or nobody reads
                os.write(2, b"\nstopping" + when + b"; once more to stop at once\n")


def _importing(frame: FrameType | None) -> bool:
    """Return whether a module is being imported in this frame or a caller of it."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def ignore() -> None:
    """Ignore signals from now on: while Python shuts down, one would turn success into failure."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
