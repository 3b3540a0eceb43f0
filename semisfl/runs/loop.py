"""Run the rounds: train, test, save; undo and repeat a round that failed."""

import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from semisfl.fleet.base import AbnormalValues, RoundAborted
from semisfl.fleet.byte_counts import by_client
from semisfl.metrics import RoundMetrics
from semisfl.runs import checkpoint
from semisfl.runs.advice import Advice, about_batchnorm
from semisfl.runs.callbacks import Callback, tell_checkpoints, tell_round
from semisfl.runs.directory import RunDirectory
from semisfl.runs.experiment import Experiment
from semisfl.runs.health import Health, Usual, finite
from semisfl.runs.limits import Standing, met, reason
from semisfl.runs.reading import columns
from semisfl.runs.sinks import RunInfo, Sink
from semisfl.stopping import Stopped

log = logging.getLogger(__name__)

FAILURES = 3
"""So many failures in a row, and the run goes back to the last good state; so many returns to the same
state, and it ends."""


class Diverged(ValueError):
    """Raised when a run fails again and again from its last good state."""


@dataclass
class Result:
    """The result of a run."""

    accuracy: float
    """Accuracy of the method's tested model after the last round, in percent."""
    best: float
    test_accuracy: float | None
    """Accuracy on the test set; None unless rounds are judged on validation images and the run has ended."""
    model: nn.Module
    rounds: list[dict[str, Any]] = field(repr=False)
    """The metrics of every round, those before a resume included."""
    stopped: bool = False
    """Whether the run was asked to end before its last round."""
    stopped_by: str | None = None
    """The key of ``stop`` that is met, if one is."""
    directory: Path | None = None
    diverged: bool = False
    """Whether losses or weights are NaN or out of bounds after the last round."""

    @property
    def warnings(self) -> list[str]:
        """Return what showed in the rounds that the run cannot work as it is, each with what to change."""
        return [text for one in self.rounds for text in one.get("warnings", ())]

    @property
    def history(self) -> dict[str, list[Any]]:
        """Return ``rounds`` by metric: one list per key with an entry per round, None where it has no value."""
        return columns(self.rounds)


