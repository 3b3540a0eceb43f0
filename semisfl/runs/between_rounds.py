"""The state of a run between its rounds: attempt a round, undo one that failed, keep one that is done."""

import logging
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from semisfl.fleet.base import AbnormalValues, RoundAborted
from semisfl.fleet.byte_counts import alike_clients
from semisfl.metrics import RoundMetrics
from semisfl.runs import checkpoint
from semisfl.runs.advice import Advice, about_batchnorm, against_divergence
from semisfl.runs.directory import RunDirectory
from semisfl.runs.experiment import Experiment
from semisfl.runs.health import Health
from semisfl.runs.limits import Standing, met, reason
from semisfl.runs.result import Result
from semisfl.runs.saving import Checkpoints
from semisfl.settings.counts import counted

log = logging.getLogger(__name__)

FAILURES = 3
"""After this many failures in a row the run goes back to its last good state; after this many returns to it the
run ends."""


class Diverged(ValueError):
    """Raised when a run fails again and again from its last good state."""


class Rounds:
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
        self._best_by = experiment.config.runtime.best_by
        good = (line for line in self._history if not line.get("diverged"))
        self._highest = max((line.get(self._best_by, -1.0) for line in good), default=-1.0)
        """The highest value of the measure that `runtime.best_by` names, of good rounds; -1 before the first."""
        self._standing = Standing.after(map(RoundMetrics.from_dict, self._history))
        self._advice = Advice(experiment.config, len(experiment.description.classes))
        for line in self._history:  # their warnings were logged then
            self._advice.after(RoundMetrics.from_dict(line))
        self._health, self._good = health, True
        self._before: dict[str, Any] = {}
        self._last_good: tuple[dict[str, Any], Counter[tuple[str, str, int]]] = ({}, Counter())
        """The state after the last good round, and the bytes sent until then."""
        self._failures = self._returns = 0
        self._undone: Counter[tuple[str, str, int]] = Counter()
        """Bytes that undone attempts at this round sent."""
        self._repeated = self._history[-1].get("bytes_repeated", 0) if self._history else 0
        self._checkpoints = Checkpoints(directory, first)

    @property
    def limit(self) -> str | None:
        """Return the key of ``stop`` that is met after the rounds so far, or None."""
        return met(self._experiment.config.stop, self._standing)

    def tell_end(self) -> None:
        if self.limit is not None:
            why = reason(self._experiment.config.stop, self.limit, self._standing)
            log.info("ended after round %d: %s", self.next, why)
        log.info("finished: %s done", counted(self.next, "round"))

    def attempt(self) -> RoundMetrics | None:
        """Run a round and return its metrics; None if it was undone and must be repeated. May raise `Stopped`."""
        experiment, fleet = self._experiment, self._experiment.fleet
        started = time.perf_counter()
        # 1. Save the state: an undone round returns to it, and a stopped run writes it as checkpoint.
        self._before = checkpoint.snapshot(self._state())
        self._sent_before = Counter(fleet.traffic.counts)
        if self._good:
            self._last_good = self._before, self._sent_before
        try:
            # 2. Train. Waiting for clients is not part of the round's time.
            saved = time.perf_counter()
            fleet.wait_ready()
            begun = time.perf_counter()
            started += begun - saved
            reported = experiment.method.round(self.next)
        except RoundAborted as aborted:
            self._undo(f"round {self.next + 1} is repeated: {aborted}")
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
            self._undo(f"round {self.next + 1} is repeated without {suspect}: {fault}")
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
            bytes_by_client=alike_clients(fleet.traffic.since(self._sent_before) + self._undone)
            or None,
            bytes_repeated=self._repeated or None,
            seconds=trained - started,
            seconds_training=trained - begun,
        )
        if self._is_judged or self._limit_after(metrics):
            metrics = self._judged(metrics)
        self._good = fault is None
        if self._good:
            self._failures = self._returns = 0
        else:
            metrics = replace(metrics, diverged=True)
            log.warning(
                "round %d: %s; nobody stands out, so the run goes on; it keeps its last good checkpoint; %s",
                self.next + 1,
                fault,
                against_divergence(experiment.config),
            )
        warnings = self._advice.after(metrics)
        for text in warnings:
            log.warning("%s", text)
        metrics = replace(metrics, stopped_by=self._limit_after(metrics), warnings=warnings or None)
        # 5. If rounds are judged on validation images, read the test set once, at the end.
        at_end = self._is_last or metrics.stopped_by is not None
        return (
            self._with_test_accuracy(metrics)
            if at_end and experiment.validation is not None
            else metrics
        )

    def test_end(self) -> None:
        """Test a resumed run that ends at once because a limit is met, as any other end is tested."""
        if self.limit is None or not self._history or "stopped_by" in self._history[-1]:
            return
        metrics = replace(RoundMetrics.from_dict(self._history[-1]), stopped_by=self.limit)
        if metrics.accuracy is None:
            metrics = self._judged(metrics)
        if self._experiment.validation is not None:
            metrics = self._with_test_accuracy(metrics)
        self._begin_at(self.next - 1)
        self.keep(metrics)
        self._checkpoints.write(self._state())

    def _judged(self, metrics: RoundMetrics) -> RoundMetrics:
        begun = time.perf_counter()
        scores = self._experiment.evaluate()
        judged = next(iter(scores.values()))
        tested = replace(
            metrics,
            accuracy=judged.accuracy,
            accuracies={name: one.accuracy for name, one in scores.items()},
            macro_f1=judged.macro_f1,
            recall_by_class=judged.recall,
        )
        return tested.with_test(time.perf_counter() - begun)

    def _with_test_accuracy(self, metrics: RoundMetrics) -> RoundMetrics:
        begun = time.perf_counter()
        judged = next(iter(self._experiment.test().values()))
        tested = replace(metrics, test_accuracy=judged.accuracy)
        return tested.with_test(time.perf_counter() - begun)

    def keep(self, metrics: RoundMetrics) -> list[Path]:
        """Record a finished round and return the checkpoints written, which are of good states only."""
        value = getattr(metrics, self._best_by)
        improved = self._good and value is not None and value > self._highest
        if improved:
            self._highest = value
        if self._good:
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
        if improved:
            self._checkpoints.keep_best(self._model_state())
        return self.save_now() if due else []

    def save_now(self) -> list[Path]:
        """Write the state after the last round if the latest checkpoint has another; return the files written."""
        if not self._good or self._checkpoints.round == self.next:
            return []
        return self._checkpoints.write(self._state())

    def save_unfinished(self) -> list[Path]:
        """Write the state at the start of the unfinished round; return the files written."""
        return self._checkpoints.write(self._before) if self._good else []

    def result(self, *, stopped: bool) -> Result:
        tested = [line["accuracy"] for line in self._history if "accuracy" in line]
        return Result(
            accuracy=tested[-1] if tested else float("nan"),
            best=self._best,
            test_accuracy=self._history[-1].get("test_accuracy") if self._history else None,
            model=self._experiment.model,
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
    def _is_judged(self) -> bool:
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
        self._restore(why, self._before, self._sent_before)

    def _restore(
        self, why: str, state: dict[str, Any], sent_before: Counter[tuple[str, str, int]]
    ) -> None:
        log.warning("%s", why)
        # These bytes were sent all the same.
        sent = self._experiment.fleet.traffic.since(sent_before)
        self._undone += sent
        self._repeated += sent.total()
        self._experiment.fleet.held_back.take()  # of the attempt that does not count
        self._experiment.undo_round(state)

    def _failed(self, *, may_wait: bool = True) -> bool:
        """Count a failure; after `FAILURES` in a row go back to the last good state. Return whether it did.

        ``may_wait``: clients that come back may help, so a round may be repeated from a good state for
        ever. In a simulation a bad round is kept: the same clients would give the same numbers again.
        """
        self._failures += 1
        state, sent_before = self._last_good
        real = self._experiment.config.fleet.kind == "network"
        already_there = state["round"] == self.next
        if not real or self._failures < FAILURES or (already_there and may_wait):
            return False
        self._failures, self._returns = 0, self._returns + 1
        if self._returns == FAILURES:
            raise Diverged(
                f"the run failed {FAILURES} times from round {state['round'] + 1} on, its last good state; "
                "remove the device that the log names or lower optimizer.lr, then use --resume"
            )
        why = f"going back to the last good checkpoint: round {state['round'] + 1} is next"
        self._restore(why, state, sent_before)
        self._good = True
        self._begin_at(state["round"])
        return True

    def _begin_at(self, round_index: int) -> None:
        """Forget the metrics of this round and of later ones."""
        self.next = round_index
        if self._directory is not None:
            self._directory.keep_metrics_before(self.next)
        self._history = [line for line in self._history if line["round"] < self.next]
        self._standing = Standing.after(map(RoundMetrics.from_dict, self._history))
