"""Where a run's rows go: its file of metrics, a progress line, and whatever a user adds."""

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
    """What a sink is told of its run."""

    config: Config
    first: int
    """The round it begins with; not 0 if it is resumed."""
    directory: Path | None


class Sink(Protocol):
    """Started before the first round, given each row once it is recorded, closed at the end,
    however that comes."""

    def start(self, run: RunInfo) -> None: ...

    def write(self, metrics: RoundMetrics) -> None: ...

    def close(self) -> None: ...


class MetricsFile:
    """``metrics.jsonl``: one line per row; lines a full disk refuses are tried again with the next."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.unwritten: list[str] = []

    def start(self, run: RunInfo) -> None:
        """The file is made by its first line."""

    def write(self, metrics: RoundMetrics) -> None:
        self.unwritten.append(json.dumps(_finite(metrics.as_dict())) + "\n")
        try:
            append_whole(self.path, "".join(self.unwritten).encode())
            self.unwritten.clear()
        except OSError as error:
            log.warning("cannot write to %s: %s; will try again", self.path, error)

    def sync(self) -> None:
        """The lines so far outlast a power cut; a checkpoint that counts on them is written after that."""
        with contextlib.suppress(OSError), open(self.path, "rb") as file:
            os.fsync(file.fileno())

    def close(self) -> None:
        """Every line that the disk took is there already."""


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they are null, what they were is in the log."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Observed:
    """A function of the caller's, given each row as plain values; what it raises ends the run."""

    def __init__(self, observe: Observer) -> None:
        self._observe = observe

    def start(self, run: RunInfo) -> None: ...

    def write(self, metrics: RoundMetrics) -> None:
        self._observe(metrics.as_dict())

    def close(self) -> None: ...


class Guarded:
    """A sink that is none of the run's business: if it fails, that is said once and it gets no more rows."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._failed = False

    def start(self, run: RunInfo) -> None:
        self._try(lambda: self._sink.start(run))

    def write(self, metrics: RoundMetrics) -> None:
        # Sinks of other packages may still call it `row`, as this package did before.
        write = getattr(self._sink, "write", None) or self._sink.row  # type: ignore[attr-defined]
        self._try(lambda: write(metrics))

    def close(self) -> None:
        self._try(self._sink.close)

    def _try(self, call: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            call()
        except Exception as error:  # whatever it is, training is worth more than a picture of it
            self._failed = True
            name = type(self._sink).__name__
            log.warning("sink %s failed and gets no more rows: %r", name, error)
