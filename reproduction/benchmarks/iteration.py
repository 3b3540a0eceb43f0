"""Compare an iteration over the network with the same bytes through bare TLS sockets."""

import contextlib
import multiprocessing
import os
import signal
import socket
import ssl
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from reproduction.benchmarks.loopback import (
    BATCH,
    CLIENTS,
    FEATURES,
    PROCESSES,
    authority,
    configuration,
    model,
    server,
)
from semisfl.fleet.base import SplitRound
from semisfl.net.client.connection import Connection, Target
from semisfl.net.frames import decode, encode
from semisfl.net.messages import Schemas
from semisfl.net.server.fleet import NetworkFleet
from semisfl.net.tls import certs


def stand_in(folder: Path, number: int, port: Any, coded: bool) -> None:
    """Run a client that does everything but arithmetic; without ``coded`` it only moves bytes.

    ``port`` is a shared number: 0 until the server listens.
    """
    torch.set_num_threads(1)
    while not port.value:
        time.sleep(0.05)
    credentials = certs.load_client_credentials(folder, f"client-{number}")
    link = Connection(Target(f"localhost:{port.value}", credentials))
    shapes = Schemas.of(configuration(CLIENTS), model())
    rows, payload = torch.randn(BATCH, FEATURES), os.urandom(8 * BATCH * FEATURES)
    welcomed, step = False, 0
    while not link.over.is_set():
        received = link.receive(1.0)
        if received is None:
            continue
        if not welcomed:
            welcomed = True
            ready = {"model": shapes.digest, "images": BATCH, "skipped": 0}
            received.stream.answer(received.ticket, encode("ready", ready, {}))
            received.stream.assembler.limit = shapes.split.limit + shapes.gradients.limit
        elif received.ticket and coded:
            decode(received.data, {"gradients": shapes.gradients, "split": shapes.split})
            tensors = {"student": rows, "teacher": rows}
            answer = encode("features", {"round": 0, "step": step}, tensors, "fp32")
            received.stream.answer(received.ticket, answer)
            step += 1
        elif received.ticket:
            received.stream.answer(received.ticket, [payload])


class TransportLoop:
    """Move only the bytes through streams: split, sent, joined; comparable with `BareLoop`."""

    def __init__(self, fleet: NetworkFleet, clients: int) -> None:
        assert fleet.wait_for(clients, 60)
        self._sessions = list(fleet._listener.table.enrolled.values())
        self._inbox = fleet._questions._context.inbox
        self._gradients = os.urandom(4 * BATCH * FEATURES)

    def __call__(self) -> None:
        for session in self._sessions:
            session.ask([self._gradients], 2 * 8 * BATCH * FEATURES, copy=False)
        for _ in self._sessions:
            _, _, data = self._inbox.get()
            assert data is not None and len(data) == 8 * BATCH * FEATURES


class FleetLoop:
    """Iterations through NetworkFleet: checked, decoded, concatenated, as a method gets them."""

    def __init__(self, fleet: NetworkFleet, clients: int) -> None:
        self._fleet = fleet
        assert fleet.wait_for(clients, 60)
        state = model().bottom.state_dict()
        fleet.start_round(SplitRound(0, tuple(range(clients)), 1_000_000, 0.1, state, state))
        self._gradients = torch.randn(clients * BATCH, FEATURES)

    def __call__(self) -> None:
        features = self._fleet.forward()
        assert features.student.shape == self._gradients.shape
        self._fleet.backward(self._gradients)


def bare_client(folder: Path, number: int, port: int, up: int, down: int) -> None:
    place = folder / "clients" / f"client-{number}"
    context = ssl.create_default_context(cafile=str(place / "authority.crt"))
    context.load_cert_chain(place / "client.crt", place / "client.key")
    payload, room = os.urandom(up), memoryview(bytearray(down))
    with (
        context.wrap_socket(
            socket.create_connection(("localhost", port)), server_hostname="localhost"
        ) as stream,
        contextlib.suppress(OSError, EOFError),
    ):
        while True:
            stream.sendall(payload)
            receive(stream, room)


def receive(stream: ssl.SSLSocket, room: memoryview) -> None:
    filled = 0
    while filled < len(room):
        count = stream.recv_into(room[filled:])
        if not count:
            raise EOFError
        filled += count


