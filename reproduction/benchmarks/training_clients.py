"""Measure a server with many training clients, some of which die and return in every round.

    python -m reproduction.benchmarks.training_clients [--clients N] [--active N] [--rounds N] [--dying SHARE]

Without arguments: 1,000 clients with 100 of them active for 20 rounds, then all 1,000 active for 3.
The server is `semisfl serve`'s own; clients are real ones, each with its certificate, connection,
images and model, but those of one process take turns in one thread: what is measured is the server,
on a machine that also carries all its clients. Everything is on loopback with mutual TLS.
"""

import argparse
import json
import logging
import queue
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection as Pipe
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reproduction.benchmarks.loopback import PROCESSES, authority, connected, free_port, resident
from semisfl.data import partition, sources
from semisfl.data.dataset import Dataset
from semisfl.data.partition import Partition
from semisfl.fleet.setup import NetworkOptions
from semisfl.net.chunks import LoopThread
from semisfl.net.client.connection import Received
from semisfl.net.client.device import Device
from semisfl.net.client.owner import Approval, Owner
from semisfl.net.server.fleet import NetworkFleet
from semisfl.runs import start
from semisfl.runs.sinks import Observed
from semisfl.settings.config import Config, parse

CROWDS = 2
LABELED = 40


@dataclass(frozen=True)
class Case:
    clients: int = 1000
    active: int = 100
    rounds: int = 20
    dying: float = 0.05
    """The share of all clients that die, and return, in each round."""
    seed: int = 1

    def config(self) -> Config:
        layers = [
            {"kind": "conv", "channels": 8, "kernel": 5},
            {"kind": "relu"},
            {"kind": "pool", "size": 4},
            {"kind": "flatten"},
            {"kind": "linear"},
        ]
        return parse(
            {
                "rounds": self.rounds,
                "seed": self.seed,
                "data": {"name": "digits", "labeled": LABELED, "augment": {"flip": False}},
                "clients": {
                    "total": self.clients,
                    "active": self.active,
                    "batch": 4,
                    "steps": 4,
                },
                "server": {"batch": 20, "steps": 4},
                "model": {"layers": layers, "cut": 4, "projection": 32},
            }
        )

    def deaths(self, round_index: int, seconds: float) -> list[tuple[int, float]]:
        """Return which clients die in a round, and how long after its start if it takes ``seconds``."""
        rng = random.Random(f"{self.seed}/{round_index}")
        dying = rng.sample(range(self.clients), round(self.dying * self.clients))
        return [(client, rng.uniform(0, seconds)) for client in dying]


# --- the server's process -------------------------------------------------------------------------


class Repeated(logging.Handler):
    """Counts the rounds that had to be repeated."""

    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += "is repeated" in record.getMessage()


def serve(
    case: Case, folder: Path, port: int, data: Dataset, shares: Partition, pipe: Pipe
) -> None:
    """Serve a run; send through ``pipe`` when all clients are there, each round, and the outcome."""
    torch.set_num_threads(1)
    repeated = Repeated()
    logging.getLogger("semisfl").addHandler(repeated)
    with start.begin(
        case.config(),
        out=folder / "run",
        data=data,
        partition=Partition(shares.labeled, ()),
        device="cpu",
        network=NetworkOptions(f"localhost:{port}", folder),
    ) as run:
        fleet = run.experiment.fleet
        assert isinstance(fleet, NetworkFleet)
        alone, began = resident(), time.perf_counter()
        if not fleet.wait_for(case.clients, 600):
            sys.exit(f"only {len(fleet.present())} of {case.clients} clients came")
        connected = time.perf_counter() - began
        idle, cpu = resident(), time.process_time()
        pipe.send(None)
        descriptors = 0

        def observe(row: dict[str, Any]) -> None:
            nonlocal descriptors
            descriptors = max(descriptors, len(list(Path("/proc/self/fd").iterdir())))
            pipe.send(row)

        run.go([Observed(observe)])
        pipe.recv()  # all clients to be killed are dead, and restarting
        everybody_back = fleet.wait_for(case.clients, 120)
        peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        pipe.send(
            {
                "seconds_to_connect": round(connected, 1),
                "server_megabytes_alone": megabytes(alone),
                "server_megabytes_connected": megabytes(idle),
                "server_megabytes_after": megabytes(resident()),
                "server_megabytes_peak": megabytes(peak),
                "server_cpu_seconds_a_round": round((time.process_time() - cpu) / case.rounds, 2),
                "descriptors": descriptors,
                "rounds_repeated": repeated.count,
                "strikes": sum(fleet._listener.penalties.strikes.values()),
                "everybody_back": everybody_back,
            }
        )


def megabytes(size: int) -> float:
    return round(size / 2**20, 1)


# --- the clients' processes -----------------------------------------------------------------------


class AcceptsAll(Approval):
    """The approval of an owner who accepts any terms."""

    def check(self, digest: str) -> None:
        pass


class Client:
    """A real device that does not block on its frames; they arrive through ``events`` too."""

    def __init__(self, number: int, crowd: "Crowd") -> None:
        self.number, self._crowd = number, crowd
        self.dead = False
        owner = Owner(approval=AcceptsAll())
        self.link = connected(number, crowd.folder, crowd.port, crowd.thread, self, owner)
        images = crowd.images[number]
        self.device = Device(self.link, lambda shape: (images, 0), "cpu")

    def put(self, item: object) -> None:
        self._crowd.events.put((self, item))

    def qsize(self) -> int:
        """Return 0: frames wait in the crowd's events, not here."""
        return 0


