"""A run that torchrun started: rank 0 leads it, the other ranks take part in it."""

from semisfl.engine.hardware import Hardware
from semisfl.fleet.cluster.rank_worker import RankWorker
from semisfl.fleet.cluster.ranks import Launch, Ranks
from semisfl.fleet.setup import FleetSetup
from semisfl.runs.experiment import fleet_setup, load_data
from semisfl.settings.config import Config
from semisfl.stopping import StopFlag


def on_ranks(config: Config) -> Config:
    """``config`` with the clients of this process spread over all of them."""
    if config.fleet.kind != "local":
        return config
    return config.model_copy(update={"fleet": config.fleet.model_copy(update={"kind": "cluster"})})


class TakingPart:
    """A rank other than the first; made once it has met the others."""

    def __init__(self, told: Launch, device: str, stop: StopFlag) -> None:
        self._device, self._stop = told.device(device), stop
        self._ranks = Ranks.join(Hardware(self._device).device)

    def serve(self) -> None:
        """Until rank 0 says that the run is over; raises `RankLost` if it is gone."""
        RankWorker(self._ranks, self._prepare).serve()
        self._ranks.leave()

    def _prepare(self, config: Config) -> FleetSetup:
        data, partition = load_data(config)
        hardware = Hardware(self._device, config.runtime)
        return fleet_setup(config, data, partition, hardware, stop=self._stop)