class BareLoop:
    """The same bytes through TLS sockets and threads, with nothing else done to them."""

    def __init__(self, folder: Path, listener: socket.socket, clients: int) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "server.crt", folder / "server.key")
        context.load_verify_locations(folder / "authority.crt")
        context.verify_mode = ssl.CERT_REQUIRED
        self._gradients = os.urandom(4 * BATCH * FEATURES)
        self._go = threading.Barrier(clients + 1)
        self._all_here = threading.Barrier(clients + 1)
        for _ in range(clients):
            stream = context.wrap_socket(listener.accept()[0], server_side=True)
            threading.Thread(target=self._serve, args=(stream,), daemon=True).start()

    def _serve(self, stream: ssl.SSLSocket) -> None:
        room = memoryview(bytearray(8 * BATCH * FEATURES))
        with contextlib.suppress(OSError, EOFError, threading.BrokenBarrierError):
            while True:
                receive(stream, room)
                self._all_here.wait()
                self._go.wait()
                stream.sendall(self._gradients)

    def __call__(self) -> None:
        self._all_here.wait()
        self._go.wait()


def timed(step: Callable[[], None], count: int) -> tuple[float, float]:
    """Return milliseconds per iteration: wall clock, and this process's CPU time."""
    clock, cpu = time.perf_counter(), time.process_time()
    for _ in range(count):
        step()
    return 1e3 * (time.perf_counter() - clock) / count, 1e3 * (time.process_time() - cpu) / count


@contextlib.contextmanager
def paused(processes: list[multiprocessing.Process]) -> Iterator[None]:
    """Stop the other loop's clients, so that two loops never compete."""
    for process in processes:
        os.kill(process.pid, signal.SIGSTOP)  # type: ignore[arg-type]
    try:
        yield
    finally:
        for process in processes:
            os.kill(process.pid, signal.SIGCONT)  # type: ignore[arg-type]


def iteration(rounds: int = 5, count: int = 20, clients: int = CLIENTS) -> dict[str, Any]:
    """Return milliseconds per iteration of ``clients``: bare sockets, the transport alone, and the fleet."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        authority(folder, clients)
        listener = socket.create_server(("localhost", 0))
        ports = {name: PROCESSES.Value("i", 0) for name in ("transport", "fleet")}
        up, down = 8 * BATCH * FEATURES, 4 * BATCH * FEATURES
        # Forked before this process starts a gRPC thread, because a fork with one would hang.
        processes_of = {
            "bare": start(bare_client, clients, folder, listener.getsockname()[1], up, down),
            "transport": start(stand_in, clients, folder, ports["transport"], False),
            "fleet": start(stand_in, clients, folder, ports["fleet"], True),
        }
        servers = {name: server(folder, clients) for name in ports}
        for name, fleet in servers.items():
            ports[name].value = fleet.port
        loops: dict[str, Callable[[], None]] = {
            "bare": BareLoop(folder, listener, clients),
            "transport": TransportLoop(servers["transport"], clients),
            "fleet": FleetLoop(servers["fleet"], clients),
        }
        results: dict[str, list[tuple[float, float]]] = {name: [] for name in loops}
        for number in range(rounds + 1):
            for name, loop in loops.items():
                others = [
                    process
                    for other, group in processes_of.items()
                    if other != name
                    for process in group
                ]
                with paused(others):
                    measured = timed(loop, count)
                if number:  # the first pass warms up
                    results[name].append(measured)
        for process in [process for group in processes_of.values() for process in group]:
            process.kill()
        for fleet in servers.values():
            fleet.kill()
    clock, cpu = (
        {name: statistics.median(row[column] for row in rows) for name, rows in results.items()}
        for column in (0, 1)
    )
    return {
        **{f"{name}_ms": round(value, 1) for name, value in clock.items()},
        **{f"{name}_server_cpu_ms": round(value, 1) for name, value in cpu.items()},
        "transport_ratio": round(clock["transport"] / clock["bare"], 2),
        "fleet_ratio": round(clock["fleet"] / clock["bare"], 2),
    }


def start(target: Callable[..., None], clients: int, folder: Path, *arguments: Any) -> list[Any]:
    """Start one process per client."""
    processes = [
        PROCESSES.Process(target=target, args=(folder, number, *arguments), daemon=True)
        for number in range(clients)
    ]
    for process in processes:
        process.start()
    return processes
