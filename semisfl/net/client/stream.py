"""Hold one stream to the server: what arrives on it and what waits to be sent."""

import asyncio
import time
from dataclasses import dataclass

from semisfl.net import messages
from semisfl.net.chunks import Assembler, Parts

CROWDED = 2
"""Answers that may wait to be sent before the device waits for its server to take them."""


class Stream:
    """Queue answers for one connection. Any thread may call `answer` and `beat`, also after its end."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.assembler = Assembler(in_order=True)
        self.assembler.limit = messages.WELCOME.limit
        self.outbox: asyncio.Queue[tuple[int, Parts] | None] = asyncio.Queue()
        self.drained = asyncio.Event()
        self.beaten = time.monotonic()
        self.enrolled = False
        """Whether the server gave this client its place; set by the thread that trains."""
        self._loop = loop

    @property
    def crowded(self) -> bool:
        """Return whether the server has not taken the last answers yet, while the stream lives."""
        return self.outbox.qsize() >= CROWDED and not self.drained.is_set()

    def answer(self, ticket: int, parts: Parts) -> None:
        """Send ``parts``, which must not change any more, as the answer to ``ticket``."""
        self._loop.call_soon_threadsafe(self.outbox.put_nowait, (ticket, parts))

    def beat(self, ticket: int) -> None:
        """Tell the server that ``ticket`` is still being worked on."""
        if not self.crowded:
            self.answer(ticket, [])


@dataclass(frozen=True)
class Received:
    """Hold a frame's bytes with the stream and the ticket it came with."""

    stream: Stream
    ticket: int
    data: bytearray
