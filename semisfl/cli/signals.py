"""Handle Ctrl-C, SIGTERM and SIGHUP from the start of a command to its end.

Loads nothing large: it is imported before torch.
"""

import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any

from semisfl.cli.renamed import COMMANDS
from semisfl.stopping import StopFlag

SIGNALS = [signal.SIGINT, signal.SIGTERM]
if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as it is under nohup
    SIGNALS.append(signal.SIGHUP)
SAME_SECONDS = 0.5
"""A signal so soon after the first is the same one: timeout(1) and other wrappers send it twice."""
LONG = {"run", "compare", "poisoning", "reproduce", "serve", "join", "demo-network"}
"""Commands that a signal stops cleanly; it interrupts all others."""

LOG_FORMATS = ("text", "json")
"""Values of the option ``--log-format``, which may stand before the command."""

_early = StopFlag()


def note_early(words: Sequence[str]) -> None:
    """Note signals until `StopSignals` takes over.

    In the middle of an import an exception could be swallowed, or leave a module half imported.
    """
    named = (word for word in words if not word.startswith("-"))
    command = next((word for word in named if word not in LOG_FORMATS), "")
    if COMMANDS.get(command, command) in LONG:
        for number in SIGNALS:
            signal.signal(number, lambda *_: _early.request())


def ignore() -> None:
    """Ignore signals: while Python shuts down, one would turn success into failure."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def end_at_once() -> None:
    """Let a signal end this process; raise `Stopped` if one came earlier."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    _early.check()


@contextmanager
def noted(flag: StopFlag) -> Iterator[None]:
    """Set ``flag`` on the first signal inside; a second one (`_Second`) ends this process."""
    second = _Second()

    def handle(number: int, frame: FrameType | None) -> None:
        if not flag.requested:
            second.first_came()
            flag.request()
        elif second.has_come(number):
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Second:
    """Tell a second signal from a first one that comes twice.

    SIGHUP is never the second: a lost terminal sends it twice, from the shell and from the kernel.
    """

    def __init__(self) -> None:
        self._first = -math.inf

    def first_came(self) -> None:
        self._first = time.monotonic()

    def has_come(self, number: int) -> bool:
        return number != signal.SIGHUP and time.monotonic() - self._first >= SAME_SECONDS


class StopSignals:
    """Turn signals into a clean stop.

    Before the first round a signal ends the command at once: nothing is lost. Later the first signal
    lets the run finish its iteration, and a second one (`_Second`) ends it at once.
    """

    def __init__(self) -> None:
        self.flag = StopFlag()
        self._began = self._running = False
        self._second = _Second()
        self._busy: Callable[[], bool] = lambda: True
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
    def running(self, busy: Callable[[], bool] = lambda: True) -> Iterator[None]:
        """Mark the part of a command that looks at ``flag`` and finishes its iteration.

        ``busy`` returns whether there is an iteration now; a server or device may only be waiting.
        """
        self._began = self._running = True
        self._busy = busy
        try:
            self.flag.check()
            yield
        finally:
            self._running = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.flag.requested:
            if self._second.has_come(number):
                raise KeyboardInterrupt
            return
        self._second.first_came()
        self.flag.request()
        # In the middle of an import only note it, as `note_early` does: `running` looks at the flag.
        if not self._began and not _importing(frame):
            self.flag.check()
        rest = b" after this iteration" if self._running else b" after what is under way"
        if self._running and not self._busy():
            rest = b""
        # Not through the console: a handler may interrupt a write there.
        with suppress(OSError):  # a full disk, or nobody reads
            os.write(2, b"\nstopping" + rest + b"; once more to stop at once\n")


def _importing(frame: FrameType | None) -> bool:
    """Return whether a module is being imported where the signal came."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False
