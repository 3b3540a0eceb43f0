"""Measure what many idle clients cost their server, and how soon they return after it is killed."""

import queue
import signal
import tempfile
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from reproduction.benchmarks.loopback import (
    CLIENTS,
    PROCESSES,
    authority,
    configuration,
    connected,
    free_port,
    model,
    resident,
    server,
)
from semisfl.net import chunks
from semisfl.net.chunks import LoopThread
from semisfl.net.client.connection import Received
from semisfl.net.frames import encode
from semisfl.net.messages import Schemas


class Responder(queue.Queue[object]):
    """Stand in for a connection's inbox: answer the first message with ``ready``, and drop all others."""

    def __init__(self, digest: str) -> None:
        super().__init__()
        self._ready = encode("ready", {"model": digest, "images": 1, "skipped": 0}, {})

    def put(self, item: object, block: bool = True, timeout: float | None = None) -> None:
        if isinstance(item, Received) and item.ticket == 1:
            item.stream.answer(item.ticket, self._ready)


def crowd(folder: Path, first: int, last: int, port: int) -> None:
    """Run many clients in one process, each with its own certificate, connection and back-off."""
    thread = LoopThread("crowd")
    responder = Responder(Schemas.of(configuration(CLIENTS), model()).digest)
    _links = [connected(number, folder, port, thread, responder) for number in range(first, last)]
    signal.pause()


def counting_server(folder: Path, clients: int, port: int, state: Any) -> None:
    """Publish the number of connected clients to another process, and measure their cost once all are there."""
    fleet = server(folder, clients, port)
    empty = resident()
    while True:
        state["present"] = len(fleet.present())
        state["megabytes"] = (resident() - empty) / 2**20
        state["cpu"] = time.process_time()
        delays = sorted(
            session.delay
            for session in list(fleet._listener.table.enrolled.values())
            if session.delay
        )
        if delays:
            state["heartbeats"], state["p99"] = len(delays), delays[int(0.99 * (len(delays) - 1))]
        time.sleep(0.05)


def wait(condition: Callable[[], bool], seconds: float) -> float:
    started = time.perf_counter()
    while not condition():
        if time.perf_counter() - started > seconds:
            raise TimeoutError(f"not so after {seconds} s")
        time.sleep(0.01)
    return time.perf_counter() - started


def idle(clients: int = 1000) -> dict[str, Any]:
    """Measure idle mutual-TLS clients on one server, and how soon they return after it is killed."""
    with tempfile.TemporaryDirectory() as place, PROCESSES.Manager() as manager:
        folder = Path(place)
        authority(folder, clients)
        port = free_port()
        state = manager.dict(present=0, heartbeats=0)

        def start_server() -> BaseProcess:
            process = PROCESSES.Process(
                target=counting_server, args=(folder, clients, port, state), daemon=True
            )
            process.start()
            return process

        process = start_server()
        devices = PROCESSES.Process(target=crowd, args=(folder, 0, clients, port), daemon=True)
        devices.start()
        connected = wait(lambda: state["present"] == clients, 300)
        # The server sends every client one heartbeat in this time.
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
        for each in (process, devices):
            each.kill()
            each.join()
    return result
