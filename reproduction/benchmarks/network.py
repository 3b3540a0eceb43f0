"""Compare an iteration over the network with the same bytes through bare TLS sockets, in one run.

    python -m reproduction.benchmarks.network

Devices are `semisfl join` processes on loopback with mutual TLS. Their model is nearly nothing but bytes:
64 images give 2 MiB of features up, and 1 MiB of gradients comes down. The two loops take turns, and the
clients of the other one are paused, so that a busy machine disturbs both alike. Prints JSON.
"""

import contextlib
import json
import multiprocessing
import multiprocessing.pool
import os
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from PIL import Image

from semisfl.fleet.base import Fleet, SplitRound, State
from semisfl.fleet.setup import NetworkOptions
from semisfl.net.server.fleet import NetworkFleet
from semisfl.net.tls import certs
from semisfl.runs import start
from semisfl.settings.config import Config, parse

BATCH, FEATURES = 64, 4096
UP, DOWN = 8 * BATCH * FEATURES, 4 * BATCH * FEATURES
"""Bytes of an iteration per client: student and teacher features, and gradients."""
PASSES = 5
LAYERS = [{"kind": "flatten"}, {"kind": "linear", "features": FEATURES}, {"kind": "linear"}]


def bare_client(folder: Path, number: int, port: int) -> None:
    """Send and receive an iteration's bytes through a TLS socket until the server is gone."""
    place = folder / "clients" / f"client-{number}"
    context = ssl.create_default_context(cafile=str(place / "authority.crt"))
    context.load_cert_chain(place / "client.crt", place / "client.key")
    connection = socket.create_connection(("localhost", port))
    stream = context.wrap_socket(connection, server_hostname="localhost")
    answers = stream.makefile("rb")
    while True:
        stream.sendall(bytes(UP))
        answers.read(DOWN)


def bare_loop(folder: Path, listener: socket.socket, clients: int) -> Callable[[], None]:
    """Return an iteration through bare sockets, one thread per client."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.crt", folder / "server.key")
    context.load_verify_locations(folder / "authority.crt")
    context.verify_mode = ssl.CERT_REQUIRED
    streams = [context.wrap_socket(listener.accept()[0], server_side=True) for _ in range(clients)]
    answers = [stream.makefile("rb") for stream in streams]
    pool = multiprocessing.pool.ThreadPool(clients)

    def step() -> None:
        pool.map(lambda answer: answer.read(UP), answers)
        pool.map(lambda stream: stream.sendall(bytes(DOWN)), streams)

    return step


def fleet_loop(fleet: Fleet, bottom: State, config: Config) -> Callable[[], None]:
    """Return an iteration through the fleet, as a method asks for it."""
    clients = config.clients
    fleet.start_round(
        SplitRound(
            0, tuple(range(clients.total)), clients.steps, config.optimizer.lr, bottom, bottom
        )
    )

    def step() -> None:
        fleet.backward(torch.zeros_like(fleet.forward().student))

    return step


def join(folder: Path, number: int, port: int, digest: str) -> subprocess.Popen[bytes]:
    """Start a device with its images and certificate."""
    images = folder / f"images-{number}"
    images.mkdir()
    for index in range(BATCH):
        Image.new("L", (8, 8), index).save(images / f"{index}.png")
    place = folder / "clients" / f"client-{number}"
    options = ["--data", str(images), "--certs", str(place), "--accept", digest, "--device", "cpu"]
    command = [sys.executable, "-m", "semisfl", "join", f"localhost:{port}", *options]
    return subprocess.Popen(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL
    )


def timed(step: Callable[[], None], count: int) -> tuple[float, float]:
    """Return milliseconds per iteration: wall clock, and this process's CPU time."""
    clock, cpu = time.perf_counter(), time.process_time()
    for _ in range(count):
        step()
    return 1e3 * (time.perf_counter() - clock) / count, 1e3 * (time.process_time() - cpu) / count


def iteration(clients: int = 10, count: int = 20) -> dict[str, Any]:
    """Return milliseconds per iteration of ``clients``, and the server's CPU time of it, through both loops."""
    torch.set_num_threads(1)
    config = parse(
        {
            "data": {"name": "digits", "size": 8, "labeled": 10, "augment": {"cutout": 4}},
            "clients": {
                "total": clients,
                "active": clients,
                "batch": BATCH,
                "steps": (PASSES + 1) * count,
            },
            "network": {"quorum": clients},
            "model": {"layers": LAYERS, "cut": 2, "projector": "none"},
        }
    )
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        certs.make_authority(folder)
        certs.make_server(folder, ["localhost"])
        for number in range(clients):
            certs.make_client(folder, f"client-{number}")
        listener = stack.enter_context(socket.create_server(("localhost", 0)))
        port = listener.getsockname()[1]
        spawn = multiprocessing.get_context("spawn")
        bare = [
            spawn.Process(target=bare_client, args=(folder, number, port), daemon=True)
            for number in range(clients)
        ]
        for process in bare:
            process.start()
            stack.callback(process.kill)
        network = NetworkOptions("localhost:0", folder)
        run = stack.enter_context(
            start.begin(config, out=folder / "run", device="cpu", network=network)
        )
        fleet = run.experiment.fleet
        assert isinstance(fleet, NetworkFleet)
        devices = [
            join(folder, number, fleet.port, fleet.terms.digest) for number in range(clients)
        ]
        for device in devices:
            stack.callback(device.kill)
        assert fleet.waiting.wait(clients, 120)
        bottom: State = run.experiment.method.student.bottom.state_dict()  # type: ignore[attr-defined]
        loops = {
            "bare": bare_loop(folder, listener, clients),
            "fleet": fleet_loop(fleet, bottom, config),
        }
        pids = {"bare": [one.pid or 0 for one in bare], "fleet": [one.pid for one in devices]}
        times: dict[str, list[tuple[float, float]]] = {"bare": [], "fleet": []}
        for _ in range(PASSES + 1):
            for name, other in (("bare", "fleet"), ("fleet", "bare")):
                for pid in pids[other]:
                    os.kill(pid, signal.SIGSTOP)
                times[name].append(timed(loops[name], count))
                for pid in pids[other]:
                    os.kill(pid, signal.SIGCONT)
    # The first pass warms up.
    results = {
        name + unit: round(median(one[column] for one in measured[1:]), 1)
        for name, measured in times.items()
        for column, unit in enumerate(("_ms", "_server_cpu_ms"))
    }
    return {**results, "fleet_ratio": round(results["fleet_ms"] / results["bare_ms"], 2)}


if __name__ == "__main__":
    print(json.dumps({"benchmark": "network_iteration", **iteration()}))
