"""The run of ``semisfl demo-network``: a server, and its devices as processes."""

import os
import shutil
import subprocess
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from PIL import Image

from semisfl.cli import one_run
from semisfl.cli.signals import StopSignals
from semisfl.fleet.setup import NetworkOptions
from semisfl.net.server.fleet import NetworkFleet
from semisfl.net.tls import certs
from semisfl.runs import start
from semisfl.runs.result import Result
from semisfl.runs.run_data import load_data, load_images
from semisfl.settings import config, presets
from semisfl.settings.config import Config
from semisfl.stopping import StopFlag

SETTINGS = [
    "clients.total=4",
    "clients.active=4",
    "rounds=8",
    "network.quorum=3",
    "data.partition.kind=iid",
]
FINISHED_SECONDS, STOPPED_SECONDS = 10.0, 3.0
"""Seconds that the devices' processes have to end before they are killed."""


def demo_network(place: Path, signals: StopSignals, *, device: str, quiet: bool) -> Result:
    """Train the embedded digits with four client processes on loopback with TLS; return the result.

    ``place`` is a new folder; it is removed if the run does not start.
    """
    settings = config.parse(presets.served(config.override(presets.digits(), SETTINGS)))
    # Five processes on one machine: with more threads than cores each would wait for the others.
    torch.set_num_threads(1)
    devices: list[subprocess.Popen[bytes]] = []
    started = finished = False
    try:
        with _server(settings, place, device, signals.flag) as run:
            assert isinstance(run.experiment.fleet, NetworkFleet)
            for number in range(settings.clients.total):
                devices.append(_device(f"device-{number}", place, run.experiment.fleet))
            started = True
            result = one_run.rounds(run, signals, quiet=quiet, title="network")
            finished = not result.stopped
        return result
    finally:
        _end(devices, finished)
        if not started:
            shutil.rmtree(place, ignore_errors=True)


def _server(
    settings: Config, place: Path, device: str, stop: StopFlag
) -> AbstractContextManager[start.PreparedRun]:
    certs.make_authority(place / "certs")
    certs.make_server(place / "certs", ["localhost", "127.0.0.1"])
    _write_images(settings, place)
    return start.begin(
        settings,
        out=place / "run",
        data=load_images(str(place / "labeled"), settings),
        device=device,
        stop=stop,
        network=NetworkOptions("127.0.0.1:0", place / "certs"),
    )


def _device(name: str, place: Path, fleet: NetworkFleet) -> subprocess.Popen[bytes]:
    authority = place / "certs"
    certs.make_client(authority, name)
    options = ["--data", str(place / name), "--certs", str(authority / "clients" / name)]
    options += ["--accept", fleet.terms.digest]
    command = [sys.executable, "-m", "semisfl", "join", f"localhost:{fleet.port}", *options]
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})


def _end(devices: list[subprocess.Popen[bytes]], finished: bool) -> None:
    """Leave no process behind; the devices of a finished run end by themselves."""
    for device in devices:
        if not finished:
            device.terminate()
    deadline = time.monotonic() + (FINISHED_SECONDS if finished else STOPPED_SECONDS)
    for device in devices:
        try:
            device.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            device.kill()
            device.wait()


def _write_images(settings: Config, place: Path) -> None:
    """Write the digits as files: a few with labels for the server, the others for the devices."""
    data, partition = load_data(settings)

    def write(images: torch.Tensor, names: list[str], target: Path) -> None:
        for pixels, name in zip(images.numpy(), names, strict=True):
            path = target / f"{name}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels[0]).save(path)

    def by_class(labels: torch.Tensor) -> list[str]:
        return [f"{data.classes[label]}/{number}" for number, label in enumerate(labels.tolist())]

    labeled = torch.from_numpy(partition.labeled)
    write(data.images[labeled], by_class(data.labels[labeled]), place / "labeled" / "train")
    write(data.test_images, by_class(data.test_labels), place / "labeled" / "test")
    for number, shard in enumerate(partition.clients):
        write(
            data.images[torch.from_numpy(shard)],
            [str(n) for n in range(len(shard))],
            place / f"device-{number}",
        )
