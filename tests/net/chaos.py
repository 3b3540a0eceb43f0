"""Run under constant attack; the faults follow from a seed, the result must not depend on them.

    python -m tests.net.chaos [--seed N] [--minutes M] [--clients N]

Real processes over mutual TLS. Clients die, freeze, lag, fall silent, lose their connection and
return; the server is killed, stopped and resumed; the disk fills and empties. Afterwards the run
must have finished, no client may have been shut out, and the weights must be, bit for bit, those of
a run without a network in which the same clients answered at the same steps.
"""

import argparse
import functools
import heapq
import itertools
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from semisfl.net.tls import certs
from semisfl.settings.toml import to_toml
from tests.net import chaos_processes
from tests.net.chaos_outcome import participation, wrong
from tests.net.chaos_processes import CALM_ROUNDS, FINISHED, PACE, RECORD
from tests.net.harness import Proxy, tiny
from tests.processes import free_port

STEPS = 3
PARTS = (("train", 4), ("test", 2))
"""Labelled images of each class."""
PROCESSES = multiprocessing.get_context("forkserver")
# Processes are forked from one that has imported everything, and never spoken gRPC.
PROCESSES.set_forkserver_preload(["tests.net.chaos_processes"])


# --- what is to happen ----------------------------------------------------------------------------


class Fault(NamedTuple):
    """``at`` so many seconds after the first round, ``what`` happens to ``who`` (an honest client;
    -1: the server), for ``lasts`` seconds."""

    at: float
    what: str
    who: int
    lasts: float


TO_CLIENTS = ("die", "freeze", "fall silent", "lag", "lose the connection")
TO_SERVER = ("server killed", "server stopped", "disk full")


def schedule(seed: int, seconds: float, clients: int) -> list[Fault]:
    """Return every kind of fault once, then any of them; the same for the same arguments."""
    rng = random.Random(seed)
    first = [*TO_CLIENTS, *TO_SERVER]
    rng.shuffle(first)
    gap = min(2.0, seconds / (2 * len(first)))
    faults, at = [], 0.0
    while (at := at + rng.uniform(0.5, 1.5) * gap) < seconds:
        what = first.pop() if first else rng.choice([*TO_CLIENTS * 3, *TO_SERVER])
        lasts = round(rng.uniform(0.2, min(8.0, seconds / 4)), 2)
        if what == "disk full":
            lasts += 3.0  # so that a round ends meanwhile
        who = -1 if what in TO_SERVER else rng.randrange(clients)
        faults.append(Fault(round(at, 2), what, who, lasts))
    return faults


# --- doing it -------------------------------------------------------------------------------------