def run_rounds(
    experiment: Experiment,
    directory: RunDirectory | None = None,
    *,
    first: int = 0,
    best: float = 0.0,
    usual: Usual | None = None,
    sinks: Sequence[Sink] = (),
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Run the rounds from ``first`` on; ``best`` is the highest accuracy of the rounds before.

    ``usual``: what was usual in them, as the checkpoint has it.
    """
    config, health = experiment.config, Health(experiment.method, usual)
    rounds = _Rounds(experiment, directory, health, first, best)
    with ExitStack() as stack:
        if directory is not None:
            stack.enter_context(_log_to(directory))
        info = RunInfo(config, first, directory.path if directory is not None else None)
        for sink in sinks:
            sink.start(info)
            stack.callback(sink.close)
        device = experiment.hardware.device
        log.info("%s, rounds %d to %d on %s", config.method, first, config.rounds - 1, device)
        while rounds.next < config.rounds and rounds.limit is None:
            try:
                metrics = rounds.attempt()
            except Stopped:
                tell_checkpoints(callbacks, rounds.save_unfinished())
                log.info("stopped before round %d was complete", rounds.next)
                return rounds.result(stopped=True)
            if metrics is None:
                continue
            saved = rounds.keep(metrics)
            try:
                for sink in sinks:
                    sink.write(metrics)
                ended = tell_round(callbacks, metrics, rounds.model, saved)
            except BaseException:
                rounds.save_now()
                raise
            if ended and rounds.next < config.rounds and rounds.limit is None:
                tell_checkpoints(callbacks, rounds.save_now())
                log.info("stopped by a callback after round %d", rounds.next - 1)
                return rounds.result(stopped=True)
        rounds.tell_end()
    return rounds.result(stopped=False)


class _Rounds:
    """The state of a run between its rounds."""

    def __init__(
        self,
        experiment: Experiment,
        directory: RunDirectory | None,
        health: Health,
        first: int,
        best: float,
    ) -> None:
        self.next = first
        """The index of the next round."""
        self._experiment, self._directory, self._best = experiment, directory, best
        self._history = directory.keep_metrics_before(first) if directory is not None else []
        self._standing = Standing.after(map(RoundMetrics.from_dict, self._history))
        self._advice = Advice(experiment.config, len(experiment.description.classes))
        for line in self._history:  # what they showed was said then
            self._advice.after(RoundMetrics.from_dict(line))
        self._health, self._good = health, True
        self._before: dict[str, Any] = {}
        self._last_good: tuple[dict[str, Any], Counter[tuple[str, str, int]]] = ({}, Counter())
        """The state after the last good round, and the bytes sent until then."""
        self._failures = self._returns = 0
        self._undone: Counter[tuple[str, str, int]] = Counter()
        """Bytes that undone attempts at this round sent."""
        self._repeated = self._history[-1].get("bytes_repeated", 0) if self._history else 0
        self._best_state: dict[str, Any] | None = None
        self._saved = first
        """The next round as the latest checkpoint has it."""

    @property
    def model(self) -> nn.Module:
        """Return the model that the run is judged by."""
        return next(iter(self._experiment.method.tested().values()))

    @property
    def limit(self) -> str | None:
        """Return the key of ``stop`` that is met after the rounds so far, or None."""
        return met(self._experiment.config.stop, self._standing)

    def tell_end(self) -> None:
        if self.limit is not None:
            why = reason(self._experiment.config.stop, self.limit, self._standing)
            log.info("ended after round %d: %s", self.next - 1, why)
        log.info("finished: %d rounds are done", self.next)

    def attempt(self) -> RoundMetrics | None:
        """Run a round and return its metrics; None if it was undone and must be repeated. May raise `Stopped`."""
        experiment, fleet = self._experiment, self._experiment.fleet
        started = time.perf_counter()
        # 1. Save the state: an undone round returns to it, and a stopped run writes it as checkpoint.
        self._before = checkpoint.snapshot(self._state())
        self._counted = Counter(fleet.traffic.counts)
        if self._good:
            self._last_good = self._before, self._counted
        try:
            # 2. Train. Waiting for clients is not part of the round's time.
            saved = time.perf_counter()
            fleet.wait_ready()
            begun = time.perf_counter()
            started += begun - saved
            reported = experiment.method.round(self.next)
        except RoundAborted as aborted:
            self._undo(f"round {self.next} is repeated: {aborted}")
            self._failed(may_wait=not isinstance(aborted, AbnormalValues))
            return None
        except ValueError as error:
            if (mistake := about_batchnorm(error, experiment.config)) is None:
                raise
            raise mistake from error
        trained = time.perf_counter()
        # 3. Check the result, and whether a client stands out.
        fault = self._health.fault(reported)
        suspect = fleet.settle(fault is None)
        if suspect is not None:
            self._undo(f"round {self.next} is repeated without {suspect}: {fault}")
            return None
        if fault is not None and self._failed():
            return None
        # 4. Test, also if the cost of the round makes it the last.
        metrics = RoundMetrics.of(
            reported,
            round=self.next,
            held_back=fleet.held_back.take(),
            bytes=fleet.traffic.by_kind(),
            bytes_total=fleet.traffic.total(),
            bytes_by_client=by_client(fleet.traffic.since(self._counted) + self._undone) or None,
            bytes_repeated=self._repeated or None,
            seconds=trained - started,
            seconds_training=trained - begun,
        )
        if self._is_tested or self._limit_after(metrics):
            scores = experiment.evaluate()
            ended = time.perf_counter()
            judged = next(iter(scores.values()))
            metrics = replace(
                metrics,
                accuracy=judged.accuracy,
                accuracies={name: one.accuracy for name, one in scores.items()},
                macro_f1=judged.macro_f1,
                recall_by_class=judged.recall,
                seconds=ended - started,
                seconds_testing=ended - trained,
            )
        self._good = fault is None
        if self._good:
            self._failures = self._returns = 0
        else:
            log.warning(
                "round %d: %s; nobody stands out, so the run goes on; it keeps its last good "
                "checkpoint; lower optimizer.lr = %g",
                self.next,
                fault,
                experiment.config.optimizer.lr,
            )
        warnings = self._advice.after(metrics)
        for text in warnings:
            log.warning("%s", text)
        metrics = replace(metrics, stopped_by=self._limit_after(metrics), warnings=warnings or None)
        # 5. If rounds are judged on validation images, read the test set once, at the end.
        at_end = self._is_last or metrics.stopped_by is not None
        return self._tested(metrics) if at_end and experiment.validation is not None else metrics

    def _tested(self, metrics: RoundMetrics) -> RoundMetrics:
        begun = time.perf_counter()
        judged = next(iter(self._experiment.test().values()))
        taken = time.perf_counter() - begun
        return replace(
            metrics,
            test_accuracy=judged.accuracy,
            seconds=(metrics.seconds or 0.0) + taken,
            seconds_testing=(metrics.seconds_testing or 0.0) + taken,
        )

    def keep(self, metrics: RoundMetrics) -> list[Path]:
        """Record a finished round and return the checkpoints written, which are of good states only."""
        improved = self._is_better(metrics)
        self._best = max(self._best, metrics.accuracy or 0.0)
        self._history.append(metrics.as_dict())
        self._undone.clear()
        self._standing = self._standing.then(metrics)
        every = self._experiment.config.runtime.checkpoint_every
        due = self._is_last or metrics.stopped_by is not None or (self.next + 1) % every == 0
        self.next += 1
        if self._directory is None:
            return []
        # Before the checkpoint: resuming drops a line too many, but cannot restore a missing one.
        self._directory.record.write(metrics)
        if improved and self._good:
            self._best_state = checkpoint.snapshot(self._model_state())
        return self.save_now() if due else []

    def _is_better(self, metrics: RoundMetrics) -> bool:
        """Return whether the round is the best so far, by the measure that `runtime.best_by` names."""
        key = self._experiment.config.runtime.best_by
        if key == "accuracy":
            return metrics.accuracy is not None and metrics.accuracy > self._best
        value = getattr(metrics, key)
        return value is not None and value > max(
            (line[key] for line in self._history if key in line), default=-1.0
        )

    def save_now(self) -> list[Path]:
        """Write the state after the last round if the latest checkpoint has another; return the files written."""
        return self._save(self._state()) if self._saved != self.next else []

    def save_unfinished(self) -> list[Path]:
        """Write the state at the start of the unfinished round; return the files written."""
        return self._save(self._before)

    def _save(self, state: dict[str, Any]) -> list[Path]:
        if self._directory is None or not self._good:
            return []
        if not finite(state["method"]):
            log.warning("the state holds NaN or Inf and is not written; the previous one is kept")
            return []
        written = []
        if self._directory.save_latest(state):
            self._saved = state["round"]
            written.append("latest")
        if self._save_best():
            written.append("best")
        return [self._directory.path / f"{name}.safetensors" for name in written]

    def result(self, *, stopped: bool) -> Result:
        tested = [line["accuracy"] for line in self._history if "accuracy" in line]
        return Result(
            accuracy=tested[-1] if tested else float("nan"),
            best=self._best,
            test_accuracy=self._history[-1].get("test_accuracy") if self._history else None,
            model=self.model,
            rounds=self._history,
            stopped=stopped,
            stopped_by=None if stopped else self.limit,
            directory=self._directory.path if self._directory else None,
            diverged=not self._good,
        )

    @property
    def _is_last(self) -> bool:
        return self.next == self._experiment.config.rounds - 1

    @property
    def _is_tested(self) -> bool:
        every = self._experiment.config.runtime.evaluate_every
        return self._is_last or (self.next + 1) % every == 0

    def _limit_after(self, metrics: RoundMetrics) -> str | None:
        return met(self._experiment.config.stop, self._standing.then(metrics))

    def _state(self) -> dict[str, Any]:
        health = self._health.state_dict()
        return {**self._experiment.state_dict(), "health": health, **self._model_state()}

    def _model_state(self) -> dict[str, Any]:
        """Return the model and its description: all that is needed to use it, not to train on."""
        tested = next((line for line in reversed(self._history) if "accuracy" in line), None)
        model = self._experiment.model_state(tested and RoundMetrics.from_dict(tested))
        return {"round": self.next, "best": self._best, "model": model}

    def _undo(self, why: str) -> None:
        self._restore(why, self._before, self._counted)

    def _restore(
        self, why: str, state: dict[str, Any], counted: Counter[tuple[str, str, int]]
    ) -> None:
        log.warning("%s", why)
        # These bytes were sent all the same.
        sent = self._experiment.fleet.traffic.since(counted)
        self._undone += sent
        self._repeated += sent.total()
        self._experiment.fleet.held_back.take()  # of the attempt that does not count
        self._experiment.undo_round(state)

    def _save_best(self) -> bool:
        """Write the best state since the last checkpoint; if that fails, keep it for the next attempt."""
        assert self._directory is not None
        if self._best_state is None or not self._directory.save("best", self._best_state):
            return False
        self._best_state = None
        return True

    def _failed(self, *, may_wait: bool = True) -> bool:
        """Count a failure; after `FAILURES` in a row go back to the last good state. Return whether it did.

        ``may_wait``: clients that come back may help, so a round may be repeated from a good state for
        ever. In a simulation a bad round is kept: the same clients would give the same numbers again.
        """
        self._failures += 1
        state, counted = self._last_good
        real = self._experiment.config.fleet.kind == "network"
        already_there = state["round"] == self.next
        if not real or self._failures < FAILURES or (already_there and may_wait):
            return False
        self._failures, self._returns = 0, self._returns + 1
        if self._returns == FAILURES:
            raise Diverged(
                f"the run failed {FAILURES} times from round {state['round']} on, its last good state; "
                "remove the device that the log names or lower optimizer.lr, then use --resume"
            )
        why = f"going back to the last good checkpoint: round {state['round']} is next"
        self._restore(why, state, counted)
        self.next, self._good = state["round"], True
        if self._directory is not None:
            self._directory.keep_metrics_before(self.next)
        self._history = [line for line in self._history if line["round"] < self.next]
        self._standing = Standing.after(map(RoundMetrics.from_dict, self._history))
        return True


@contextmanager
def _log_to(directory: RunDirectory) -> Iterator[None]:
    """Write the log to the run's directory too, inside the block."""
    root, handler = logging.getLogger("semisfl"), directory.log_to_file()
    root.addHandler(handler)
    level = root.level
    if not root.isEnabledFor(logging.INFO):
        root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.setLevel(level)
        root.removeHandler(handler)
        handler.close()
