"""Write the checkpoints of a run: the latest state and the best model, good states only."""

import logging
from pathlib import Path
from typing import Any

from semisfl.runs import checkpoint
from semisfl.runs.directory import RunDirectory
from semisfl.runs.health import finite

log = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of one run; without a directory none are written."""

    def __init__(self, directory: RunDirectory | None, first: int) -> None:
        self._directory = directory
        self.round = first
        """The next round as the latest checkpoint has it."""
        self._best: dict[str, Any] | None = None

    def keep_best(self, state: dict[str, Any]) -> None:
        """Keep the best ``state`` until the next checkpoint is written."""
        self._best = checkpoint.snapshot(state)

    def write(self, state: dict[str, Any]) -> list[Path]:
        """Write ``state`` and the best one; return the files written, none if it holds NaN or Inf."""
        if self._directory is None:
            return []
        if not finite(state["method"]):
            log.warning("the state holds NaN or Inf and is not written; the previous one is kept")
            return []
        written = []
        if self._directory.save_latest(state):
            self.round = state["round"]
            written.append("latest")
        # If that fails, the best one waits for the next attempt.
        if self._best is not None and self._directory.save("best", self._best):
            self._best = None
            written.append("best")
        return [self._directory.path / f"{name}.safetensors" for name in written]
