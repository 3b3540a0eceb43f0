"""Hold one stream to the server: what arrives on it and what waits to be sent."""

import asyncio
import time
from dataclasses import dataclass

from semisfl.net import chunks, messages
from semisfl.net.chunks import PREFIX, Assembler, Parts, Violation

CROWDED = 2
"""Answers that may wait to be sent before the device waits for its server to take them."""

USELESS = 100
"""Messages that a device could not use before it disconnects: heartbeats, frames that are skipped or get no answer.
Of an honest server few are on the way at a time."""
FORGOTTEN = 10
"""Useless messages that are forgotten in the time between two heartbeats."""


class Useless:
    """Count messages that the device cannot use. Older ones are forgotten."""

    def __init__(self) -> None:
        self._count, self._since = 0.0, time.monotonic()

    def add(self) -> None:
        """Count one more; raise `Violation` if it is one too many."""
        now = time.monotonic()
        forgotten = (now - self._since) * FORGOTTEN / chunks.BEAT_SECONDS
        self._count, self._since = max(0.0, self._count - forgotten) + 1, now
        if self._count > USELESS:
            raise Violation(f"over {USELESS} messages that a device cannot use")

    def answered(self) -> None:
        """Note that one of them got an answer."""
        self._count = max(0.0, self._count - 1)


class Stream:
    """Queue answers for one connection. Any thread may call `answer` and `beat`, also after its end."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.assembler = Assembler(in_order=True)
        self.assembler.limit = messages.WELCOME.limit
        self.useless = Useless()
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

    def feed(self, chunk: bytes) -> tuple[int, bytearray] | None:
        """Return a frame's ticket and bytes once it is complete; raise `Violation` if too little is of use."""
        progress, complete = self.assembler.feed(chunk)
        # Every frame counts until it is answered: the thread that trains may ignore it.
        if complete is not None or not progress or len(chunk) == PREFIX.size:
            self.useless.add()
        return complete

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
