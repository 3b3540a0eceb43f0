"""The other ranks of torchrun, as rank 0 begins and ends them."""

from collections.abc import Callable
from contextlib import suppress

from semisfl.fleet.cluster.ranks import RankLost, Ranks, launch
from semisfl.fleet.setup import FleetSetup
from semisfl.settings.config import ConfigError


class Crew:
    """Rank 0's side of all other ranks, from their first command to their end."""

    def __init__(self, setup: FleetSetup, ranks: Ranks | None = None) -> None:
        """Join torchrun's ranks, unless ``ranks`` is passed."""
        if ranks is None and launch() is None:
            raise ConfigError(
                "fleet.kind = 'cluster' needs the ranks of torchrun: start it with "
                "torchrun --nproc-per-node N -m semisfl run ..., or use fleet.kind = local"
            )
        self._setup, self._joined, self._ended = setup, ranks is None, False
        self.ranks = ranks or Ranks.join(setup.hardware.device)
        assert self.ranks.rank == 0, "the other ranks obey this one"

    def begin(self) -> None:
        """Let every rank load its images; raise `ConfigError` if a rank cannot, or if its images differ from rank 0's."""
        self.ranks.send_command(
            "begin", config=self._setup.config.model_dump(mode="json"), images=self._setup.digest()
        )
        for rank in self.ranks.others:
            if problem := self.ranks.reply_of(rank).get("problem"):
                raise ConfigError(f"rank {rank}: {problem}")

    def end(self, before: Callable[[], None] = lambda: None) -> None:
        """End the other ranks after ``before``, once. Ignore a lost rank."""
        if self._ended:
            return
        self._ended = True
        if not self.ranks.lost:
            with suppress(RankLost):
                before()
                self.ranks.send_command("end")
        if self._joined:
            self.ranks.leave()
