"""Compare clients spread over the ranks of torchrun with the same clients in one process, in one run.

    torchrun --nproc-per-node N -m reproduction.benchmarks.cluster

Each iteration is the fleet's part of a step: features from every active client, gradients back, a
step of every bottom. Rank 0 measures both and prints JSON; while it measures one process, which then has as many threads
as all ranks together, the others wait.
"""

import json
import time
from statistics import median
from typing import Any

import numpy as np
import torch

from semisfl.data import sources
from semisfl.data.partition import Partition
from semisfl.engine.hardware import Hardware
from semisfl.fleet.base import Fleet, SplitRound
from semisfl.fleet.cluster.cluster_fleet import ClusterFleet
from semisfl.fleet.cluster.rank_worker import RankWorker
from semisfl.fleet.cluster.ranks import Ranks
from semisfl.fleet.local import LocalFleet
from semisfl.fleet.setup import FleetSetup
from semisfl.runs.experiment import fleet_setup
from semisfl.settings import presets
from semisfl.settings.config import Config, override, parse

ACTIVE = {10: 10, 100: 3, 1000: 1}
"""Iterations that are timed, by how many clients are active; one more comes before."""
BATCH = 4
"""Images per client, so that a thousand of them fit into minutes."""


def prepare(config: Config) -> FleetSetup:
    """Return the embedded digits with an equal share for every client."""
    data = sources.load("digits")
    labeled, unlabeled = np.split(np.arange(len(data.images)), [40])
    total = config.clients.total
    partition = Partition(labeled, tuple(unlabeled[client::total] for client in range(total)))
    return fleet_setup(config, data, partition, Hardware("cpu", config.runtime))


def seconds(fleet: Fleet, setup: FleetSetup, steps: int) -> float:
    """Return the time of the median iteration."""
    bottom = setup.model.bottom.state_dict()
    active = tuple(range(setup.config.clients.active))
    fleet.start_round(SplitRound(0, active, steps + 1, 0.02, bottom, bottom))
    times = []
    for _ in range(steps + 1):
        started = time.perf_counter()
        features = fleet.forward()
        fleet.backward(torch.full_like(features.student, 1e-3))
        times.append(time.perf_counter() - started)
    fleet.finish_round()
    return median(times[1:])


def seconds_alone(setup: FleetSetup, steps: int, cores: int) -> float:
    """Return the seconds in one process with the cores of all ranks, and then the threads of one rank."""
    threads = torch.get_num_threads()
    torch.set_num_threads(threads * cores)
    try:
        return seconds(LocalFleet(setup), setup, steps)
    finally:
        torch.set_num_threads(threads)


def measure(ranks: Ranks, active: int, steps: int) -> dict[str, Any]:
    clients = [f"clients.total={active}", f"clients.active={active}", f"clients.batch={BATCH}"]
    setup = prepare(parse(override(presets.digits(), clients)))
    alone = seconds_alone(setup, steps, ranks.count)
    fleet = ClusterFleet(setup, ranks)
    fleet.open(None)
    spread = seconds(fleet, setup, steps)
    fleet.close(finished=True)
    rows = setup.config.clients.batch * active
    crossing = rows * setup.model.features * 4 * 3 * (ranks.count - 1) // ranks.count
    return {
        "active": active,
        "one_process_ms": round(1e3 * alone, 2),
        "cluster_ms": round(1e3 * spread, 2),
        "times_faster": round(alone / spread, 2),
        "bytes_between_ranks": crossing,
    }


def main() -> None:
    ranks = Ranks.join(torch.device("cpu"))
    if ranks.rank > 0:
        for _ in ACTIVE:
            RankWorker(ranks, prepare).serve()
        ranks.leave()
        return
    measured = [measure(ranks, active, steps) for active, steps in ACTIVE.items()]
    ranks.leave()
    about = {"ranks": ranks.count, "batch": BATCH, "threads_a_rank": torch.get_num_threads()}
    print(json.dumps({**about, "rows": measured}, indent=2))


if __name__ == "__main__":
    main()
