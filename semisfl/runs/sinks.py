"""What watches a run: sinks get the metrics of each round; callbacks are called during it and may end it early."""

import contextlib
import json
import logging
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from semisfl.files import append_whole
from semisfl.metrics import RoundMetrics
from semisfl.settings.config import Config

if TYPE_CHECKING:
    from torch import nn

log = logging.getLogger(__name__)

Observer = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class RunInfo:
    """The facts about a run that its sinks receive at its start."""

    config: Config
    first: int
    """The index of the first round; not 0 if the run is resumed."""
    directory: Path | None
    """The run's directory, in which a sink may write files of its own; None: the run keeps no files."""


class Sink(Protocol):
    """What gets the metrics of a run, such as a tracker, an exporter or a progress line.

    It is started before the first round, called with the metrics of each recorded round, and always closed.
    """

    def start(self, run: RunInfo) -> None:
        """Called before the first round, with the facts about the run."""

    def write(self, metrics: RoundMetrics) -> None:
        """Called after each recorded round."""

    def close(self) -> None:
        """Called when the run ends, however it ends."""


class MetricsFile:
    """``metrics.jsonl``: one line per round. Lines that a full disk refuses are written with the next one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.unwritten: list[str] = []

    def write(self, metrics: RoundMetrics) -> None:
        """Append the metrics of a round. A disk that refuses them ends nothing: they wait in ``unwritten``."""
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


class Guarded:
    """A sink whose failure does not end the run: it is logged once, and the sink is not called again."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._failed = False

    def start(self, run: RunInfo) -> None:
        """Start the sink; if it fails, say so once and leave it out."""
        self._try(lambda: self._sink.start(run))

    def write(self, metrics: RoundMetrics) -> None:
        """Pass the metrics on, unless the sink failed before."""
        self._try(lambda: self._sink.write(metrics))

    def close(self) -> None:
        """Close the sink, unless it failed before."""
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


# --- callbacks -------------------------------------------------------------------------------------


class Callback:
    """Base class of callbacks: override the methods you need.

    Each may return True to end the run after the current round; `train` then returns its `Result`. An exception
    ends the run and reaches the caller. Either way a run with a directory first writes a checkpoint.
    """

    def on_round(self, metrics: RoundMetrics) -> bool | None:
        """Called after each recorded round."""

    def on_evaluation(self, metrics: RoundMetrics, model: "nn.Module") -> bool | None:
        """Called after each tested round with the tested ``model``, which training changes afterwards.

        Its layers are back in their modes (``train``, ``eval``) after the call.
        """

    def on_checkpoint(self, path: Path) -> bool | None:
        """Called after a checkpoint is written, ``latest.safetensors`` or ``best.safetensors``."""


class Observed(Callback):
    """Call a function of the user with the plain values of each round."""

    def __init__(self, observe: Observer) -> None:
        self._observe = observe

    def on_round(self, metrics: RoundMetrics) -> None:
        """Pass the metrics on; an exception in the function ends the run."""
        self._observe(metrics.as_dict())


def tell_round(
    callbacks: Sequence[Callback],
    metrics: RoundMetrics,
    model: "nn.Module",
    checkpoints: Iterable[Path],
) -> bool:
    """Call every callback about a finished round; return whether one of them ends the run.

    ``model`` is the tested model, and ``checkpoints`` are the files that were written after the round.
    """
    answers = [callback.on_round(metrics) for callback in callbacks]
    if metrics.accuracy is not None:
        # A callback may call `train` or `eval`; a teacher's mode is set only once, when it is made.
        modes = [(module, module.training) for module in model.modules()]
        answers += [callback.on_evaluation(metrics, model) for callback in callbacks]
        for module, training in modes:
            module.training = training
    return tell_checkpoints(callbacks, checkpoints) or any(answers)


def tell_checkpoints(callbacks: Sequence[Callback], checkpoints: Iterable[Path]) -> bool:
    """Call every callback about written checkpoints; return whether one of them ends the run."""
    answers = [callback.on_checkpoint(path) for path in checkpoints for callback in callbacks]
    return any(answers)
