"""Measure split inference: milliseconds and bytes per image for every cut, on two connections, as JSON.

    python -m reproduction.benchmarks.inference [--models cnn,cnn@96,alexnet] [--images 30]

The server has a process of its own and the device is in this one, with a thread each, mutual TLS and one
image at a time. The whole model on the device, which sends nothing, is measured too. The connections are loopback, and a proxy that passes 4 Mbit/s each
way and adds no delay of its own. Bytes are counted at the proxy, so they include TLS and HTTP/2. The model
is not trained: time and bytes do not depend on its weights.
"""

import argparse
import contextlib
import json
import logging
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from semisfl.fleet.setup import NetworkOptions
from semisfl.models.build import build
from semisfl.models.layers import cut_layers
from semisfl.models.split import SplitModel
from semisfl.models.zoo import MODELS
from semisfl.net.client.connection import Target
from semisfl.net.client.owner import Approval, Owner
from semisfl.net.tls import certs
from semisfl.runs import checkpoint
from semisfl.runs.portable import Description, answering_weights
from semisfl.use.classifier import Classifier, load
from semisfl.use.model_client import ModelClient
from semisfl.use.model_server import ModelServer

RATE = 4e6 / 8
CODECS = ("fp32", "int8")
WARM_UP = 2


# --- a slow connection ---------------------------------------------------------------------------------


class SlowLink:
    """A proxy on loopback that passes bytes on at ``RATE`` each way, and counts them."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("localhost", 0))
        self.address = f"localhost:{self._listener.getsockname()[1]}"
        self.up = self.down = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                device, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                for end in (device, server):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for way in ((device, server, True), (server, device, False)):
                    threading.Thread(target=self._pass, args=way, daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, up: bool) -> None:
        free = 0.0  # the time at which the connection has carried all its bytes
        with contextlib.suppress(OSError):
            while data := source.recv(1500):
                now = time.monotonic()
                free = max(free, now) + len(data) / RATE
                time.sleep(free - now)
                sink.sendall(data)
                if up:
                    self.up += len(data)
                else:
                    self.down += len(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()


# --- the server, a process of its own ------------------------------------------------------------


def cuts_of(network: SplitModel) -> list[str]:
    """Return every layer after which both sides have parameters."""
    layers = [layer for half in cut_layers(network) for layer in half]
    weighed = [place for place, (_, layer) in enumerate(layers) if list(layer.parameters())]
    return [name for name, _ in layers[weighed[0] : weighed[-1]]]


def serve(file: Path, authority: Path) -> None:
    """Start one server per cut in this process, print their ports and wait for the end of stdin."""
    torch.set_num_threads(1)
    model = load(file)
    servers = {
        cut: ModelServer(model.recut(cut), NetworkOptions("127.0.0.1:0", authority))
        for cut in cuts_of(model.network)
    }
    print(json.dumps({cut: server.port for cut, server in servers.items()}), flush=True)
    sys.stdin.read()


@contextlib.contextmanager
def served(file: Path, authority: Path) -> Iterator[dict[str, int]]:
    command = [
        sys.executable,
        "-m",
        "reproduction.benchmarks.inference",
        "--serve",
        str(file),
        str(authority),
    ]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.wait()


# --- measuring -----------------------------------------------------------------------------------


def write_model(named: str, path: Path) -> Classifier:
    """Write the model ``NAME``, or ``NAME@SIDE`` for images of another size than its usual one."""
    name, _, side = named.partition("@")
    known = MODELS[name]
    shape = (known.shape[0], int(side), int(side)) if side else known.shape
    network = build(name, shape, known.classes, projector="none").eval()
    description = Description(
        classes=tuple(str(number) for number in range(known.classes)),
        shape=shape,
        mean=(0.5,) * shape[0],
        std=(0.25,) * shape[0],
        layers=[layer.model_dump(mode="json") for layer in known.table()],
        cut=None,
        method="supervised",
        network="student",
        data="none",
        labeled=0,
        unlabeled=None,
        tested_on=0,
        settings={},
        version="benchmark",
    )
    state = {"description": description.as_dict(), "weights": answering_weights(network)}
    checkpoint.write(path, {"model": state})
    return load(path)


class AcceptsAll(Approval):
    """The approval of an owner who accepts any terms."""

    def check(self, digest: str) -> None:
        pass


def milliseconds(answer: Callable[[Tensor], Tensor], images: Tensor) -> dict[str, float]:
    """Time one image per call. The machine may be busy: the fastest call shows the undisturbed time."""
    spent = []
    for place, image in enumerate(images.split(1)):
        started = time.perf_counter()
        answer(image)
        if place >= WARM_UP:
            spent.append(1e3 * (time.perf_counter() - started))
    return {"median_ms": round(statistics.median(spent), 2), "fastest_ms": round(min(spent), 2)}


def over(port: int, credentials: certs.Credentials, images: Tensor, **how: Any) -> dict[str, Any]:
    """Measure one way of calling the server at ``port``, on both connections."""
    how["owner"] = Owner(approval=AcceptsAll())
    with ModelClient(Target(f"localhost:{port}", credentials), **how) as client:
        loopback = milliseconds(client.probabilities, images)
    link = SlowLink(f"localhost:{port}")
    try:
        with ModelClient(Target(link.address, credentials), **how) as client:
            client.probabilities(images[:1])
            up, down = link.up, link.down
            slow = milliseconds(client.probabilities, images)
            sent = {
                "bytes_up": round((link.up - up) / len(images)),
                "bytes_down": round((link.down - down) / len(images)),
            }
    finally:
        link.close()
    return {**sent, "loopback": loopback, "4_mbit": slow}


def measure(name: str, count: int, folder: Path) -> list[dict[str, Any]]:
    model = write_model(name, folder / f"{name}.safetensors")
    generator = torch.Generator().manual_seed(0)
    size = (count + WARM_UP, *model.shape)
    images = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
    credentials = certs.load_client_credentials(folder / "certs", "device")
    alone = milliseconds(model.probabilities, images)
    model_bytes = sum(tensor.nbytes for tensor in model.network.state_dict().values())
    both = {"loopback": alone, "4_mbit": alone}
    rows = [
        {
            "cut": "whole on device",
            "device_bytes": model_bytes,
            "bytes_up": 0,
            "bytes_down": 0,
            **both,
        }
    ]
    with served(folder / f"{name}.safetensors", folder / "certs") as ports:
        for cut, port in ports.items():
            again = model.recut(cut)
            bottom_bytes = sum(
                tensor.nbytes for tensor in again.network.bottom.state_dict().values()
            )
            about = {"cut": cut, "features": again.network.features, "device_bytes": bottom_bytes}
            for codec in CODECS:
                rows.append(
                    {**about, "codec": codec, **over(port, credentials, images, codec=codec)}
                )
    return [{"model": name, "input": "x".join(map(str, model.shape)), **row} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="cnn,cnn@96", help="of `semisfl list`, @SIDE of images")
    parser.add_argument("--images", type=int, default=30)
    parser.add_argument("--serve", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    if options.serve:
        serve(*options.serve)
        return
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        os.environ["SEMISFL_CACHE"] = str(folder / "cache")
        certs.make_authority(folder / "certs")
        certs.make_server(folder / "certs", ["localhost"])
        certs.make_client(folder / "certs", "device")
        names = options.models.split(",")
        rows = [row for name in names for row in measure(name, options.images, folder)]
    about = {"images": options.images, "cores": os.cpu_count(), "load": os.getloadavg()[1]}
    print(json.dumps({"benchmark": "inference", **about, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
