"""A whole fleet on loopback, in one process: a server, and clients as threads that can be broken."""

import asyncio
import contextlib
import functools
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from semisfl.data.dataset import Dataset
from semisfl.data.partition import Partition
from semisfl.fleet.base import Features, Fleet, HeldBack, SplitRound, State, mean_state
from semisfl.fleet.byte_counts import Traffic
from semisfl.fleet.setup import FleetSetup, NetworkOptions
from semisfl.net.chunks import LoopThread
from semisfl.net.client.allowance import Allowance
from semisfl.net.client.connection import Connection, Received, Target
from semisfl.net.client.device import Device
from semisfl.net.client.member import Images, Member
from semisfl.net.client.owner import Approval, Owner
from semisfl.net.client.shown_terms import read_terms
from semisfl.net.frames import Frame, encode
from semisfl.net.server.fleet import NetworkFleet
from semisfl.net.server.frozen import FrozenNetworkFleet
from semisfl.net.terms import Terms
from semisfl.net.tls import certs
from semisfl.runs.checkpoint import snapshot
from semisfl.runs.experiment import Experiment, assemble
from semisfl.runs.loop import run_rounds
from semisfl.settings import lookup
from semisfl.settings.config import Config, parse
from semisfl.settings.policy import DevicePolicy

SIDE = 16
CLASSES = 4
BATCHNORM = [
    {"kind": "conv", "channels": 4, "kernel": 5},
    *({"kind": "batchnorm"}, {"kind": "relu"}, {"kind": "pool", "size": 4}),
    *({"kind": "flatten"}, {"kind": "linear"}),
]
"""Layers of a small model with BatchNorm."""


@functools.cache
def loop_thread() -> LoopThread:
    """One loop for everybody: grpc.aio is not at ease with several in a process."""
    return LoopThread("tests")


def tiny(count: int = 3, **changes: Any) -> Config:
    """A configuration of ``count`` clients that runs a round in a few milliseconds."""
    values: dict[str, Any] = {
        "rounds": 2,
        "seed": 5,
        "data": {"labeled": 8, "partition": {"kind": "iid"}, "augment": {"cutout": 4}},
        "clients": {"total": count, "active": count, "batch": 4, "steps": 2},
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
    return data, Partition(labeled=np.arange(8), clients=tuple(shards))


class AcceptsAll(Approval):
    """The approval of an owner who accepts any terms."""

    def check(self, digest: str) -> None:
        pass


def accept_all(port: int) -> list[str]:
    """Return the options with which `semisfl join` accepts what a server in plaintext asks."""
    terms = read_terms(f"127.0.0.1:{port}", None, insecure_loopback=True)
    return ["--accept", terms.digest]


def certificates(folder: Path, clients: int, *others: str) -> Path:
    """Make an authority, a server for localhost and clients 0, 1, ... and ``others``; return ``folder``."""
    certs.make_authority(folder)
    certs.make_server(folder, ["localhost"])
    for name in (*(f"client-{index}" for index in range(clients)), *others):
        certs.make_client(folder, name)
    return folder


class Killed(BaseException):
    """Raised inside a client to end it as a power cut would."""


class Client(threading.Thread):
    """A device in a thread. ``break_at`` is called with each frame once it is decoded, to break things."""

    def __init__(
        self,
        address: str,
        images: Tensor,
        name: str,
        *,
        credentials: certs.Credentials | None = None,
        allow_methods: Sequence[str] = (),
        policy: DevicePolicy | None = None,
        approval: Approval | None = None,
        break_at: Callable[["Client", Frame], None] | None = None,
        load: Images | None = None,
        allowance: Allowance | None = None,
    ) -> None:
        super().__init__(daemon=True, name=name)
        owner = Owner(policy or DevicePolicy(), allowance or Allowance(), approval or AcceptsAll())
        target = Target(address, credentials, insecure_loopback=credentials is None, name=name)
        self.link = Connection(target, owner, allow_methods=allow_methods, thread=loop_thread())
        self.device = Device(self.link, load or (lambda shape: (images, 0)), "cpu")
        if break_at is not None:
            decode = self.device.decode

            def breaking(received: Received) -> Frame | None:
                if (frame := decode(received)) is not None:
                    break_at(self, frame)
                return frame

            self.device.decode = breaking  # type: ignore[method-assign]
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.device.serve()
        except Killed:
            pass
        except BaseException as error:
            self.error = error

    def kill(self) -> None:
        """End the client from outside, without a goodbye."""
        self.link.kill()
        self.device.stop()

    def die(self) -> None:
        """End the client from its own thread, without a goodbye."""
        self.link.kill()
        raise Killed


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
        handshake_seconds: float = 10.0,
        directory: Path | None = None,
    ) -> None:
        self.directory = directory
        self.config = config.in_fleet("network")
        self.data, self.partition = data, partition
        self.certificates = certificates
        self.clients: dict[int, Client] = {}
        self._ever: list[Client] = []
        self._handshake_seconds = handshake_seconds
        self.start_server(port)

    def start_server(self, port: int = 0, state: dict[str, Any] | None = None) -> None:
        self.experiment = assemble(
            self.config,
            self.data,
            self.partition,
            device="cpu",
            network=NetworkOptions(
                f"127.0.0.1:{port}", self.certificates, self.certificates is None
            ),
            make_fleet=functools.partial(
                FrozenNetworkFleet if self.config.clients.bottom == "frozen" else NetworkFleet,
                handshake_seconds=self._handshake_seconds,
                thread=loop_thread(),
            ),
        )
        self.fleet: NetworkFleet = self.experiment.fleet  # type: ignore[assignment]
        prefix = "" if self.certificates else "plaintext:"
        index = {f"{prefix}client-{i}": i for i in range(self.config.clients.total)}
        self.fleet.roster.load_state_dict({"index": index, "images": {}})
        if state is not None:
            self.experiment.load_state_dict(state)
        self.fleet.open(self.directory)
        self.port = self.fleet.port

    @property
    def address(self) -> str:
        return f"{'localhost' if self.certificates else '127.0.0.1'}:{self.port}"

    @property
    def strikes(self) -> dict[str, int]:
        """Return the offences of each client that has any."""
        strikes = self.fleet.sessions.strikes
        return {name: count for name, count in strikes.items() if count}

    def join(self, index: int, address: str | None = None, **how: Any) -> Client:
        name = f"client-{index}"
        if self.certificates is not None:
            how.setdefault("credentials", certs.load_client_credentials(self.certificates, name))
        if lookup.method(self.config.method).works:
            how.setdefault("policy", DevicePolicy(full_models=True))
        images = how.pop("images", self.data.images[self.partition.clients[index]])
        client = Client(address or self.address, images, name, **how)
        self.clients[index] = client
        self._ever.append(client)
        return client

    def enrol(self, index: int, address: str | None = None, **how: Any) -> Client:
        """Let a client join, and wait until it is here."""
        client = self.join(index, address, **how)
        until(lambda: index in self.fleet.present())
        return client

    def join_all(self, **how: Any) -> None:
        for index in range(self.config.clients.total):
            self.join(index, **how)
        self.wait_for(self.config.clients.total)

    def wait_for(self, count: int) -> None:
        """Wait until ``count`` clients are here."""
        until(lambda: len(self.fleet.present()) >= count)

    def stream_bytes(self) -> tuple[int, int]:
        """Bytes that these clients received and sent on all streams so far, framing included."""
        links = [client.link for client in self._ever]
        return sum(link.received for link in links), sum(link.sent for link in links)

    def close(self) -> None:
        for client in self.clients.values():
            client.device.stop()
        for client in self.clients.values():
            client.join(10)
        self.fleet.close(finished=False)


