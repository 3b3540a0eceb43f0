"""A whole fleet on loopback, in one process: a server, and clients as threads that can be broken."""

import asyncio
import functools
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from semisfl import certs, run
from semisfl.config import Config, parse
from semisfl.data.partition import Partition
from semisfl.data.sources import Dataset
from semisfl.fleet.base import ClientWork
from semisfl.fleet.device import Device
from semisfl.fleet.link import Link
from semisfl.fleet.protocol import Terms
from semisfl.fleet.remote import RemoteFleet
from semisfl.fleet.transport import LoopThread
from semisfl.fleet.wire import Frame

SIDE = 16
CLASSES = 4


@functools.cache
def loop_thread() -> LoopThread:
    """One loop for everybody: grpc.aio is not at ease with several in a process."""
    return LoopThread("tests")


def tiny(clients: int = 3, **changes: Any) -> Config:
    """A configuration that runs a round in a few milliseconds."""
    values: dict[str, Any] = {
        "rounds": 2,
        "seed": 5,
        "data": {"labeled": 8, "partition": {"kind": "iid"}, "augment": {"cutout": 4}},
        "clients": {"total": clients, "active": clients, "batch": 4, "steps": 2},
        "server": {"batch": 4, "steps": 2},
        "model": {"name": "cnn", "projector": "linear", "projection": 8},
        "semisfl": {"queue_size": 16, "confidence_threshold": 0.2},
        "network": {"deadline": 20.0, "quorum": 1},
        "runtime": {"checkpoint_every": 1},
    }
    for section, value in changes.items():
        values[section] = {**values.get(section, {}), **value} if isinstance(value, dict) else value
    return parse(values)


def toy_data(clients: int = 3, seed: int = 0) -> tuple[Dataset, Partition]:
    rng = np.random.default_rng(seed)
    count = 8 + 12 * clients
    images = torch.from_numpy(rng.integers(0, 256, (count, 1, SIDE, SIDE), dtype=np.uint8))
    labels = torch.arange(count) % CLASSES
    data = Dataset("toy", tuple("abcd"), images, labels, images[:8], labels[:8], (0.5,), (0.5,))
    shards = np.arange(8, count).reshape(clients, 12)
    return data, Partition(labeled=np.arange(8), clients=list(shards))


class Killed(BaseException):
    """Raised inside a client to end it as a power cut would."""


class Client(threading.Thread):
    """A device in a thread. ``break_at`` (frame -> None) may raise `Killed`, wait, or spoil things."""

    def __init__(
        self,
        address: str,
        images: Tensor,
        name: str,
        *,
        credentials: certs.Credentials | None = None,
        works: Mapping[str, ClientWork] | None = None,
        break_at: Callable[[Frame], None] | None = None,
        keepalive: float = 10.0,
    ) -> None:
        super().__init__(daemon=True, name=name)
        self.link = Link(
            address,
            credentials,
            name=name,
            insecure_loopback=credentials is None,
            keepalive=keepalive,
            thread=loop_thread(),
        )
        self.device = Device(self.link, lambda shape: (images, 0), works or {}, "cpu")
        if break_at is not None:
            self.device.acting = break_at  # type: ignore[method-assign]
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.device.serve()
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001 - kept for the test to look at
            self.error = error

    def kill(self) -> None:
        self.link.kill()

    def stop(self) -> None:
        self.device.stop()
        self.join(10)


