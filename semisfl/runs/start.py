"""Starting a run, and going on with one."""

from pathlib import Path
from typing import Any

from torch import nn

from semisfl.config import Config
from semisfl.data.partition import Partition
from semisfl.data.sources import Dataset
from semisfl.runs.directory import RunDirectory
from semisfl.runs.experiment import assemble
from semisfl.runs.loop import Observer, Result, run_rounds


def train(
    config: Config,
    *,
    data: Dataset | None = None,
    partition: Partition | None = None,
    model: nn.Sequential | None = None,
    device: str = "auto",
    out: Path | str | None = None,
    observe: Observer | None = None,
) -> Result:
    """Train as ``config`` says; with ``out``, keep a run directory there."""
    experiment = assemble(config, data, partition, model, device)
    # Only now: a mistake found above leaves no directory behind to stand in the next try's way.
    directory = RunDirectory.create(Path(out), config) if out is not None else None
    return run_rounds(experiment, directory, observe=observe)


def resume(
    path: Path | str, *, device: str = "auto", observe: Observer | None = None, **own: Any
) -> Result:
    """Continue the run in ``path`` from its latest checkpoint; ``own`` data and model as in `train`."""
    directory = RunDirectory.open(Path(path))
    experiment = assemble(directory.config(), device=device, **own)
    return run_rounds(experiment, directory, state=directory.load("latest"), observe=observe)
