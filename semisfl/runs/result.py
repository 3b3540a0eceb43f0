"""The result of a run, which `train` returns."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from semisfl.runs.reading import columns


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
