"""A server that speaks the protocol and says whatever an attack wants it to say."""

import asyncio
import contextlib
import itertools
import json
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import grpc.aio
import numpy as np
from PIL import Image
from torch import Tensor

from semisfl.fleet.packing import join_states
from semisfl.models.build import build_model
from semisfl.net import chunks
from semisfl.net.chunks import Assembler, LoopThread, cut
from semisfl.net.frames import encode, unpack
from semisfl.net.server.listener import open_port
from semisfl.net.terms import Terms
from semisfl.settings.config import Config
from tests.net.harness import CLASSES, SIDE, tiny


class Received(NamedTuple):
    kind: str
    fields: dict[str, Any]


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
                self.received.append(Received(kind, fields))
                return self.received[-1]
        raise EOFError

    async def say(self, kind: str, fields: Mapping[str, Any], **tensors: Any) -> None:
        await self.say_bytes(b"".join(encode(kind, fields, tensors.get("tensors", {}))))

    async def say_bytes(self, data: bytes) -> None:
        for chunk in cut(data, next(self._tickets)):
            await self.context.write(chunk)

    async def welcome(self, terms: str) -> Received:
        """Send ``terms``; return the device's answer."""
        await self.say("welcome", {"terms": terms})
        return await self.hears()

    async def enrol(self, terms: str) -> None:
        """Send ``terms`` and the place of client 0."""
        await self.welcome(terms)
        await self.say("enrolled", {"client": 0})

    async def split(self, terms: str) -> None:
        """Begin a split round with weights that fit the terms."""
        plain = Terms.from_json(terms, ["semisfl", "fedswitch"])
        model = build_model(plain.config, plain.shape, plain.classes, projector="none")
        state = {name: value.detach() for name, value in model.bottom.state_dict().items()}
        fields = {"round": 0, "steps": plain.config.clients.steps, "ema": False, "decay": 0.0}
        states: dict[str, dict[str, Tensor]] = {"bottom": state, "teacher": state}
        fields["lr"] = plain.config.optimizer.lr
        await self.say("split", fields, tensors=join_states(states))


Script = Callable[[Peer], Awaitable[None]]


class RogueServer:
    """Run ``script`` for every device that connects; the stream ends with it."""

    def __init__(self, script: Script) -> None:
        self.received: list[Received] = []
        self.ended = threading.Event()
        self._script = script
        self._thread = LoopThread("rogue")
        self.port: int = self._thread.call(self._start())

    async def _start(self) -> int:
        service, _, method = chunks.METHOD[1:].partition("/")
        self._server, port = open_port(
            "127.0.0.1:0", service, {method: self._serve}, None, chunks.options()
        )
        await self._server.start()
        return port

    async def _serve(self, _: Any, context: grpc.aio.ServicerContext) -> None:
        peer = Peer(context, self.received)
        with contextlib.suppress(EOFError, grpc.RpcError, asyncio.CancelledError):
            assert (await peer.hears()).kind == "hello"
            await self._script(peer)
        self.ended.set()

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._thread.call(self._server.stop(None), 5)
        self._thread.stop()


def terms(config: Config | None = None) -> str:
    """Return honest terms as JSON."""
    return Terms(config or tiny(), (1, SIDE, SIDE), CLASSES, (0.5,), (0.5,)).to_json()


def changed(text: str, path: str, value: Any) -> str:
    """Return terms with another value at a dotted ``path``, such as ``config.clients.batch``."""
    plain = json.loads(text)
    *sections, leaf = path.split(".")
    target = plain
    for section in sections:
        target = target[section]
    target[leaf] = value
    return json.dumps(plain)


def folder_of_images(place: Path, count: int = 12) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for number in range(count):
        pixels = rng.integers(0, 256, (SIDE, SIDE), dtype=np.uint8)
        Image.fromarray(pixels).save(place / f"{number}.png")
    return place
