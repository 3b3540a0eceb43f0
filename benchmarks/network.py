"""What the network costs: an iteration against a bare TLS socket, idle clients, coming back.

    python -m benchmarks.network [iteration | idle ...] [--clients N] [--json]

Everything is on loopback with mutual TLS. The two sides of a ratio are measured in turns within
one run, so that a busy machine disturbs both alike.
"""

import argparse
import contextlib
import json
import logging
import multiprocessing
import os
import resource
import signal
import socket
import ssl
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from semisfl.config import Config, parse
from semisfl.engine.hardware import Hardware
from semisfl.fleet.base import SplitRound
from semisfl.fleet.setup import FleetSetup, NetworkOptions
from semisfl.models import SplitModel
from semisfl.net import certs, chunks
from semisfl.net.chunks import LoopThread
from semisfl.net.client.connection import Connection, Received
from semisfl.net.frames import decode, encode
from semisfl.net.messages import Schemas
from semisfl.net.server.fleet import NetworkFleet

BATCH, FEATURES = 64, 4096  # student and teacher features 2 MiB, gradients 1 MiB
CLIENTS = 10
PROCESSES = multiprocessing.get_context("fork")


def configuration(clients: int) -> Config:
    active = min(clients, CLIENTS)
    return parse(
        {"clients": {"total": clients, "active": active, "batch": BATCH, "steps": 1_000_000}}
    )


def model() -> SplitModel:
    """The smallest model with features of the wanted size: only bytes are moved here."""
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


# --- an iteration ---------------------------------------------------------------------------------


def stand_in(folder: Path, number: int, port: int, coded: bool) -> None:
    """A client that does everything but arithmetic; without ``coded``, only moves bytes."""
    torch.set_num_threads(1)
    link = Connection(
        f"localhost:{port}", certs.load_client_credentials(folder, f"client-{number}")
    )
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
    """The bytes alone through streams: cut, sent, put together; like for like with `BareLoop`."""

    def __init__(self, fleet: NetworkFleet) -> None:
        assert fleet.wait_for(CLIENTS, 60)
        self._sessions = list(fleet._listener.sessions.values())
        self._inbox = fleet._questions._inbox
        self._gradients = os.urandom(4 * BATCH * FEATURES)

    def __call__(self) -> None:
        for session in self._sessions:
            session.ask([self._gradients], 2 * 8 * BATCH * FEATURES, copy=False)
        for _ in self._sessions:
            _, _, data = self._inbox.get()
            assert data is not None and len(data) == 8 * BATCH * FEATURES


class FleetLoop:
    """Iterations through NetworkFleet: checked, decoded, concatenated, as a method gets them."""

    def __init__(self, fleet: NetworkFleet) -> None:
        self._fleet = fleet
        assert fleet.wait_for(CLIENTS, 60)
        state = model().bottom.state_dict()
        fleet.start_round(SplitRound(0, tuple(range(CLIENTS)), 1_000_000, 0.1, state, state))
        self._gradients = torch.randn(CLIENTS * BATCH, FEATURES)

    def __call__(self) -> None:
        features = self._fleet.forward()
        assert features.student.shape == (CLIENTS * BATCH, FEATURES)
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

    def __init__(self, folder: Path, listener: socket.socket) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "server.crt", folder / "server.key")
        context.load_verify_locations(folder / "authority.crt")
        context.verify_mode = ssl.CERT_REQUIRED
        self._gradients = os.urandom(4 * BATCH * FEATURES)
        self._go = threading.Barrier(CLIENTS + 1)
        self._all_here = threading.Barrier(CLIENTS + 1)
        for _ in range(CLIENTS):
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
    """Milliseconds per iteration on the clock, and of this process's CPU."""
    clock, cpu = time.perf_counter(), time.process_time()
    for _ in range(count):
        step()
    return 1e3 * (time.perf_counter() - clock) / count, 1e3 * (time.process_time() - cpu) / count


@contextlib.contextmanager
def paused(processes: list[multiprocessing.Process]) -> Iterator[None]:
    """The other loop's clients stand still, so that two loops never compete."""
    for process in processes:
        os.kill(process.pid, signal.SIGSTOP)  # type: ignore[arg-type]
    try:
        yield
    finally:
        for process in processes:
            os.kill(process.pid, signal.SIGCONT)  # type: ignore[arg-type]


def iteration(rounds: int = 5, count: int = 20) -> dict[str, Any]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        authority(folder, CLIENTS)
        listener = socket.create_server(("localhost", 0))
        ports = {"transport": free_port(), "fleet": free_port()}
        up, down = 8 * BATCH * FEATURES, 4 * BATCH * FEATURES
        # Forked before this process has a gRPC thread: a fork would not survive one.
        people = {
            "bare": start(bare_client, folder, listener.getsockname()[1], up, down),
            "transport": start(stand_in, folder, ports["transport"], False),
            "fleet": start(stand_in, folder, ports["fleet"], True),
        }
        servers = {name: server(folder, CLIENTS, port) for name, port in ports.items()}
        loops: dict[str, Callable[[], None]] = {
            "bare": BareLoop(folder, listener),
            "transport": TransportLoop(servers["transport"]),
            "fleet": FleetLoop(servers["fleet"]),
        }
        results: dict[str, list[tuple[float, float]]] = {name: [] for name in loops}
        for number in range(rounds + 1):
            for name, loop in loops.items():
                others = [process for other in people if other != name for process in people[other]]
                with paused(others):
                    measured = timed(loop, count)
                if number:  # the first time is for warming up
                    results[name].append(measured)
        for process in [process for group in people.values() for process in group]:
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


