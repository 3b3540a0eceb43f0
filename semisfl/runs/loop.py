"""Run the rounds: train, test, save; undo and repeat a round that failed."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack

from semisfl.runs import run_log
from semisfl.runs.between_rounds import Rounds
from semisfl.runs.callbacks import Callback, tell_checkpoints, tell_round
from semisfl.runs.directory import RunDirectory
from semisfl.runs.experiment import Experiment
from semisfl.runs.health import Health, Usual
from semisfl.runs.result import Result
from semisfl.runs.sinks import RunInfo, Sink
from semisfl.settings.counts import counted
from semisfl.stopping import Stopped

log = logging.getLogger(__name__)


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
    rounds = Rounds(experiment, directory, health, first, best)
    with ExitStack() as stack:
        if directory is not None:
            stack.enter_context(run_log.written(directory.path / "run.log"))
        info = RunInfo(config, first, directory.path if directory is not None else None)
        for sink in sinks:
            sink.start(info)
            stack.callback(sink.close)
        device = experiment.hardware.device
        if first >= config.rounds:
            log.info("%s, %s done", config.method, counted(config.rounds, "round"))
        else:
            log.info("%s, rounds %d to %d on %s", config.method, first + 1, config.rounds, device)
            try:
                rounds.test_end()
            except Stopped:
                return rounds.result(stopped=True)
        while rounds.next < config.rounds and rounds.limit is None:
            try:
                metrics = rounds.attempt()
            except Stopped:
                tell_checkpoints(callbacks, rounds.save_unfinished())
                log.info("stopped before round %d was complete", rounds.next + 1)
                return rounds.result(stopped=True)
            if metrics is None:
                continue
            saved = rounds.keep(metrics)
            try:
                for sink in sinks:
                    sink.write(metrics)
                ended = tell_round(callbacks, metrics, experiment.model, saved)
            except BaseException:
                rounds.save_now()
                raise
            if ended and rounds.next < config.rounds and rounds.limit is None:
                tell_checkpoints(callbacks, rounds.save_now())
                log.info("stopped by a callback after round %d", rounds.next)
                return rounds.result(stopped=True)
        rounds.tell_end()
    return rounds.result(stopped=False)
