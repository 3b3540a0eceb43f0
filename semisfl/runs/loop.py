"""The loop of a run: train a round, check it, test it, record it and save; undo and repeat a round that failed.

A round fails in two ways. If too few devices answer (`RoundAborted`), it is repeated once enough are back. If its
losses or weights are not finite, it is repeated once without the device whose update stood out; if that does not
help, or no device stands out, the run ends as diverged.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from semisfl.fleet.base import AbnormalValues, RoundAborted
from semisfl.fleet.byte_counts import group_by_bytes
from semisfl.methods.base import Method
from semisfl.metrics import MethodMetrics, RoundMetrics
from semisfl.runs import checkpoint, run_log
from semisfl.runs.advice import Advice, about_batchnorm
from semisfl.runs.directory import RunDirectory
from semisfl.runs.experiment import Experiment
from semisfl.runs.reading import Standing, columns, met, reason
from semisfl.runs.sinks import Callback, RunInfo, Sink, tell_checkpoints, tell_round
from semisfl.settings.counts import plural
from semisfl.stopping import Stopped

log = logging.getLogger(__name__)


@dataclass
class Result:
    """The result of a run, which `train` and `resume` return. Accuracies are in percent."""

    accuracy: float
    """Accuracy of the method's tested model in the last test; NaN if no round was tested."""
    best: float
    """Highest accuracy of all tests of good rounds."""
    test_accuracy: float | None
    """Accuracy on the test set; None unless rounds are judged on validation images and the run has ended."""
    model: nn.Module
    """The tested model, with its weights after the last round."""
    rounds: list[dict[str, Any]] = field(repr=False)
    """The metrics of every round, those before a resume included."""
    stopped: bool = False
    """Whether the run was asked to end before its last round."""
    stopped_by: str | None = None
    """The key of ``stop`` that is met, if one is."""
    directory: Path | None = None
    diverged: bool = False
    """Whether losses or weights are NaN or Inf after the last round."""

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
    sinks: Sequence[Sink] = (),
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Run the rounds of ``experiment`` from index ``first`` on, and return the result.

    ``directory`` gets the metrics, the log and the checkpoints; None: nothing is written. The run also ends at a limit of ``stop``, when it diverges,
    when a callback asks for it, and (as ``stopped``) when its `StopFlag` is set.
    """
    config, rounds = experiment.config, Rounds(experiment, directory, first)
    with ExitStack() as stack:
        if directory is not None:
            stack.enter_context(run_log.written(directory.path / "run.log"))
        info = RunInfo(config, first, directory.path if directory is not None else None)
        for sink in sinks:
            sink.start(info)
            stack.callback(sink.close)
        device = experiment.hardware.device
        if first < config.rounds:
            log.info("%s, rounds %d to %d on %s", config.method, first + 1, config.rounds, device)
        try:
            while not rounds.ended:
                metrics = rounds.attempt()
                if metrics is None:
                    continue
                saved = rounds.keep(metrics)
                try:
                    for sink in sinks:
                        sink.write(metrics)
                    stopped = tell_round(callbacks, metrics, experiment.model, saved)
                except BaseException:
                    rounds.save()
                    raise
                if stopped and not rounds.ended:
                    tell_checkpoints(callbacks, rounds.save())
                    log.info("stopped by a callback after round %d", rounds.next)
                    return rounds.result(stopped=True)
        except Stopped:
            tell_checkpoints(callbacks, rounds.save_unfinished())
            log.info("stopped before round %d was complete", rounds.next + 1)
            return rounds.result(stopped=True)
        if (limit := rounds.limit) is not None:
            why = reason(config.stop, limit, rounds.standing)
            log.info("ended after round %d: %s", rounds.next, why)
        log.info("finished: %s done", plural(rounds.next, "round"))
    return rounds.result(stopped=False)


class Rounds:
    """The rounds of a run so far, and the steps that lead to the next one.

    `attempt` and `keep` alternate: the first trains, checks and tests a round, the second records it. A state is
    written only after a good round, so every checkpoint can be continued from.
    """

    def __init__(self, experiment: Experiment, directory: RunDirectory | None, first: int) -> None:
        """Take over the rounds before ``first`` from the metrics file of ``directory``."""
        self.next = first
        """The index of the next round."""
        self.diverged = False
        """Whether the last round left losses or weights that are not finite."""
        self._experiment, self._directory = experiment, directory
        self._history = directory.keep_metrics_before(first) if directory is not None else []
        earlier = [RoundMetrics.from_dict(line) for line in self._history]
        self.standing = Standing.after(earlier)
        self._advice = Advice(experiment.config, len(experiment.description.classes))
        for metrics in earlier:  # their warnings were logged then
            self._advice.after(metrics)
        values = [self._measure(metrics) for metrics in earlier if not metrics.diverged]
        self._highest = max(values, default=-1.0)
        """The highest value of the measure that `runtime.best_by` names; -1 before the first test."""
        self._before: dict[str, Any] = {}
        """The state at the start of the round under way."""
        self._sent_before: Counter[tuple[str, str, int]] = Counter()
        self._left_out: str | None = None
        """The device without which the round under way is repeated."""
        self._undone: Counter[tuple[str, str, int]] = Counter()
        """Bytes that undone attempts at this round sent."""
        self._repeated = self._history[-1].get("bytes_repeated", 0) if self._history else 0
        """Bytes that all undone attempts sent."""
        self._saved_round = first
        """The ``next`` of the latest checkpoint."""
        self._best_state: dict[str, Any] | None = None
        """The best model, until the next checkpoint is written."""

    @property
    def limit(self) -> str | None:
        """Return the key of ``stop`` that is met after the rounds so far, or None."""
        return met(self._experiment.config.stop, self.standing)

    @property
    def ended(self) -> bool:
        """Return whether no round is left to run: all are done, the last one diverged, or a limit is met."""
        done = self.next >= self._experiment.config.rounds
        return done or self.diverged or self.limit is not None

    # --- one round ---------------------------------------------------------------------------------

    def attempt(self) -> RoundMetrics | None:
        """Run the round ``next`` and return its metrics; None if it was undone and must be repeated.

        The metrics have the scores of a test where one is due, and the warnings of `Advice`. Raises `Stopped` if the
        run was asked to end; the state is then somewhere within the round, and its start is still known.
        """
        experiment, fleet = self._experiment, self._experiment.fleet
        # 1. Copy the state: an undone round returns to it, and a stopped run writes it as checkpoint.
        started = time.perf_counter()
        self._before = checkpoint.snapshot(self._state())
        self._sent_before = Counter(fleet.traffic.counts)
        copied = time.perf_counter()
        fleet.wait_ready()  # not part of the round's time
        # 2. Train, and check the result.
        begun = time.perf_counter()
        try:
            reported = experiment.method.round(self.next)
            fault = not_finite(experiment.method, reported)
        except AbnormalValues as error:
            reported, fault = MethodMetrics(), str(error)
        except RoundAborted as aborted:
            self._undo(f"round {self.next + 1} is repeated: {aborted}")
            return None
        except ValueError as error:
            if (mistake := about_batchnorm(error, experiment.config)) is None:
                raise
            raise mistake from error
        trained = time.perf_counter()
        suspect = fleet.settle(fault is None)
        if fault is not None and suspect is not None and self._left_out is None:
            self._left_out = suspect
            self._undo(f"round {self.next + 1} is repeated without {suspect}: {fault}")
            return None
        self.diverged = fault is not None
        if fault is not None:
            without = f", also without {self._left_out}" if self._left_out else ""
            lr = experiment.config.optimizer.lr
            log.error(
                f"round {self.next + 1} diverged{without}: {fault}; the run ends with its last good checkpoint; lower "
                f"optimizer.lr = {lr:g}"
                + (f", or remove {suspect}, which stands out" if suspect else "")
            )
        # 3. Test.
        metrics = RoundMetrics.of(
            reported,
            round=self.next,
            held_back=fleet.held_back.take(),
            bytes=fleet.traffic.by_kind(),
            bytes_total=fleet.traffic.total(),
            bytes_by_client=group_by_bytes(fleet.traffic.since(self._sent_before) + self._undone)
            or None,
            bytes_repeated=self._repeated or None,
            seconds=copied - started + trained - begun,
            seconds_training=trained - begun,
            diverged=self.diverged or None,
        )
        at_end = self.next == experiment.config.rounds - 1 or self.diverged
        due = (self.next + 1) % experiment.config.runtime.evaluate_every == 0
        if at_end or due or self._limit_after(metrics):  # the cost of a round may make it the last
            metrics = self._judged(metrics)
        warnings = self._advice.after(metrics)
        for text in warnings:
            log.warning("%s", text)
        limit = self._limit_after(metrics)
        metrics = replace(metrics, stopped_by=limit, warnings=warnings or None)
        return self._with_test_accuracy(metrics) if at_end or limit else metrics

    def _judged(self, metrics: RoundMetrics) -> RoundMetrics:
        """Return the metrics of a round with the scores of a test, on the images that rounds are judged on."""
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
        """Add the accuracy on the test set if rounds are judged on validation images; it is read once, at the end."""
        if self._experiment.validation is None:
            return metrics
        begun = time.perf_counter()
        judged = next(iter(self._experiment.test().values()))
        tested = replace(metrics, test_accuracy=judged.accuracy)
        return tested.with_test(time.perf_counter() - begun)

    def _limit_after(self, metrics: RoundMetrics) -> str | None:
        """Return the key of ``stop`` that is met once these metrics are recorded, or None."""
        return met(self._experiment.config.stop, self.standing.then(metrics))

    def _measure(self, metrics: RoundMetrics) -> float:
        """Return the value by which the best model is chosen; -1 for a round without a test."""
        value = getattr(metrics, self._experiment.config.runtime.best_by)
        return -1.0 if value is None else float(value)

    def _undo(self, why: str) -> None:
        """Go back to the state before the round. The bytes of the attempt were sent all the same."""
        log.warning("%s", why)
        traffic = self._experiment.fleet.traffic
        sent = traffic.since(self._sent_before)
        self._experiment.fleet.held_back.take()  # of the attempt that does not count
        self._experiment.undo_round(self._before)
        self._undone += sent
        # What is sent once in a run, the rows of a frozen bottom, stays sent.
        self._repeated += (sent - traffic.since(self._sent_before)).total()

    # --- between two rounds ------------------------------------------------------------------------

    def keep(self, metrics: RoundMetrics) -> list[Path]:
        """Record a finished round and return the checkpoints written, which are of good states only.

        After a diverged round that is the state at its start, so that a resumed run repeats it.
        """
        config = self._experiment.config
        improved = not self.diverged and self._measure(metrics) > self._highest
        if improved:
            self._highest = self._measure(metrics)
        self._history.append(metrics.as_dict())
        self.standing = self.standing.then(metrics)
        self._undone.clear()
        self._left_out = None
        self.next += 1
        if self._directory is None:
            return []
        # Before the checkpoint: resuming drops a line too many, but cannot restore a missing one.
        self._directory.record.write(metrics)
        if improved:
            self._best_state = checkpoint.snapshot(self._model_state())
        if self.diverged:
            return self._write(self._before)
        due = self.ended or self.next % config.runtime.checkpoint_every == 0
        return self.save() if due else []

    def save(self) -> list[Path]:
        """Write the state after the last round if the latest checkpoint has another; return the files written."""
        if self.diverged or self._saved_round == self.next:
            return []
        return self._write(self._state())

    def save_unfinished(self) -> list[Path]:
        """Write the state at the start of the unfinished round; return the files written."""
        return self._write(self._before) if self._before and not self.diverged else []

    def _write(self, state: dict[str, Any]) -> list[Path]:
        """Write ``state`` as the latest checkpoint, and the best model since the last; return the files written.

        A state with NaN or Inf anywhere, as in a queue of keys, is not written: it could not be continued from.
        """
        if self._directory is None:
            return []
        if not checkpoint.finite(state["method"]):
            log.warning("the state holds NaN or Inf and is not written; the previous one is kept")
            return []
        written = []
        if self._directory.save_latest(state):
            self._saved_round = state["round"]
            written.append("latest")
        # If that fails, the best one waits for the next attempt.
        if self._best_state is not None and self._directory.save("best", self._best_state):
            self._best_state = None
            written.append("best")
        return [self._directory.path / f"{name}.safetensors" for name in written]

    def _state(self) -> dict[str, Any]:
        """Return all that the next round depends on, and the model."""
        return {**self._experiment.state_dict(), **self._model_state()}

    def _model_state(self) -> dict[str, Any]:
        """Return the model and its description: all that is needed to use it, not to train on."""
        tested = next((line for line in reversed(self._history) if "accuracy" in line), None)
        model = self._experiment.model_state(tested and RoundMetrics.from_dict(tested))
        return {"round": self.next, "model": model}

    def result(self, *, stopped: bool) -> Result:
        """Return the result of the rounds so far; ``stopped``: the run was asked to end."""
        tested = [line["accuracy"] for line in self._history if "accuracy" in line]
        return Result(
            accuracy=tested[-1] if tested else math.nan,
            best=self.standing.best or 0.0,
            test_accuracy=self._history[-1].get("test_accuracy") if self._history else None,
            model=self._experiment.model,
            rounds=self._history,
            stopped=stopped,
            stopped_by=None if stopped else self.limit,
            directory=self._directory.path if self._directory else None,
            diverged=self.diverged,
        )


def not_finite(method: Method, metrics: MethodMetrics) -> str | None:
    """Return which loss or weights of a round hold NaN or Inf, as a line for the log; None if all are finite.

    ``metrics`` is what the method's ``round`` returned; raises ValueError if that is no `MethodMetrics`. The weights
    are those of the tested models, read once from the device for all their parts together.
    """
    if not isinstance(metrics, MethodMetrics):
        raise ValueError(
            f"round() of {type(method).__name__} returned a {type(metrics).__name__}; it must return a "
            "semisfl.metrics.MethodMetrics"
        )
    for name, value in vars(metrics).items():
        if name.startswith("loss_") and value is not None and not math.isfinite(value):
            return f"{name} is {value:g}"
    norms = {
        f"{name} {part}": torch.nn.utils.get_total_norm(weights)
        for name, model in method.tested().items()
        for part, module in model.named_children()
        if (weights := [parameter.detach() for parameter in module.parameters()])
    }
    values = torch.stack([*norms.values()]).tolist() if norms else []
    for name, norm in zip(norms, values, strict=True):
        if not math.isfinite(norm):
            return f"the weights of the {name} have the norm {norm:g}"
    return None