class Network:
    """A run over loopback. ``names`` are enrolled beforehand, so that client i is always client i."""

    def __init__(
        self,
        config: Config,
        data: Dataset,
        partition: Partition,
        *,
        certificates: Path | None = None,
        port: int = 0,
        works: Mapping[str, ClientWork] | None = None,
        handshake_seconds: float = 10.0,
    ) -> None:
        self.config, self.data, self.partition = config, data, partition
        self.certificates, self.works = certificates, works
        self.clients: dict[int, Client] = {}
        self._handshake_seconds = handshake_seconds
        self.start_server(port)

    def start_server(self, port: int = 0) -> None:
        self.experiment = run.assemble(
            self.config, self.data, self.partition, device="cpu", make_fleet=functools.partial(self._fleet, port)
        )
        self.fleet: RemoteFleet = self.experiment.fleet  # type: ignore[assignment]
        self.port = self.fleet.port

    def _fleet(self, port: int, model: Any, images: Tensor, *rest: Any) -> RemoteFleet:
        shape = (images.shape[1], images.shape[2], images.shape[3])
        terms = Terms(self.config, shape, len(self.data.classes), self.data.mean, self.data.std)
        host = "localhost" if self.certificates else "127.0.0.1"
        fleet = RemoteFleet(
            terms,
            model,
            rest[-1],
            listen=f"{host}:{port}",
            certificates=self.certificates,
            insecure_loopback=self.certificates is None,
            handshake_seconds=self._handshake_seconds,
            thread=loop_thread(),
        )
        prefix = "" if self.certificates else "plaintext:"
        fleet.roster.load_state_dict({f"{prefix}client-{i}": i for i in range(self.config.clients.total)})
        return fleet

    @property
    def address(self) -> str:
        return f"{'localhost' if self.certificates else '127.0.0.1'}:{self.port}"

    def join(self, index: int, address: str | None = None, **how: Any) -> Client:
        name = f"client-{index}"
        if self.certificates is not None:
            how.setdefault("credentials", certs.load_client_credentials(self.certificates, name))
        images = self.data.images[self.partition.clients[index]]
        client = Client(address or self.address, images, name, works=self.works, **how)
        self.clients[index] = client
        return client

    def join_all(self, **how: Any) -> None:
        for index in range(self.config.clients.total):
            self.join(index, **how)
        assert self.fleet.wait_for(self.config.clients.total, 20), self.fleet.present()

    def close(self) -> None:
        for client in self.clients.values():
            client.device.stop()
        for client in self.clients.values():
            client.join(10)
        self.fleet.close()


@contextmanager
def network(config: Config, clients: int | None = None, **how: Any) -> Iterator[Network]:
    data, partition = toy_data(config.clients.total)
    net = Network(config, data, partition, **how)
    try:
        yield net
    finally:
        net.close()


def weights(experiment: run.Experiment) -> dict[str, Tensor]:
    """Everything a method's next round depends on, flat."""
    flat: dict[str, Tensor] = {}

    def walk(value: Any, path: str) -> None:
        if isinstance(value, Tensor):
            flat[path] = value.detach().clone()
        elif isinstance(value, dict):
            for key, item in value.items():
                walk(item, f"{path}/{key}")
        elif isinstance(value, list | tuple):
            for number, item in enumerate(value):
                walk(item, f"{path}/{number}")

    walk(experiment.method.state_dict(), "")
    return flat


class Proxy:
    """A TCP relay that counts what passes and can fall silent without closing anything."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self.up = self.down = 0
        self.silent = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
            except OSError:
                return
            self._sockets += [near, far]
            for source, sink, way in ((near, far, "up"), (far, near, "down")):
                threading.Thread(target=self._relay, args=(source, sink, way), daemon=True).start()

    def _relay(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        try:
            while data := source.recv(1 << 16):
                while self.silent:
                    time.sleep(0.05)
                setattr(self, way, getattr(self, way) + len(data))
                sink.sendall(data)
        except OSError:
            pass
        for end in (source, sink):
            end.close()

    def close(self) -> None:
        for end in self._sockets:
            end.close()


def until(condition: Callable[[], bool], seconds: float = 10.0) -> float:
    """Wait for ``condition``; the seconds it took. Fails the test if it never comes."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds, f"not so within {seconds} s"
        time.sleep(0.01)
    return time.monotonic() - started


def on_loop(coroutine: Any, seconds: float = 20.0) -> Any:
    return asyncio.run_coroutine_threadsafe(coroutine, loop_thread().loop).result(seconds)
