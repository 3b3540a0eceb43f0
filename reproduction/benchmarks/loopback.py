"""A server with mutual TLS on this machine, and what its clients need, for benchmarks."""

import multiprocessing
import resource
import socket
from pathlib import Path

from torch import nn

from semisfl.engine.hardware import Hardware
from semisfl.fleet.setup import FleetSetup, NetworkOptions
from semisfl.models.split import SplitModel
from semisfl.net.chunks import LoopThread
from semisfl.net.client.connection import Connection, Target
from semisfl.net.client.owner import Owner
from semisfl.net.server.fleet import NetworkFleet
from semisfl.net.tls import certs
from semisfl.settings.config import Config, parse

BATCH, FEATURES = 64, 4096  # student and teacher features 2 MiB, gradients 1 MiB
CLIENTS = 10
PROCESSES = multiprocessing.get_context("fork")


def configuration(clients: int) -> Config:
    active = min(clients, CLIENTS)
    return parse(
        {"clients": {"total": clients, "active": active, "batch": BATCH, "steps": 1_000_000}}
    )


def model() -> SplitModel:
    """Return the smallest model with features of the wanted size; here only the bytes matter."""
    bottom = nn.Sequential(nn.Flatten(), nn.Linear(1, FEATURES))
    return SplitModel(bottom, nn.Sequential(nn.Linear(1, 1)), nn.Identity(), FEATURES)


def authority(folder: Path, clients: int) -> None:
    certs.make_authority(folder)
    certs.make_server(folder, ["localhost", "127.0.0.1"])
    for number in range(clients):
        certs.make_client(folder, f"client-{number}")


def server(folder: Path, clients: int, port: int = 0) -> NetworkFleet:
    setup = FleetSetup(
        configuration(clients),
        model(),
        Hardware("cpu"),
        (1, 8, 8),
        10,
        (0.5,),
        (0.5,),
        network=NetworkOptions(f"localhost:{port}", folder),
    )
    fleet = NetworkFleet(setup)
    fleet.open(None)
    return fleet


def free_port() -> int:
    with socket.create_server(("localhost", 0)) as free:
        return free.getsockname()[1]


def connected(
    number: int,
    folder: Path,
    port: int,
    thread: LoopThread,
    inbox: object,
    owner: Owner | None = None,
) -> Connection:
    """Return the connection of a client whose frames go to ``inbox``."""

    async def connect() -> Connection:
        credentials = certs.load_client_credentials(folder, f"client-{number}")
        link = Connection(Target(f"localhost:{port}", credentials), owner, thread=thread)
        link._inbox = inbox  # type: ignore[assignment]
        return link

    # On the loop, so that no frame arrives before the inbox is there.
    return thread.call(connect())


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()
