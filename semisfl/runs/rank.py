"""Take part in a run that torchrun started: rank 0 leads it, the other ranks serve it."""

from semisfl.engine.hardware import Hardware
from semisfl.fleet.cluster.rank_worker import RankWorker
from semisfl.fleet.cluster.ranks import Launch, Ranks
from semisfl.fleet.setup import FleetSetup
from semisfl.runs.experiment import fleet_setup
from semisfl.runs.run_data import load_data
from semisfl.settings.config import Config
from semisfl.stopping import StopFlag


def on_ranks(config: Config) -> Config:
    """Return ``config`` with the simulated clients spread over all ranks."""
    return config.in_fleet("cluster") if config.fleet.kind == "local" else config


def in_one_process(config: Config) -> Config:
    """Return ``config`` with the simulated clients of all ranks in this process; the numbers stay the same."""
    return config.in_fleet("local") if config.fleet.kind == "cluster" else config


class OtherRank:
    """A rank other than the first. The constructor waits until all ranks have joined."""

    def __init__(self, launched: Launch, device: str, stop: StopFlag) -> None:
        self._device, self._stop = launched.device(device), stop
        self._ranks = Ranks.join(Hardware(self._device).device)

    def serve(self) -> None:
        """Serve until rank 0 ends the run; raise `RankLost` if rank 0 is gone."""
        RankWorker(self._ranks, self._prepare).serve()
        self._ranks.leave()

    def _prepare(self, config: Config) -> FleetSetup:
        data, partition = load_data(config)
        hardware = Hardware(self._device, config.runtime)
        return fleet_setup(config, data, partition, hardware, stop=self._stop)
