"""Write a run's metrics for TensorBoard. Needs the package ``tensorboard``, and no TensorFlow."""

from torch.utils.tensorboard import SummaryWriter

from semisfl.metrics import RoundMetrics
from semisfl.runs.sinks import RunInfo
from semisfl.settings.config import ConfigError

FOLDER = "tensorboard"
GROUPS = ("loss", "accuracy", "seconds", "bytes")
"""Metrics that begin so are shown together."""


class TensorBoard:
    """A sink that writes every number of a round into the run's folder ``tensorboard``.

    A resumed run replaces the rounds that it repeats.
    """

    def start(self, run: RunInfo) -> None:
        """Open the folder ``tensorboard`` of the run."""
        if run.directory is None:
            raise ConfigError("the sink tensorboard writes into a run's directory; give out=...")
        self._writer = SummaryWriter(str(run.directory / FOLDER), purge_step=run.first)

    def write(self, metrics: RoundMetrics) -> None:
        """Write every number of a round, at the round's index."""
        sent = {f"bytes_{kind}": size for kind, size in (metrics.bytes or {}).items()}
        for key, value in (metrics.numbers() | sent).items():
            self._writer.add_scalar(_tag(key), value, metrics.round)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def _tag(key: str) -> str:
    group, _, rest = key.partition("_")
    return f"{group}/{rest or 'all'}" if group in GROUPS else key
