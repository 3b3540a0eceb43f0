"""Compare the virtual clock with real rounds: a server and devices on loopback, each behind a slow connection.

    python -m reproduction.benchmarks.virtual_clock [--rounds N]

Devices are `semisfl join` processes. Each reaches the server through a relay in a process of its own that
lets so many bytes pass per second in each direction and holds every byte back for the latency. The clock is
given these connections, and this machine's speed as `bench --client` measures it. The connections are
so slow and the model is so small that nearly all of the time is spent on bytes: how long a shared machine
computes cannot be predicted. The first round is not compared, because processes then still allocate and
compile.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from reproduction.benchmarks.bench import client_gflops
from semisfl.costs.clock import MEGABIT, Range, World
from semisfl.costs.profiles import Device, Profile
from semisfl.costs.replay import replay
from semisfl.data import sources
from semisfl.data.dataset import Dataset
from semisfl.fleet.setup import NetworkOptions
from semisfl.net.server.fleet import NetworkFleet
from semisfl.runs import start
from semisfl.runs.grouping import read_run
from semisfl.settings.config import Config, parse

PROCESSES = multiprocessing.get_context("spawn")
LINKS = ((0.8, 10.0), (2.0, 15.0), (8.0, 20.0))
"""Mbit/s up and down of each device; the paper's limits and between them."""
LATENCY = 0.02
LAYERS = [
    {"kind": "conv", "channels": 4, "kernel": 5},
    *({"kind": "relu"}, {"kind": "flatten"}),
    *({"kind": "linear", "features": 256}, {"kind": "relu"}, {"kind": "linear"}),
]
"""Long features and a wide layer, and little to compute."""
IMAGES, LABELED, TESTED = 64, 20, 50
PIECE = 1 << 12


@dataclass(frozen=True)
class GivenLinks(World):
    """Return every device's configured connection in every round."""

    links: tuple[tuple[float, float], ...] = LINKS

    def rates(self, round_index: int, client: int) -> tuple[float, float]:
        up, down = self.links[client]
        return up * MEGABIT, down * MEGABIT


def settings(method: str, rounds: int) -> Config:
    return parse(
        {
            "method": method,
            "rounds": rounds,
            "data": {"name": "digits", "labeled": LABELED},
            "clients": {"total": len(LINKS), "active": len(LINKS), "batch": 32, "steps": 3},
            "model": {"layers": LAYERS, "projector": "linear"},
            "server": {"batch": 8, "steps": 1},
            "network": {"quorum": len(LINKS)},
            "runtime": {"evaluate_every": 1000},
            "fedswitch": {"iid_threshold": 99.0},
        }
    )


def compare(method: str, rounds: int, speed: float) -> list[dict[str, Any]]:
    """Return the seconds of each round but the first, real and virtual; ``speed``: GFLOP/s of this machine."""
    data = sources.load("digits")
    few = replace(
        data,
        images=data.images[:LABELED],
        labels=data.labels[:LABELED],
        test_images=data.test_images[:TESTED],
        test_labels=data.test_labels[:TESTED],
    )
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        with (
            start.begin(
                settings(method, rounds),
                out=place / "run",
                data=few,
                device="cpu",
                network=NetworkOptions("127.0.0.1:0", None, True),
            ) as run,
            ExitStack() as stack,
        ):
            fleet = run.experiment.fleet
            assert isinstance(fleet, NetworkFleet)
            for number, link in enumerate(LINKS):
                name = f"device-{number}"
                write_images(data, number, place / name)
                port = stack.enter_context(relay(fleet.port, *link))
                stack.enter_context(device(name, place / name, port, fleet.terms.digest))
                # Started in turn: the first to connect is client 0, which has the first connection.
                assert fleet.wait_for(number + 1, 120)
            run.go()
        profile = Profile(server_gflops=speed, devices=(Device(name="here", gflops=speed),))
        world = GivenLinks(Range(1, 1), Range(1, 1), LATENCY, profile)
        recorded = read_run(place / "run")
        virtual = replay(recorded, world).seconds
        compared = []
        for metrics, seconds in zip(recorded.rounds, virtual, strict=True):
            measured = metrics.seconds_training or 0.0
            error = seconds / measured - 1
            numbers = {"measured": measured, "virtual": seconds, "error": error}
            compared.append({"method": method, "round": metrics.round, **numbers})
        return compared[1:]


def write_images(data: Dataset, number: int, place: Path) -> None:
    place.mkdir()
    first = LABELED + number * IMAGES
    for index in range(first, first + IMAGES):
        Image.fromarray(data.images[index][0].numpy()).save(place / f"{index}.png")


@contextmanager
def device(name: str, images: Path, port: int, digest: str) -> Iterator[None]:
    policy = images.with_suffix(".toml")
    policy.write_text("full_models = true\n")
    options = ["--data", str(images), "--insecure-loopback", "--name", name, "--device", "cpu"]
    options += ["--policy", str(policy), "--accept", digest]
    command = [sys.executable, "-m", "semisfl", "join", f"127.0.0.1:{port}", *options]
    process = subprocess.Popen(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait()


# --- a slow connection -------------------------------------------------------------------------------------


@contextmanager
def relay(target: int, up: float, down: float) -> Iterator[int]:
    """Start a process that carries bytes to port ``target`` and back at these Mbit/s; return its port."""
    mine, its = PROCESSES.Pipe()
    process = PROCESSES.Process(target=_serve, args=(its, target, up, down), daemon=True)
    process.start()
    try:
        yield int(mine.recv())
    finally:
        process.terminate()
        process.join()


def _serve(pipe: Pipe, target: int, up: float, down: float) -> None:
    asyncio.run(_listen(pipe, target, up * MEGABIT, down * MEGABIT))


async def _listen(pipe: Pipe, target: int, up: float, down: float) -> None:
    async def accept(near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        far, forth = await asyncio.open_connection("127.0.0.1", target)
        await asyncio.gather(_carry(near, forth, up), _carry(far, back, down))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    pipe.send(server.sockets[0].getsockname()[1])
    await server.serve_forever()


async def _carry(source: asyncio.StreamReader, sink: asyncio.StreamWriter, rate: float) -> None:
    """Send the pieces in order: each takes the time of its bytes, and arrives one latency later.

    The time of arrival follows from the time of receipt, not from when this busy process handled it.
    """
    clock, free = asyncio.get_running_loop().time, 0.0
    on_its_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
    deliver = asyncio.create_task(_deliver(on_its_way, sink))
    piece = b"begin"
    while piece:
        try:
            piece = await source.read(PIECE)
        except ConnectionError:
            piece = b""
        free = max(free, clock()) + len(piece) / rate
        on_its_way.put_nowait((free + LATENCY, piece))
    await deliver


async def _deliver(
    on_its_way: "asyncio.Queue[tuple[float, bytes]]", sink: asyncio.StreamWriter
) -> None:
    clock = asyncio.get_running_loop().time
    while True:
        due, piece = await on_its_way.get()
        if due > clock():
            await asyncio.sleep(due - clock())
        if not piece:
            break
        sink.write(piece)
        await sink.drain()
    sink.close()


def measure(methods: Sequence[str], rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    speed = client_gflops("digits", "cpu")
    rows = [one for method in methods for one in compare(method, rounds, speed)]
    return {
        "links_mbps": LINKS,
        "latency": LATENCY,
        "gflops": speed,
        "rounds": rows,
        "load": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4)
    arguments = parser.parse_args()
    print(json.dumps(measure(("semisfl", "fedswitch"), arguments.rounds), indent=1))


if __name__ == "__main__":
    main()
