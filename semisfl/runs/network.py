"""Runs over the network: what ``semisfl serve``, ``semisfl join`` and ``semisfl demo-network`` do."""

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from semisfl import config, presets
from semisfl.config import Config, ConfigError
from semisfl.data import decode, folder, sources
from semisfl.data.partition import Partition
from semisfl.engine.hardware import Hardware
from semisfl.methods import METHODS
from semisfl.net import certs
from semisfl.net.client.connection import Connection
from semisfl.net.client.device import Device
from semisfl.net.messages import Shape, Terms
from semisfl.net.server.fleet import NetworkFleet
from semisfl.runs.directory import RunDirectory
from semisfl.runs.experiment import assemble, build_model, load_data
from semisfl.runs.loop import Observer, Result, run_rounds
from semisfl.stopping import StopFlag

log = logging.getLogger(__name__)

WORKS = {work.name: work for entry in METHODS.values() for work in entry.works}
DEMO = {
    "clients.total": 4,
    "clients.active": 4,
    "rounds": 8,
    "network.quorum": 2,
    "data.partition.kind": "iid",
}


def serve(
    settings: Config,
    labeled: Path,
    *,
    certificates: Path | None,
    listen: str,
    out: Path,
    resume: bool = False,
    device: str = "auto",
    insecure_loopback: bool = False,
    observe: Observer | None = None,
    stop: StopFlag | None = None,
    listening: Callable[[int], object] = lambda port: None,
) -> Result:
    """Train with whoever joins. ``labeled`` holds train/<class>/* and test/<class>/*.

    ``stop`` ends the run when it is set; ``listening`` is told the port. With ``resume`` the run in ``out`` goes on from its
    last checkpoint, or from its start if it was killed before it had one.
    """
    # A round over a network is dear: a restarted server goes on from the start of the one it was in.
    often = settings.runtime.model_copy(update={"checkpoint_every": 1})
    settings = settings.model_copy(update={"runtime": often})
    directory = RunDirectory.open(out) if resume else RunDirectory.create(out, settings)
    settings = directory.config() if resume else settings
    data = sources.load(str(labeled), size=settings.data.size)
    for note in data.notes:
        log.warning("%s", note)
    known = np.flatnonzero(data.labels.numpy() >= 0)
    if not known.size:
        raise ConfigError(
            f"{labeled} holds no labelled images; it needs train/<class>/* and test/<class>/*"
        )
    hardware = Hardware(device, settings.runtime)
    shape = (data.images.shape[1], data.images.shape[2], data.images.shape[3])
    fleet = NetworkFleet(
        Terms(settings, shape, len(data.classes), data.mean, data.std),
        build_model(settings, None, shape, len(data.classes)),
        hardware,
        listen=listen,
        certificates=certificates,
        insecure_loopback=insecure_loopback,
        roster_path=out / "roster.json",
        stop=stop,
    )
    finished = False
    try:
        listening(fleet.port)
        fleet.wait_ready()
        # Only how many there are matters here, for |D_l| / |D|: the images stay with the clients.
        shards = tuple(
            np.zeros(count, np.int64)
            for count in _image_counts(fleet, settings, out / "images.json")
        )
        experiment = assemble(
            settings,
            data,
            Partition(known, shards),
            device=device,
            make_fleet=lambda *parts: fleet.attach(parts[-2]),
            stop=stop,
        )
        state = last_state(directory) if resume else None
        result = run_rounds(experiment, directory, state=state, observe=observe)
        finished = not result.stopped
        return result
    finally:
        fleet.close(finished)


def last_state(directory: RunDirectory) -> dict[str, Any] | None:
    """The last checkpoint; None, and no metrics are kept, if the run was killed before its first."""
    if (directory.path / "latest.safetensors").exists():
        return directory.load("latest")
    directory.keep_metrics_before(0)
    return None


def _image_counts(fleet: NetworkFleet, settings: Config, path: Path) -> list[int]:
    """Images of each client as they were when the run began; a resumed run must not see others."""
    if path.exists():
        return [int(count) for count in json.loads(path.read_text(encoding="utf-8"))]
    counts = [fleet.images().get(client, 0) for client in range(settings.clients.total)]
    path.write_text(json.dumps(counts), encoding="utf-8")
    return counts


def join(
    address: str,
    data: Path,
    *,
    certificates: Path | None,
    device: str = "auto",
    insecure_loopback: bool = False,
    name: str = "",
) -> None:
    """Take part with the images in ``data`` until the run is finished, SIGTERM or Ctrl-C.

    Raises `semisfl.net.client.connection.Rejected` with the server's reason if it refuses this client.
    """
    credentials = (
        None if insecure_loopback else certs.load_client_credentials(certificates or Path())
    )
    if not data.is_dir():
        raise ConfigError(f"{data} is no folder; --data wants a folder of images")
    connection = Connection(address, credentials, name=name, insecure_loopback=insecure_loopback)
    client = Device(connection, lambda shape: load_images(data, shape), WORKS, device)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, lambda *_: client.stop())
    try:
        client.serve()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def load_images(root: Path, shape: Shape) -> tuple[torch.Tensor, int]:
    """Every readable image under ``root``, brought to ``shape``, and how many are not readable."""
    rows = folder.source(root).rows()
    channels, height, width = shape
    read = [decode.decoded(rows, row, (width, height), channels) for row in range(len(rows.names))]
    kept = [pixels for pixels in read if pixels is not None]
    if not kept:
        raise ConfigError(
            f"none of the {len(read)} images in {root} can be read; formats: {', '.join(decode.FORMATS)}"
        )
    if len(kept) < len(read):
        log.warning(
            "%d of %d images in %s could not be read and are skipped",
            len(read) - len(kept),
            len(read),
            root,
        )
    return torch.from_numpy(np.stack(kept)), len(read) - len(kept)


def demo_network(place: Path, *, observe: Observer | None = None, device: str = "auto") -> Result:
    """A server here and four client processes, on loopback with real TLS and the embedded digits."""
    assignments = [f"{key}={value}" for key, value in DEMO.items()]
    settings = config.parse(config.override(presets.digits(), assignments))
    authority = place / "certs"
    certs.make_authority(authority)
    certs.make_server(authority, ["localhost", "127.0.0.1"])
    _write_demo_images(settings, place)
    clients: list[subprocess.Popen[bytes]] = []
    # Five processes on one machine: with more threads than cores each would wait for the others.
    torch.set_num_threads(1)

    def start_clients(port: int) -> None:
        for number in range(settings.clients.total):
            certs.make_client(authority, f"device-{number}")
            options = ["--data", str(place / f"device-{number}")]
            options += ["--certs", str(authority / "clients" / f"device-{number}")]
            command = [sys.executable, "-m", "semisfl", "join", f"localhost:{port}", *options]
            clients.append(subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}))

    try:
        return serve(
            settings,
            place / "labeled",
            certificates=authority,
            listen="localhost:0",
            out=place / "run",
            device=device,
            observe=observe,
            listening=start_clients,
        )
    finally:
        for client in clients:
            try:
                client.wait(10)
            except subprocess.TimeoutExpired:
                client.kill()


def _write_demo_images(settings: Config, place: Path) -> None:
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