def free_port() -> int:
    with socket.create_server(("localhost", 0)) as free:
        return free.getsockname()[1]


def start(target: Callable[..., None], folder: Path, *arguments: Any) -> list[Any]:
    """One process per client."""
    processes = [
        PROCESSES.Process(target=target, args=(folder, number, *arguments), daemon=True)
        for number in range(CLIENTS)
    ]
    for process in processes:
        process.start()
    return processes


# --- many clients ---------------------------------------------------------------------------------


class Responder:
    """Takes a link's place in the inbox: says it is ready, on the loop, and nothing else."""

    def __init__(self, digest: str) -> None:
        self._ready = encode("ready", {"model": digest, "images": 1, "skipped": 0}, {})

    def put(self, item: object) -> None:
        if isinstance(item, Received) and item.ticket == 1:
            item.stream.answer(item.ticket, self._ready)


def crowd(folder: Path, first: int, last: int, port: int) -> None:
    """Many clients in one process, each with its own certificate, connection and back-off."""
    thread = LoopThread("crowd")
    responder = Responder(Schemas.of(configuration(CLIENTS), model()).digest)
    links = []
    for number in range(first, last):
        credentials = certs.load_client_credentials(folder, f"client-{number}")
        link = Connection(f"localhost:{port}", credentials, thread=thread)
        link._inbox = responder  # type: ignore[assignment]
        links.append(link)
    signal.pause()


def lonely_server(folder: Path, clients: int, port: int, state: Any) -> None:
    """Counts who is there, for another process to see; and, once all are, what they cost."""
    fleet = server(folder, clients, port)
    empty = resident()
    while True:
        state["present"] = len(fleet.present())
        state["megabytes"] = (resident() - empty) / 2**20
        state["cpu"] = time.process_time()
        delays = sorted(
            session.delay for session in list(fleet._listener.sessions.values()) if session.delay
        )
        if delays:
            state["heartbeats"], state["p99"] = len(delays), delays[int(0.99 * (len(delays) - 1))]
        time.sleep(0.05)


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def wait(condition: Callable[[], bool], seconds: float) -> float:
    started = time.perf_counter()
    while not condition():
        if time.perf_counter() - started > seconds:
            raise TimeoutError(f"not so after {seconds} s")
        time.sleep(0.01)
    return time.perf_counter() - started


def idle(clients: int = 1000) -> dict[str, Any]:
    """Idle mutual-TLS clients on one server, and how soon they are back when it is killed."""
    with tempfile.TemporaryDirectory() as place, PROCESSES.Manager() as manager:
        folder = Path(place)
        authority(folder, clients)
        port = free_port()
        state = manager.dict(present=0, heartbeats=0)

        def start_server() -> multiprocessing.Process:
            process = PROCESSES.Process(
                target=lonely_server, args=(folder, clients, port, state), daemon=True
            )
            process.start()
            return process

        process = start_server()
        people = PROCESSES.Process(target=crowd, args=(folder, 0, clients, port), daemon=True)
        people.start()
        connected = wait(lambda: state["present"] == clients, 300)
        # Every client is sent one heartbeat in this time.
        before, _ = state["cpu"], wait(lambda: state["heartbeats"] >= clients, 60)
        time.sleep(chunks.BEAT_SECONDS)
        result = {
            "clients": clients,
            "seconds_to_connect": round(connected, 1),
            "server_kilobytes_a_client": round(1024 * state["megabytes"] / clients, 1),
            "server_cpu_seconds_idle": round(state["cpu"] - before, 2),
            "heartbeat_p99_ms": round(1e3 * state["p99"], 1),
        }
        process.kill()
        process.join()
        state["present"] = 0
        process = start_server()
        result["seconds_until_all_are_back"] = round(
            wait(lambda: state["present"] == clients, 300), 1
        )
        for each in (process, people):
            each.kill()
            each.join()
    return result


BENCHMARKS: dict[str, Callable[[int], dict[str, Any]]] = {
    "iteration": lambda clients: iteration(),
    "idle": idle,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=list(BENCHMARKS), help=", ".join(BENCHMARKS))
    parser.add_argument(
        "--clients", type=int, default=1000, help="of `idle`; 5000 needs `ulimit -n 20000`"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    for name in options.names:
        if name not in BENCHMARKS:
            sys.exit(f"{name!r} is not known; use {', '.join(BENCHMARKS)}")
        result = BENCHMARKS[name](options.clients)
        if options.json:
            print(json.dumps({"benchmark": f"network_{name}", **result}))
        else:
            print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in result.items()))


if __name__ == "__main__":
    main()
