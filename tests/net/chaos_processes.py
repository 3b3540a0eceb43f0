"""The processes of a chaos run: a server that says who answered when, and honest clients."""

import json
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

from semisfl.data import sources
from semisfl.fleet.base import SplitRound
from semisfl.fleet.byte_counts import Kind
from semisfl.fleet.setup import NetworkOptions
from semisfl.net import chunks
from semisfl.net.client.join import join
from semisfl.net.client.owner import Approval
from semisfl.net.frames import Frame
from semisfl.net.server.fleet import NetworkFleet
from semisfl.runs import experiment, start
from semisfl.settings.config import parse, read
from semisfl.stopping import StopFlag

RECORD = "record "
FINISHED = "finished"
PACE = 0.25
"""Seconds that the server lets pass in each step, so that faults meet every moment of a round."""
CALM_ROUNDS = 10
"""At the end: they wait until nothing more is going to happen, so that everybody can be back."""


def calm(place: Path) -> Path:
    """Return the file that exists once all faults are over."""
    return place / "calm"


def say(line: str) -> None:
    """Write a line at once, so that no line of the log comes between."""
    os.write(1, f"{line}\n".encode())


class RecordingFleet(NetworkFleet):
    """Prints, for every round that counts, who answered at which step."""

    calm: Path

    def start_round(self, plan: SplitRound) -> None:
        while plan.index >= self.config.rounds - CALM_ROUNDS and not self.calm.exists():
            self.waiting._stop.check()
            time.sleep(0.1)
        self._answered: list[list[int]] = []
        self._plan, self._counts = plan, super().image_counts()
        super().start_round(plan)

    def _answers(self, kind: Kind) -> dict[int, Frame]:
        time.sleep(PACE)
        answers = super()._answers(kind)
        self._answered.append(sorted(answers))
        return answers

    def image_counts(self) -> Mapping[int, int]:
        self._counts = super().image_counts()
        return self._counts

    def settle(self, good: bool) -> str | None:
        suspect = super().settle(good)
        if suspect is None:
            record = {
                "round": self._plan.index,
                "active": self._plan.active,
                "answered": self._answered,
                "images": self._counts,
                "strikes": {n: c for n, c in self.sessions.strikes.items() if c},
            }
            say(RECORD + json.dumps(record))
        return suspect


def _impatient() -> None:
    """A frozen device is noticed in seconds, so that minutes hold many faults."""
    chunks.BEAT_SECONDS, chunks.SILENCE_SECONDS = 1.0, 4.0


def _speak_to(pipe: Pipe) -> None:
    for number in (1, 2):
        os.dup2(pipe.fileno(), number)
    logging.basicConfig(level=logging.INFO, force=True)


def fill_disk(pid: int, full: bool) -> None:
    """Let every write of that process fail, as on a full disk, or no longer."""
    most = 0 if full else resource.RLIM_INFINITY
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))


def serve(place: Path, port: int, disk_full: bool, pipe: Pipe) -> None:
    """Begin the run, or go on with it."""
    _speak_to(pipe)
    _impatient()
    if disk_full:
        fill_disk(os.getpid(), True)
    experiment.FLEETS["network", "trained"] = f"{__name__}:{RecordingFleet.__name__}"
    RecordingFleet.calm = calm(place)
    stop = StopFlag()
    signal.signal(signal.SIGTERM, lambda *_: stop.request())
    arguments: dict[str, Any] = {
        "data": sources.load(str(place / "labeled")),
        "device": "cpu",
        "stop": stop,
        "network": NetworkOptions(f"localhost:{port}", place / "certs"),
    }
    out = place / "out"
    begun = (
        start.go_on(out, **arguments)
        if (out / "config.toml").exists()
        else start.begin(parse(read(place / "run.toml")), out=out, **arguments)
    )
    with begun as run:
        result = run.go()
    if not result.stopped:
        assert run.directory is not None and not run.directory.unsaved, "the run was saved"
        say(FINISHED)


def take_part(place: Path, name: str, port: int, pipe: Pipe) -> None:
    """An honest client; ends with status 0 once the run is finished."""
    _speak_to(pipe)
    _impatient()
    Approval.check = lambda self, digest: None  # type: ignore[method-assign]  # its owner accepts any terms
    certificates = place / "certs" / "clients" / name
    join(f"localhost:{port}", place / name, certificates=certificates, device="cpu")
    sys.exit(0)
