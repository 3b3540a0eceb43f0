"""Clients with a valid certificate that misbehave: every trick costs its author, and nobody else."""

import contextlib
import itertools
import logging
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from semisfl.net import chunks
from semisfl.net.chunks import MAGIC, PREFIX, LoopThread, Parts
from semisfl.net.client import connection
from semisfl.net.client.connection import Connection, Received, Target
from semisfl.net.client.device import Device
from semisfl.net.client.join import load_images
from semisfl.net.client.owner import Owner
from semisfl.net.client.rejection import Rejected
from semisfl.net.frames import encode
from semisfl.net.server.value_checks import ABSURD
from semisfl.net.tls import certs
from tests.net.harness import AcceptsAll
from tests.net.test_any_frame import CHANGES, Message

AT_MOST = 6.0
"""Seconds that a trick which only takes time goes on."""


class Answer(NamedTuple):
    """Hold the answer that an honest client would give now."""

    received: Received
    kind: str
    fields: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    codecs: Any

    def say(self, *parts: bytes) -> None:
        self.received.stream.answer(self.received.ticket, list(parts))


Trick = Callable[[Answer, random.Random], None]


class Raw(list[bytes]):
    """Messages that go out as they are, instead of a frame's parts."""


def send_raw(answer: Answer, make: Callable[[int, int], bytes]) -> None:
    stream = answer.received.stream
    message = make(stream.assembler.epoch, answer.received.ticket)
    stream.answer(answer.received.ticket, Raw([message]))


def as_it_is(parts: Parts, epoch: int, ticket: int) -> Iterator[bytes]:
    return iter(parts) if isinstance(parts, Raw) else chunks.cut(parts, epoch, ticket)


# --- the tricks -----------------------------------------------------------------------------------


def wrong_frame(answer: Answer, rng: random.Random) -> None:
    # Changed tensors may be believable: those have tricks of their own.
    change = CHANGES[rng.choice(sorted(CHANGES.keys() - {"tensors_changed"}))]
    message = Message(answer.kind, sorted(answer.fields.items()), answer.tensors, answer.codecs)
    change(message, rng)
    try:
        answer.say(message.pack())
    except (OverflowError, ValueError):
        answer.say(b"nonsense")


def wrong_message(answer: Answer, rng: random.Random) -> None:
    send_raw(
        answer,
        rng.choice(
            [
                lambda epoch, ticket: bytes(chunks.CHUNK + 1),
                lambda epoch, ticket: bytes(chunks.LARGEST_MESSAGE + 1),
                lambda epoch, ticket: PREFIX.pack(MAGIC, epoch, ticket, 1 << 31) + b"x" * 100,
                lambda epoch, ticket: PREFIX.pack(MAGIC, epoch, ticket, 1 << 60),
                lambda epoch, ticket: PREFIX.pack(b"NOPE", epoch, ticket, 10) + b"x" * 10,
                lambda epoch, ticket: PREFIX.pack(MAGIC, epoch, ticket, 0) + b"x",
                lambda epoch, ticket: b"abc",
                lambda epoch, ticket: b"",
            ]
        ),
    )


def _poison(answer: Answer, value: float) -> None:
    if not answer.tensors:
        return answer.say(b"nothing to poison")
    floating = {k: t for k, t in answer.tensors.items() if t.is_floating_point()}
    poisoned = {k: torch.full_like(tensor, value) for k, tensor in floating.items()}
    parts = encode(answer.kind, answer.fields, {**answer.tensors, **poisoned}, answer.codecs)
    return answer.say(b"".join(parts))


def impossible_values(answer: Answer, rng: random.Random) -> None:
    _poison(answer, rng.choice([float("nan"), float("inf"), -1e30]))


def poison(answer: Answer, rng: random.Random) -> None:
    """Believable one by one; only the others' values show that these cannot be."""
    _poison(answer, 0.9 * ABSURD)


