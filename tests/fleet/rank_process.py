"""Ranks for tests: processes that are started once and serve one fleet after another.

The process of the tests is rank 0. A fleet of two ranks uses the first two of the four.
"""

import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache

import torch
from torch import distributed as dist

from semisfl.engine.hardware import Hardware
from semisfl.fleet.cluster.rank_worker import RankWorker
from semisfl.fleet.cluster.ranks import Ranks
from semisfl.fleet.setup import FleetSetup
from semisfl.runs.experiment import fleet_setup
from semisfl.settings.config import Config
from tests.net.harness import toy_data
from tests.processes import Forked

CPU = torch.device("cpu")
COUNTS = (2, 4)
WORLD = max(COUNTS)


class World:
    """All ranks, and groups of some of them."""

    def __init__(self, rank: int, port: int) -> None:
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=WORLD)
        self.all = Ranks(CPU)
        self._groups = {count: dist.new_group(list(range(count))) for count in COUNTS}

    def first(self, count: int) -> Ranks:
        return Ranks(CPU, self._groups[count])

    def start(self, count: int) -> Ranks:
        """Have the first ``count`` ranks serve a fleet; for rank 0."""
        self.all.send_command("serve", count=count)
        return self.first(count)

    def all_answer(self) -> bool:
        """Return whether every rank replies, as only one without a fleet does."""
        self.all.send_command("ping")
        return all(self.all.reply_of(rank)["rank"] == rank for rank in self.all.others)

    def serve(self) -> None:
        """Serve fleets, as a rank other than the first."""
        while (message := self.all.next_command())["do"] != "quit":
            if message["do"] == "ping":
                self.all.reply(rank=self.all.rank)
            elif self.all.rank < message["count"]:
                RankWorker(self.first(message["count"]), prepare).serve()


def prepare(config: Config) -> FleetSetup:
    data, partition = toy_data(config.clients.total)
    return fleet_setup(config, data, partition, Hardware("cpu", config.runtime))


@contextmanager
def world() -> Iterator[World]:
    """Start the other ranks; end them after the block."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.fleet.rank_process"]
    others = [Forked([*command, str(rank), str(port)]) for rank in range(1, WORLD)]
    try:
        made = World(0, port)
        yield made
        made.all.send_command("quit")
        dist.destroy_process_group()
        assert [process.wait(60) for process in others] == [0] * len(others)
    finally:
        for process in others:
            process.kill()


_kept = ExitStack()


@cache
def there() -> World:
    """The ranks of this session of tests, started when first asked for."""
    return _kept.enter_context(world())


def end() -> None:
    _kept.close()


if __name__ == "__main__":
    others = World(int(sys.argv[1]), int(sys.argv[2]))
    others.serve()
    dist.destroy_process_group()
