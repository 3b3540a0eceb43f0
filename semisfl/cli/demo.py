"""``semisfl demo-network``: a server here and its devices as processes beside it."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from PIL import Image

from semisfl import config, presets
from semisfl.cli import training
from semisfl.config import Config
from semisfl.fleet.setup import NetworkOptions
from semisfl.net import certs
from semisfl.net.server.fleet import NetworkFleet
from semisfl.runs import start
from semisfl.runs.experiment import load_data, load_images
from semisfl.runs.loop import Result

SETTINGS = [
    "clients.total=4",
    "clients.active=4",
    "rounds=8",
    "network.quorum=2",
    "data.partition.kind=iid",
]
GOODBYE_SECONDS = 10.0


def demo_network(
    place: Path, signals: training.StopSignals, *, device: str = "auto", quiet: bool = False
) -> Result:
    """Four client processes, on loopback with real TLS and the embedded digits."""
    settings = config.parse(config.override(presets.digits(), SETTINGS))
    authority = place / "certs"
    certs.make_authority(authority)
    certs.make_server(authority, ["localhost", "127.0.0.1"])
    _write_images(settings, place)
    # Five processes on one machine: with more threads than cores each would wait for the others.
    torch.set_num_threads(1)
    server = start.begin(
        settings,
        out=place / "run",
        data=load_images(str(place / "labeled"), settings),
        device=device,
        stop=signals.flag,
        network=NetworkOptions("localhost:0", authority),
    )
    devices: list[subprocess.Popen[bytes]] = []
    result: Result | None = None
    try:
        with server as run:
            assert isinstance(run.experiment.fleet, NetworkFleet)
            for number in range(settings.clients.total):
                devices.append(_device(f"device-{number}", place, run.experiment.fleet.port))
            result = training.rounds(run, signals, quiet=quiet, title="network")
        return result
    finally:
        _end(devices, told=result is not None and not result.stopped)


def _device(name: str, place: Path, port: int) -> subprocess.Popen[bytes]:
    authority = place / "certs"
    certs.make_client(authority, name)
    options = ["--data", str(place / name), "--certs", str(authority / "clients" / name)]
    command = [sys.executable, "-m", "semisfl", "join", f"localhost:{port}", *options]
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})


def _end(devices: list[subprocess.Popen[bytes]], told: bool) -> None:
    """Leave no process behind. ``told``: the server said that the run is finished."""
    for device in devices:
        if not told:
            device.terminate()
    for device in devices:
        try:
            device.wait(GOODBYE_SECONDS)
        except subprocess.TimeoutExpired:
            device.kill()


def _write_images(settings: Config, place: Path) -> None:
    """The digits as files: a few with labels for the server, the others without for the devices."""
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
