"""Callbacks: methods of the caller of `train` that are called during a run and may end it early."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from torch import nn

from semisfl.metrics import RoundMetrics


class Callback:
    """Base class of callbacks: override the methods you need.

    Each may return True to end the run after the current round; `train` then returns its `Result`. An exception
    ends the run and reaches the caller. Either way a run with a directory first writes a checkpoint.
    """

    def on_round(self, metrics: RoundMetrics) -> bool | None:
        """Called after each recorded round."""

    def on_evaluation(self, metrics: RoundMetrics, model: nn.Module) -> bool | None:
        """Called after each tested round with the tested ``model``, which training changes afterwards.

        Its layers are back in their modes (``train``, ``eval``) after the call.
        """

    def on_checkpoint(self, path: Path) -> bool | None:
        """Called after a checkpoint is written, ``latest.safetensors`` or ``best.safetensors``."""


def tell_round(
    callbacks: Sequence[Callback],
    metrics: RoundMetrics,
    model: nn.Module,
    checkpoints: Iterable[Path],
) -> bool:
    """Call every callback about a finished round; return whether one of them ends the run."""
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