class Crowd:
    """The clients of one process. Each computes for itself, one at a time."""

    def __init__(self, folder: Path, port: int, images: dict[int, Tensor]) -> None:
        self.folder, self.port, self.images = folder, port, images
        self.thread = LoopThread("crowd")
        self.events: queue.SimpleQueue[tuple[Client, object]] = queue.SimpleQueue()
        self.clients = {number: Client(number, self) for number in images}
        self.rng = random.Random(min(images))
        self.died = self.returned = self.shut_out = 0

    def later(self, seconds: float, client: Client, what: str) -> None:
        loop = self.thread.loop
        event = partial(self.events.put, (client, what))
        loop.call_soon_threadsafe(partial(loop.call_later, seconds, event))

    def go_on(self) -> None:
        """Handle the next event of one of the clients."""
        try:
            client, item = self.events.get(timeout=0.1)
        except queue.Empty:
            return
        current = self.clients[client.number]
        if item == "return":
            self.clients[client.number] = Client(client.number, self)
            self.returned += 1
        elif item == "die" and current.dead:
            self.later(0.5, client, "die")  # once it has returned from the last kill
        elif item == "die":
            current.dead = True
            self.died += 1
            current.link.kill()
            self.later(self.rng.uniform(0.1, 1.0), current, "return")
        elif current is not client or client.dead:
            pass  # frames that were on their way to a killed client
        elif isinstance(item, Received):
            client.device.handle(item)
        elif isinstance(item, Exception):
            self.shut_out += 1
            print(f"client-{client.number}: {item}", file=sys.stderr)


def run_clients(folder: Path, port: int, images: dict[int, Tensor], pipe: Pipe) -> None:
    """Run clients until the end. ``pipe`` names the clients to kill and when; None asks for their state."""
    logging.disable(logging.CRITICAL)  # a thousand clients start before their server
    torch.set_num_threads(1)
    crowd, to_die, asked = Crowd(folder, port, images), 0, False
    while True:
        crowd.go_on()
        if asked and crowd.returned == to_die:
            asked = False
            pipe.send({name: getattr(crowd, name) for name in ("died", "returned", "shut_out")})
        if not pipe.poll():
            continue
        deaths = pipe.recv()
        asked = deaths is None
        for number, seconds in deaths or ():
            if number in crowd.clients:
                to_die += 1
                crowd.later(seconds, crowd.clients[number], "die")


# --- both -----------------------------------------------------------------------------------------


def measure(case: Case) -> dict[str, Any]:
    torch.set_num_threads(1)  # a fork does not survive the threads of torch either
    data = sources.load("digits")
    shares = partition.split(
        data.labels.numpy(),
        labeled=LABELED,
        clients=case.clients,
        kind="iid",
        seed=case.seed,
        classes=len(data.classes),
    )
    with tempfile.TemporaryDirectory() as place:
        folder, port = Path(place), free_port()
        authority(folder, case.clients)
        # All forked before this process starts a gRPC thread, because a fork with one would hang.
        near, far = PROCESSES.Pipe()
        processes = [
            PROCESSES.Process(
                target=serve, args=(case, folder, port, data, shares, far), daemon=True
            )
        ]
        pipes = []
        for crowd in range(CROWDS):
            numbers = range(crowd, case.clients, CROWDS)
            images = {number: data.images[shares.clients[number]] for number in numbers}
            ours, theirs = PROCESSES.Pipe()
            pipes.append(ours)
            processes.append(
                PROCESSES.Process(
                    target=run_clients, args=(folder, port, images, theirs), daemon=True
                )
            )
        try:
            for process in processes:
                process.start()
            return _results(case, near, pipes, processes)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _results(
    case: Case, server: Pipe, crowds: Sequence[Pipe], processes: Sequence[BaseProcess]
) -> dict[str, Any]:
    def received_from(pipe: Pipe) -> Any:
        while not pipe.poll(1.0):
            for process in processes:
                if process.exitcode is not None:
                    sys.exit(f"a process of the benchmark ended with status {process.exitcode}")
        return pipe.recv()

    rows: list[dict[str, Any]] = []
    while len(rows) < case.rounds:
        if (row := received_from(server)) is not None:
            rows.append(row)
        last = rows[-1]["seconds"] if rows else 1.0
        for crowd in crowds:
            crowd.send(case.deaths(len(rows), last) if len(rows) < case.rounds else None)
    states = [received_from(crowd) for crowd in crowds]
    server.send(None)
    seconds = [row["seconds"] for row in rows]
    return {
        **asdict(case),
        "round_seconds_median": round(statistics.median(seconds), 2),
        "round_seconds_max": round(max(seconds), 2),
        "rounds_lost": case.rounds - len({row["round"] for row in rows}),
        "answers_lost": sum(case.active - row["contributing"] for row in rows),
        **received_from(server),
        **{name: sum(each[name] for each in states) for name in states[0]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=Case.clients)
    parser.add_argument("--active", type=int, help="of them in a round; one case only")
    parser.add_argument("--rounds", type=int, default=Case.rounds)
    parser.add_argument("--dying", type=float, default=Case.dying, help="share of all, each round")
    options = parser.parse_args()
    cases = [(options.active or min(Case.active, options.clients), options.rounds)]
    if options.active is None:
        cases.append((options.clients, 3))
    for active, rounds in cases:
        result = measure(Case(options.clients, active, rounds, options.dying))
        print(json.dumps({"benchmark": "training_clients", **result}), flush=True)


if __name__ == "__main__":
    main()
