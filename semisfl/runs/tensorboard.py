"""A run's rows as TensorBoard shows them. Needs the package ``tensorboard``, and no TensorFlow."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from semisfl.metrics import RoundMetrics
from semisfl.runs.sinks import RunInfo
from semisfl.settings.config import ConfigError

FOLDER = "tensorboard"
GROUPS = ("loss", "accuracy", "seconds", "bytes")
"""Metrics that begin so are shown together."""


class TensorBoard:
    """Every number of a row, with its round as the step; a resumed run replaces what it repeats."""

    def start(self, run: RunInfo) -> None:
        if run.directory is None:
            raise ConfigError("the sink tensorboard writes into a run's directory; give out=...")
        self._writer = SummaryWriter(str(run.directory / FOLDER), purge_step=run.first)

    def write(self, metrics: RoundMetrics) -> None:
        for tag, value in _scalars(metrics.as_dict()):
            self._writer.add_scalar(tag, value, metrics.round)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _scalars(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            if key == "bytes":
                yield from _scalars(value, "bytes/")
        elif isinstance(value, int | float) and key != "round":
            group, _, rest = key.partition("_")
            yield f"{group}/{rest or 'all'}" if group in GROUPS else prefix + key, float(value)