def claim(answer: Answer, rng: random.Random) -> None:
    images = rng.choice([2**62, 10**13, 0, -5])
    answer.say(b"".join(encode(answer.kind, {**answer.fields, "images": images}, {})))


def empty_frames(answer: Answer, rng: random.Random) -> None:
    for _ in range(int(AT_MOST / 0.2)):
        answer.received.stream.beat(answer.received.ticket)
        time.sleep(0.2)


def silence(answer: Answer, rng: random.Random) -> None:
    time.sleep(AT_MOST)


def flood(answer: Answer, rng: random.Random) -> None:
    for _ in range(300):
        answer.received.stream.answer(999_999, [b"again"])


def signs_of_work(answer: Answer, rng: random.Random) -> None:
    for _ in range(500):
        answer.received.stream.beat(answer.received.ticket)


def fetch_loop(answer: Answer, rng: random.Random) -> None:
    fetch = b"".join(encode("fetch", {"round": answer.fields["round"], "name": "teacher"}, {}))
    for _ in range(100):
        answer.say(fetch)


AT_READY: list[Trick] = [claim, wrong_frame, wrong_message, silence]
IN_A_ROUND: list[Trick] = [
    *(wrong_frame, wrong_message, impossible_values, empty_frames),
    *(silence, flood, signs_of_work, fetch_loop),
]


# --- who plays them -------------------------------------------------------------------------------


class Trickster(Device):
    """Honest until its moment has come, then plays ``trick`` instead of answering; once."""

    def plan(self, moment: int, trick: Trick, rng: random.Random) -> None:
        self._moment, self._trick, self._rng = moment, trick, rng

    def answer(
        self,
        received: Received,
        kind: str,
        fields: Any,
        cleared: Any = None,
        codecs: Any = "fp32",
        *,
        copy: bool = True,
    ) -> None:
        self._moment -= 1
        if self._moment == -1:
            tensors = cleared.tensors if cleared else {}
            return self._trick(Answer(received, kind, dict(fields), tensors, codecs), self._rng)
        return super().answer(received, kind, fields, cleared, codecs, copy=copy)


def misbehave(place: Path, name: str, port: int, seed: str, poisons: bool) -> None:
    """Play tricks, one after another, for ever; ``seed`` decides which."""
    logging.disable(logging.CRITICAL)
    connection.cut = as_it_is  # type: ignore[attr-defined]
    rng, thread = random.Random(seed), LoopThread("villain")
    credentials = certs.load_client_credentials(place / "certs", name)
    tricks = IN_A_ROUND + ([poison] * 3 if poisons else [])
    for number in itertools.count():
        moment = rng.randrange(10)
        trick = rng.choice(AT_READY if moment == 0 else tricks)
        if number % 5 == 4:
            _knock(port, rng)
        target = Target(f"localhost:{port}", credentials)
        link = Connection(target, Owner(approval=AcceptsAll()), thread=thread)
        device = Trickster(link, lambda shape: load_images(place / name, shape), "cpu")
        device.plan(moment, trick, random.Random(rng.random()))
        # Some tricks end the connection, some only the round; some moments never come.
        patience = threading.Timer(rng.uniform(4, 12), device.stop)
        patience.start()
        if rng.random() < 0.2:  # the same certificate twice at once: one of them is fenced off
            twin = Connection(target, thread=thread)
            threading.Timer(2.0, twin.kill).start()
        with contextlib.suppress(Rejected):
            device.serve()
        patience.cancel()
        time.sleep(rng.uniform(0.2, 2.0))


def _knock(port: int, rng: random.Random) -> None:
    """Open connections that send nothing, or nothing valid."""
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
        for _ in range(20):
            door = stack.enter_context(socket.create_connection(("localhost", port), 5))
            door.sendall(rng.choice([b"", b"GET / HTTP/1.0\r\n\r\n", rng.randbytes(300)]))
        time.sleep(1.0)