class Started:
    """A process and every line it says."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        reader, writer = PROCESSES.Pipe(duplex=False)
        self.lines: list[str] = []
        self.hindered = False
        """The disk was full at some time of its life, perhaps as it began."""
        self.process: BaseProcess = PROCESSES.Process(
            target=target, args=(*arguments, writer), daemon=True
        )
        self.process.start()
        writer.close()
        self._reading = threading.Thread(target=self._read, args=(reader,), daemon=True)
        self._reading.start()

    def _read(self, reader: Any) -> None:
        with open(os.dup(reader.fileno()), encoding="utf-8", errors="replace") as file:
            for line in file:
                self.lines.append(line.rstrip("\n"))

    @property
    def running(self) -> bool:
        """Whether this server got to its rounds."""
        return any(", rounds " in line for line in self.lines)

    @property
    def tail(self) -> str:
        return " | ".join(self.lines[-3:])

    def signal(self, number: int) -> None:
        if self.process.is_alive() and self.process.pid is not None:
            os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGKILL)
        self.ended()

    def ended(self, seconds: float = 30) -> int | None:
        """Its exit status, once it has one and all it said is here."""
        self.process.join(seconds)
        if self.process.exitcode is not None:
            self._reading.join(5)
        return self.process.exitcode


class Chaos:
    def __init__(self, place: Path, seed: int, seconds: float, clients: int) -> None:
        self.place, self.seed, self.seconds = place, seed, seconds
        self.honest = [f"client-{number}" for number in range(clients)]
        # With servers that are down half of the time.
        self.rounds = int(seconds / (2 * PACE * (STEPS + 1))) + CALM_ROUNDS
        self.faults = schedule(seed, seconds, clients)
        self.config = tiny(
            clients,
            seed=seed,
            rounds=self.rounds,
            clients={"steps": STEPS},
            network={"deadline": 3.0, "quorum": 2},
        )
        self.port = free_port()
        self.surprises: list[str] = []
        """Events that no fault explains."""
        self.servers: list[Started] = []
        self.clients: dict[int, Started | None] = {}
        self.proxies: list[Proxy] = []
        self.full = False
        self._began = time.monotonic()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._server_up = True

    def prepare(self) -> None:
        rng = np.random.default_rng(self.seed)
        groups = {f"labeled/{part}/{name}": count for name in "abcd" for part, count in PARTS}
        for group, count in {**groups, **dict.fromkeys(self.honest, 12)}.items():
            (self.place / group).mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 256, (16, 16), dtype=np.uint8)
                Image.fromarray(pixels).save(self.place / group / f"{number}.png")
        (self.place / "run.toml").write_text(to_toml(self.config), encoding="utf-8")
        certs.make_authority(self.place / "certs")
        certs.make_server(self.place / "certs", ["localhost"])
        for name in self.honest:
            certs.make_client(self.place / "certs", name)

    # --- what happens ----------------------------------------------------------------------------

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time.monotonic() + seconds, next(self._order), action))

    def start_server(self) -> None:
        self._server_up = True
        arguments = (self.place, self.port, self.full)
        self.servers.append(Started(chaos_processes.serve, *arguments))
        self.servers[-1].hindered = self.full

    def end_server(self, number: int, lasts: float) -> None:
        self._server_up = False
        self.servers[-1].signal(number)
        server = self.servers[-1]
        status = server.ended()
        if number == signal.SIGTERM and status != 0 and server.running:
            self.surprises.append(f"asked to stop, the server ended with {status}: {server.tail}")
            server.kill()
        self.later(lasts, self.start_server)

    def disk(self, full: bool) -> None:
        self.full = full
        self.servers[-1].hindered |= full
        pid = self.servers[-1].process.pid
        if self.servers[-1].process.is_alive() and pid is not None:
            chaos_processes.fill_disk(pid, full)

    def start_client(self, who: int) -> None:
        port = self.proxies[who].port
        arguments = (self.place, self.honest[who], port)
        self.clients[who] = Started(chaos_processes.take_part, *arguments)

    def do(self, fault: Fault) -> None:
        who, lasts = fault.who, fault.lasts
        if who < 0:
            if fault.what == "disk full":
                self.disk(True)
                self.later(lasts, lambda: self.disk(False))
            elif self._server_up:
                number = signal.SIGKILL if fault.what == "server killed" else signal.SIGTERM
                self.end_server(number, lasts)
            else:  # it is down already; its turn comes
                self.later(0.5, functools.partial(self.do, fault))
            return
        client, proxy = self.clients[who], self.proxies[who]
        if fault.what == "die" and client is not None:
            self.clients[who] = None
            client.kill()
            self.later(lasts, lambda: self.start_client(who))
        elif fault.what == "freeze" and client is not None:
            client.signal(signal.SIGSTOP)
            self.later(lasts, lambda: client.signal(signal.SIGCONT))
        elif fault.what == "fall silent":
            proxy.silent = True
            self.later(lasts, lambda: setattr(proxy, "silent", False))
        elif fault.what == "lag":
            proxy.rate = 80e3
            self.later(lasts, lambda: setattr(proxy, "rate", None))
        elif fault.what == "lose the connection":
            proxy.cut()

    def look_after(self) -> bool:
        """Start again what ended, as a service manager would; whether the run is finished."""
        server = self.servers[-1]
        if self._server_up and (status := server.process.exitcode) is not None:
            server.ended()
            if FINISHED in server.lines:
                return True
            # On a full disk a server may refuse to begin; nothing may end it once it runs.
            if server.running or not server.hindered:
                self.surprises.append(f"the server ended with {status}: {server.tail}")
            self._server_up = False
            self.later(1.0, self.start_server)
        for who, client in self.clients.items():
            if client is not None and (status := client.process.exitcode) is not None:
                client.ended()
                # It may have heard that the run is finished before the server says so here.
                if status != 0 or len(participation(self.server_lines())) < self.rounds:
                    self.surprises.append(f"{self.honest[who]} ended with {status}: {client.tail}")
                self.clients[who] = None
        return False

    def run(self) -> None:
        """Everything, until the run is finished; nobody is left behind."""
        try:
            self.start_server()
            for who in range(len(self.honest)):
                self.proxies.append(Proxy(f"127.0.0.1:{self.port}"))
                self.start_client(who)
            give_up = time.monotonic() + 10 * self.seconds + 300
            faults = self.faults
            while not self.look_after():
                if faults and any(line.startswith(RECORD) for line in self.server_lines()):
                    # From the first round on, however long it took everybody to begin.
                    for fault in faults:
                        self.later(fault.at, functools.partial(self.do, fault))
                    faults = []
                if time.monotonic() > give_up or len(self.surprises) > 2:
                    self.surprises.append(f"not finished: {self.servers[-1].tail}")
                    return
                if not faults and not self._due:
                    chaos_processes.calm(self.place).touch()
                while self._due and self._due[0][0] <= time.monotonic():
                    heapq.heappop(self._due)[2]()
                time.sleep(0.02)
            self._wait_for_clients()
        finally:
            for started in [*self.servers, *self.clients.values()]:
                if started is not None:
                    started.kill()
            for proxy in self.proxies:
                proxy.close()

    def _wait_for_clients(self) -> None:
        """The run is finished: every honest client has heard so, and ends."""
        for who, client in self.clients.items():
            if client is not None and client.ended() != 0:
                ending = f"with {client.process.exitcode}" if client.process.exitcode else "not"
                self.surprises.append(f"{self.honest[who]} ended {ending}: {client.tail}")

    def server_lines(self) -> list[str]:
        """Everything that any of the servers said, in order."""
        return [line for server in self.servers for line in server.lines]

    def report(self) -> dict[str, Any]:
        lines = self.server_lines()
        answers = [len(clients) for r in participation(lines) for clients in r["answered"]]
        return {
            "seed": self.seed,
            "seconds": round(time.monotonic() - self._began, 1),
            "rounds": self.rounds,
            "servers_started": len(self.servers),
            "faults": dict(Counter(fault.what for fault in self.faults)),
            "rounds_repeated": sum("is repeated" in line for line in lines),
            "left_out": sum("left out of this round" in line for line in lines),
            "refused": sum("refused peer=" in line for line in lines),
            "checkpoints_refused_by_the_disk": sum("cannot write checkpoint" in x for x in lines),
            "answers_a_step": round(float(np.mean(answers)), 2) if answers else 0,
            "schedule": self.faults,
        }


def chaos(
    place: Path, seed: int, seconds: float, clients: int = 4
) -> tuple[dict[str, Any], list[str]]:
    """One run; what happened in it, and what of that should not have."""
    torch.set_num_threads(1)
    run = Chaos(place, seed, seconds, clients)
    run.prepare()
    run.run()
    (place / "server.log").write_text("\n".join(run.server_lines()), encoding="utf-8")
    faults = run.surprises + wrong(place, run.config, run.honest, run.server_lines())
    return run.report(), faults


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=int(time.time()) % 100_000)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument(
        "--clients",
        type=int,
        default=5,
    )
    parser.add_argument("--keep", type=Path, help="a new folder to leave everything in")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # and nobody is left behind
    print(f"seed {options.seed}: --seed {options.seed} repeats what happens", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        place = options.keep or Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        report, faults = chaos(place, options.seed, 60 * options.minutes, options.clients)
    print(json.dumps(report))
    sys.exit("\n".join(faults) if faults else None)


if __name__ == "__main__":
    main()