@contextmanager
def network(config: Config, **how: Any) -> Iterator[Network]:
    data, partition = toy_data(config.clients.total)
    net = Network(config, data, partition, **how)
    try:
        yield net
    finally:
        net.close()


def weights(experiment: Experiment) -> dict[str, Tensor]:
    """Everything a method's next round depends on, flat."""
    return flat(experiment.method.state_dict())


def flat(state: Any) -> dict[str, Tensor]:
    """The tensors of a nested state, by path."""
    tensors: dict[str, Tensor] = {}

    def walk(value: Any, path: str) -> None:
        if isinstance(value, Tensor):
            tensors[path] = value.detach().clone()
        elif isinstance(value, dict):
            for key, item in value.items():
                walk(item, f"{path}/{key}")
        elif isinstance(value, list | tuple):
            for number, item in enumerate(value):
                walk(item, f"{path}/{number}")

    walk(state, "")
    return tensors


class Leaving(NamedTuple):
    """A client contributes until just before this moment, and again from round ``back``."""

    client: int
    round: int
    step: int
    """First step whose features are missing; the number of steps: only the upload is."""
    back: int = 1_000_000


class Oracle(Fleet):
    """A fleet with a block per client, without any network, that clients leave at given moments."""

    capturable = False

    def __init__(self, setup: FleetSetup, *, leaving: Sequence[Leaving] = ()) -> None:
        self.traffic = Traffic()
        self.held_back = HeldBack()
        self._leaving = leaving
        self._members: dict[int, Member] = {}
        self._round = 0
        sent = Terms(setup.config, setup.shape, setup.classes, setup.mean, setup.std).to_json()
        terms = Terms.from_json(sent, [setup.config.method])  # as a device reads them
        assert setup.images is not None
        for client, shard in enumerate(setup.shards):
            images = setup.images[shard]
            member = Member(terms, lambda _, images=images: (images, 0), setup.hardware)
            member.enrol(client, setup.stop)
            self._members[client] = member

    def state_dict(self) -> dict[str, Any]:
        return {}

    def image_counts(self) -> dict[int, int]:
        return {client: len(member.images) for client, member in self._members.items()}

    def members(self) -> dict[int, str]:
        return {client: str(client) for client in self._members}

    def settle(self, good: bool) -> None:
        assert good, "a run of honest clients stays healthy"

    def present(self) -> list[int]:
        gone = {item.client for item in self._leaving if item.round < self._round < item.back}
        return [client for client in self._members if client not in gone]

    def start_round(self, plan: SplitRound) -> None:
        self._round, self._step = plan.index, 0
        self._active = plan.active
        self._bottoms: dict[int, State] = {}
        for client in self._active:
            one = replace(
                plan,
                active=(client,),
                bottom=snapshot(plan.bottom),
                teacher_bottom=snapshot(plan.teacher_bottom),
            )
            self._members[client].block.start_round(one)

    def _here(self) -> tuple[int, ...]:
        late = {x.client for x in self._leaving if x.round == self._round and x.step <= self._step}
        return tuple(client for client in self._active if client not in late)

    def forward(self) -> Features:
        clients = self._here()
        each = [self._members[client].block.forward() for client in clients]
        student = torch.cat([item.cleared.tensors["student"] for item in each]).requires_grad_()
        return Features(
            student, torch.cat([item.cleared.tensors["teacher"] for item in each]), clients
        )

    def backward(self, gradients: Tensor) -> None:
        clients = self._here()
        for client, share in zip(clients, gradients.chunk(len(clients)), strict=True):
            self._members[client].block.backward(share)
        self._step += 1

    def finish_round(self) -> State:
        mean = mean_state([snapshot(self._members[client].block.mean()) for client in self._here()])
        self._round += 1
        return mean


