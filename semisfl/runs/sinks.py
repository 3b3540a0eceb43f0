"""Write the metrics of each round to a file, and pass them to sinks: a progress line, and those a user adds."""

import contextlib
import json
import logging
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from semisfl.files import append_whole
from semisfl.metrics import RoundMetrics
from semisfl.settings.config import Config

log = logging.getLogger(__name__)

Observer = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class RunInfo:
    """The facts about a run that its sinks receive."""

    config: Config
    first: int
    """The first round; not 0 if the run is resumed."""
    directory: Path | None


class Sink(Protocol):
    """Started before the first round, called with the metrics of each recorded round, and always closed."""

    def start(self, run: RunInfo) -> None: ...

    def write(self, metrics: RoundMetrics) -> None: ...

    def close(self) -> None: ...


class MetricsFile:
    """``metrics.jsonl``: one line per round. Lines that a full disk refuses are written with the next one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.unwritten: list[str] = []

    def write(self, metrics: RoundMetrics) -> None:
        self.unwritten.append(json.dumps(_finite(metrics.as_dict())) + "\n")
        self._flush()

    def _flush(self) -> None:
        try:
            append_whole(self.path, "".join(self.unwritten).encode())
            self.unwritten.clear()
        except OSError as error:
            log.warning("cannot write to %s: %s; will try again", self.path, error)

    def sync(self) -> None:
        """Flush the lines to the disk. Call this before writing a checkpoint that relies on them."""
        if self.unwritten:
            self._flush()
        with contextlib.suppress(OSError), open(self.path, "rb") as file:
            os.fsync(file.fileno())


def _finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by None; the log has the values."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Observed:
    """Call a function of the user with the plain values of each round; an exception in it ends the run."""

    def __init__(self, observe: Observer) -> None:
        self._observe = observe

    def start(self, run: RunInfo) -> None: ...

    def write(self, metrics: RoundMetrics) -> None:
        self._observe(metrics.as_dict())

    def close(self) -> None: ...


class Guarded:
    """Wrap a sink whose failure must not end the run: it is logged once, and the sink is not called again."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._failed = False

    def start(self, run: RunInfo) -> None:
        self._try(lambda: self._sink.start(run))

    def write(self, metrics: RoundMetrics) -> None:
        self._try(lambda: self._sink.write(metrics))

    def close(self) -> None:
        self._try(lambda: self._sink.close())

    def _try(self, call: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            call()
        except Exception as error:  # whatever it is, training is worth more than a picture of it
            self._failed = True
            name = type(self._sink).__name__
            log.warning("sink %s failed and gets no more rounds: %r", name, error)
