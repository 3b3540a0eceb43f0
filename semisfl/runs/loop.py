"""The rounds of a run: train, test, keep, undo what was not finished."""

import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from semisfl.fleet.base import RoundAborted
from semisfl.methods.base import Method
from semisfl.rows import RoundRow
from semisfl.runs import checkpoint
from semisfl.runs.directory import RunDirectory
from semisfl.runs.experiment import Experiment
from semisfl.runs.health import Health
from semisfl.runs.sinks import RunInfo, Sink
from semisfl.stopping import Stopped

log = logging.getLogger(__name__)


@dataclass
class Result:
    """What a run gives back."""

    accuracy: float
    """Of the method's tested model after the last round, in percent."""
    best: float
    model: nn.Module
    rounds: list[dict[str, Any]] = field(repr=False)
    stopped: bool = False
    directory: Path | None = None


def run_rounds(
    experiment: Experiment,
    directory: RunDirectory | None = None,
    *,
    first: int = 0,
    best: float = 0.0,
    sinks: Sequence[Sink] = (),
) -> Result:
    """Do the rounds from ``first`` on; ``best`` is the highest accuracy of those before."""
    config, method, fleet = experiment.config, experiment.method, experiment.fleet
    history = directory.keep_metrics_before(first) if directory is not None else []
    best_state: dict[str, Any] | None = None
    health, good = Health(method), True

    def full_state(next_round: int) -> dict[str, Any]:
        return {"round": next_round, "best": best, **experiment.state_dict()}

    with ExitStack() as stack:
        if directory is not None:
            handler = directory.log_to_file()
            root = logging.getLogger("semisfl")
            root.addHandler(handler)
            if not root.isEnabledFor(logging.INFO):
                stack.callback(root.setLevel, root.level)
                root.setLevel(logging.INFO)
            stack.callback(root.removeHandler, handler)
            stack.callback(handler.close)
        info = RunInfo(config, first, directory.path if directory is not None else None)
        for sink in sinks:
            sink.start(info)
            stack.callback(sink.close)
        device = experiment.hardware.device
        log.info("%s, rounds %d to %d on %s", config.method, first, config.rounds - 1, device)
        round_index = first
        while round_index < config.rounds:
            # A stopped or aborted round is undone: the checkpoint is always a round's start.
            before = checkpoint.snapshot(full_state(round_index))
            started = time.perf_counter()
            try:
                fleet.wait_ready()
                begun = time.perf_counter()
                reported = method.round(round_index)
                trained = time.perf_counter()
                fault = health.fault(reported)
                suspect = fleet.settle(fault is None)
                if suspect is not None:
                    log.warning("round %d is repeated without %s: %s", round_index, suspect, fault)
                    experiment.undo_round(before)
                    continue
                last = round_index == config.rounds - 1
                tested = last or (round_index + 1) % config.runtime.evaluate_every == 0
                accuracies = experiment.evaluate() if tested else {}
                ended = time.perf_counter()
            except RoundAborted as aborted:
                log.warning("round %d is repeated: %s", round_index, aborted)
                experiment.undo_round(before)
                continue
            except Stopped:
                if directory is not None and good:
                    directory.save_latest(before)
                    _save_best(directory, best_state)
                log.info("stopped before round %d was complete", round_index)
                return _result(method, history, best, stopped=True, directory=directory)
            good = fault is None
            if not good:
                log.warning(
                    "round %d: %s; nobody stands out, so the run goes on; it keeps its last good "
                    "checkpoint",
                    round_index,
                    fault,
                )
            row = RoundRow(
                **vars(reported),
                round=round_index,
                accuracy=next(iter(accuracies.values()), None),
                accuracies=accuracies,
                bytes=fleet.traffic.by_kind(),
                bytes_total=fleet.traffic.total(),
                seconds=ended - started,
                seconds_training=trained - begun,
                seconds_testing=ended - trained if tested else None,
            )
            history.append(row.as_dict())
            improved = row.accuracy is not None and row.accuracy > best
            best = max(best, row.accuracy or 0.0)
            round_index += 1
            if directory is not None:
                # Before the checkpoint: on resume a line too many is dropped, one too few is lost.
                directory.record.row(row)
                if improved and good:
                    best_state = checkpoint.snapshot(full_state(round_index))
                if good and (last or round_index % config.runtime.checkpoint_every == 0):
                    directory.save_latest(full_state(round_index))
                    best_state = _save_best(directory, best_state)
            for sink in sinks:
                sink.row(row)
    return _result(method, history, best, stopped=False, directory=directory)


def _save_best(directory: RunDirectory, state: dict[str, Any] | None) -> dict[str, Any] | None:
    """Write the best state since the last checkpoint; what could not be written is kept for the next."""
    return None if state is None or directory.save("best", state) else state


def _result(
    method: Method,
    history: list[dict[str, Any]],
    best: float,
    *,
    stopped: bool,
    directory: RunDirectory | None,
) -> Result:
    tested = [row["accuracy"] for row in history if "accuracy" in row]
    return Result(
        accuracy=tested[-1] if tested else float("nan"),
        best=best,
        model=next(iter(method.tested().values())),
        rounds=history,
        stopped=stopped,
        directory=directory.path if directory else None,
    )