def undisturbed(config: Config) -> Experiment:
    """Return the same run with simulated clients, done."""
    experiment = assemble(config, *toy_data(config.clients.total), device="cpu")
    run_rounds(experiment)
    return experiment


def oracle(config: Config, *leaving: Leaving) -> Experiment:
    """The run without a network in which ``leaving`` clients leave; done."""
    data, partition = toy_data(config.clients.total)
    make_fleet = functools.partial(Oracle, leaving=leaving)
    experiment = assemble(config, data, partition, device="cpu", make_fleet=make_fleet)
    run_rounds(experiment)
    return experiment


def assert_same(one: Experiment, other: Experiment) -> None:
    """Fail unless both runs have the same finite weights, bit for bit."""
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert torch.equal(value, theirs[key]), key
        assert torch.isfinite(value.float()).all(), key


def poisoning(
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    change: Callable[[Tensor], Tensor],
    first: int = 0,
    last: int = 1_000_000,
    *,
    counters: bool = False,
    of: Sequence[int] = (1,),
) -> None:
    """Change the values, or the counters, of every ``kind`` of frame that these clients send in these rounds.

    They answer as devices whose program was changed: with tensors that no policy cleared.
    """
    original = Device.answer

    def answer(self, received, sent, fields, cleared=None, codecs="fp32", **how) -> None:  # type: ignore[no-untyped-def]
        poisons = sent == kind and self.member.client in of and first <= fields["round"] <= last
        if not poisons:
            original(self, received, sent, fields, cleared, codecs, **how)
            return
        tensors = {
            name: change(tensor) if tensor.is_floating_point() != counters else tensor
            for name, tensor in cleared.tensors.items()
        }
        parts = encode(sent, fields, tensors, codecs)
        received.stream.answer(received.ticket, b"".join(parts))

    monkeypatch.setattr(Device, "answer", answer)


class Proxy:
    """A TCP relay that counts what passes and can fall silent without closing anything."""

    def __init__(self, target: str, rate: float | None = None) -> None:
        """``rate``: bytes per second in each direction, if it is to be slow."""
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self.up = self.down = 0
        self.rate = rate
        self.silent = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._target)
            except OSError:
                near.close()  # nobody there, for now
                continue
            self._sockets += [near, far]
            for source, sink, way in ((near, far, "up"), (far, near, "down")):
                threading.Thread(target=self._relay, args=(source, sink, way), daemon=True).start()

    def _relay(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        try:
            # A slow link carries bytes one after another, not in bursts of a whole chunk.
            while data := source.recv(1 << 14 if self.rate is None else 1 << 11):
                while self.silent:
                    time.sleep(0.05)
                if (rate := self.rate) is not None:
                    time.sleep(len(data) / rate)
                setattr(self, way, getattr(self, way) + len(data))
                sink.sendall(data)
        except OSError:
            pass
        for end in (source, sink):
            end.close()

    def cut(self, for_good: bool = False) -> None:
        """Break every connection; new ones are let through unless it is ``for_good``."""
        for end in self._sockets if for_good else self._sockets[1:]:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for end in self._sockets:
            end.close()


def audited(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines of the audit log."""
    return [record.getMessage() for record in caplog.records if record.name == "semisfl.audit"]


def until(condition: Callable[[], bool], seconds: float = 30.0) -> float:
    """Wait for ``condition``; the seconds it took. Fails the test if it never comes."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds, f"not so within {seconds} s"
        time.sleep(0.01)
    return time.monotonic() - started


def on_loop(coroutine: Any, seconds: float = 20.0) -> Any:
    return asyncio.run_coroutine_threadsafe(coroutine, loop_thread().loop).result(seconds)
