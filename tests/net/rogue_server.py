"""A server that speaks the protocol and says whatever an attack wants it to say."""

import asyncio
import contextlib
import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import grpc.aio
import numpy as np
from PIL import Image
from torch import Tensor

from semisfl.fleet.packing import joined
from semisfl.models.build import build_model
from semisfl.net import chunks
from semisfl.net.chunks import Assembler, LoopThread, cut
from semisfl.net.frames import encode, unpack
from semisfl.net.server.listener import open_port
from semisfl.net.server.trust import Trust
from semisfl.net.terms import Terms
from semisfl.settings.config import Config
from tests.net.harness import CLASSES, SIDE, tiny
from tests.processes import Forked


class Received(NamedTuple):
    kind: str
    fields: dict[str, Any]
    size: int


@dataclass
class Peer:
    """One device's connection."""

    context: Any
    received: list[Received]
    _tickets: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _assembler: Assembler = field(default_factory=Assembler)

    async def hears(self) -> Received:
        """Return the device's next frame; raise EOFError at its goodbye."""
        while (chunk := await self.context.read()) is not grpc.aio.EOF:
            complete = self._assembler.feed(chunk)
            if complete is not None and complete[1]:
                data = memoryview(complete[1])
                length = int.from_bytes(data[8:12], "little")
                kind, fields, _ = unpack(data[16 : 16 + length])
                self.received.append(Received(kind, fields, len(data)))
                return self.received[-1]
        raise EOFError

    async def say(self, kind: str, fields: Mapping[str, Any], **how: Any) -> None:
        tensors, codecs = how.pop("tensors", {}), how.pop("codecs", "fp32")
        await self.say_bytes(b"".join(encode(kind, fields, tensors, codecs)))

    async def say_bytes(self, data: bytes) -> None:
        for chunk in cut(data, next(self._tickets)):
            await self.context.write(chunk)

    async def beat(self) -> None:
        for chunk in cut(b"", 0):
            await self.context.write(chunk)

    async def welcome(self, terms: str) -> Received:
        """Send ``terms``; return the device's answer."""
        await self.say("welcome", {"terms": terms})
        return await self.hears()

    async def split(self, terms: str, **changes: Any) -> None:
        """Begin a split round with weights that fit the terms."""
        await self.say_bytes(split_frame(terms, **changes))


def split_frame(terms: str, **changes: Any) -> bytes:
    """Return the frame that begins a split round under ``terms``."""
    plain = Terms.from_json(terms, ["semisfl", "fedswitch"])
    model = build_model(plain.config, plain.shape, plain.classes, projector="none")
    state = {name: value.detach() for name, value in model.bottom.state_dict().items()}
    lr = plain.config.optimizer.lr
    fields = {"round": 0, "steps": plain.config.clients.steps, "lr": lr, "ema": False, "decay": 0.0}
    states: dict[str, dict[str, Tensor]] = {"bottom": state, "teacher": state}
    return b"".join(encode("split", {**fields, **changes}, joined(states)))


Script = Callable[[Peer], Awaitable[None]]


class RogueServer:
    """Run ``script`` for every device that connects; the stream ends with it."""

    def __init__(self, script: Script, certificates: Path | None = None) -> None:
        self.received: list[Received] = []
        self.ended = threading.Event()
        self.calls = 0
        self._script = script
        self._thread = LoopThread("rogue")
        self.port: int = self._thread.call(self._start(certificates))

    async def _start(self, certificates: Path | None) -> int:
        service, _, method = chunks.METHOD[1:].partition("/")
        trust = None if certificates is None else Trust(certificates)
        self._server, port = open_port(
            "127.0.0.1:0", service, {method: self._serve}, trust, chunks.options()
        )
        await self._server.start()
        return port

    async def _serve(self, _: Any, context: grpc.aio.ServicerContext) -> None:
        self.calls += 1
        peer = Peer(context, self.received)
        with contextlib.suppress(EOFError, grpc.RpcError, asyncio.CancelledError):
            assert (await peer.hears()).kind == "hello"
            await self._script(peer)
        self.ended.set()

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._thread.call(self._server.stop(None), 5)
        self._thread.stop()


@contextmanager
def rogue(script: Script, certificates: Path | None = None) -> Iterator[RogueServer]:
    server = RogueServer(script, certificates)
    try:
        yield server
    finally:
        server.close()


def terms(config: Config | None = None, **changes: Any) -> str:
    """Return honest terms as JSON; ``changes`` by dotted key (``config__clients__batch=3``)."""
    plain = json.loads(Terms(config or tiny(), (1, SIDE, SIDE), CLASSES, (0.5,), (0.5,)).to_json())
    for key, value in changes.items():
        *path, last = key.split("__")
        place = plain
        for step in path:
            place = place[step]
        place[last] = value
    return json.dumps(plain)


# --- a real device --------------------------------------------------------------------------------


class Ended(NamedTuple):
    status: int
    output: str
    peak: int
    """Bytes of memory that the process had at most, beyond what it had before it connected."""


PROGRAM = """
import os, sys, threading, time
from semisfl.cli import main as cli
import semisfl.net.client.join, torch
if int(sys.argv.pop(1)):
    # An owner who accepts any terms.
    semisfl.net.client.owner.Approval.check = lambda self, digest: None
def resident():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS")) * 1024
most, before, peak = int(sys.argv[1]), resident(), 0
def watch():
    global peak
    while True:
        peak = max(peak, resident())
        if peak - before > most:
            print("PEAK", peak - before, flush=True)
            os._exit(99)
        time.sleep(0.01)
threading.Thread(target=watch, daemon=True).start()
sys.argv = ["semisfl", *sys.argv[2:]]
status = cli.main()
print("PEAK", max(peak, resident()) - before, flush=True)
sys.exit(status)
"""


def folder_of_images(place: Path, count: int = 12, side: int = SIDE) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for number in range(count):
        pixels = rng.integers(0, 256, (side, side), dtype=np.uint8)
        Image.fromarray(pixels).save(place / f"{number}.png")
    return place


def run_device(words: list[str], most: int, seconds: float = 60, approves: bool = True) -> Ended:
    """Run ``semisfl WORDS`` as a process; end it with status 99 beyond ``most`` more bytes.

    With ``approves`` its owner accepts any terms.
    """
    command = [sys.executable, "-c", PROGRAM, str(int(approves)), str(most), *words]
    process = Forked(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.terminate()
        output, _ = process.communicate(timeout=20)
    finally:
        process.kill()
    lines = output.splitlines()
    peaks = [int(line.split()[1]) for line in lines if line.startswith("PEAK")]
    text = "\n".join(line for line in lines if not line.startswith("PEAK"))
    return Ended(process.returncode, text, peaks[-1] if peaks else -1)


def attacked(
    script: Script,
    images: Path,
    *words: str,
    most: int = 10**10,
    seconds: float = 60,
    approves: bool = True,
) -> Any:
    """Let a device process join a rogue server; return how it ended and what the server heard."""
    with rogue(script) as server:
        address = f"127.0.0.1:{server.port}"
        join = ["join", address, "--data", str(images), "--insecure-loopback", "--name", "one"]
        ended = run_device([*join, "--device", "cpu", *words], most, seconds, approves)
        return ended, server
