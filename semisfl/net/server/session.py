"""Hold the server's end of one client's stream."""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from semisfl.net import chunks
from semisfl.net.chunks import Assembler, Parts, Violation, cut
from semisfl.net.server.cheap_frames import Connection
from semisfl.net.server.trust import ClientCertificate
from semisfl.settings.policy import DevicePolicy

UNASKED_LIMIT = 64
"""Unasked frames that a client may send before it counts as an offender."""


@dataclass
class Patience:
    """Limit how long the server waits for an answer.

    ``progress`` is when the client last did something for *this* answer: took a chunk of the
    question, sent a chunk of the answer, or reported that it is at work. The wait ends after
    ``deadline`` seconds without progress. It also ends, whatever the client reports, after
    ``deadline`` seconds for each of ``steps`` plus the time that ``size`` bytes take at the lowest
    rate allowed.
    """

    deadline: float
    steps: int
    size: int
    asked_at: float
    progress: float

    @property
    def most(self) -> float:
        return self.deadline * self.steps + self.size / chunks.LOWEST_RATE

    @property
    def ends(self) -> float:
        return min(self.progress + self.deadline, self.asked_at + self.most)

    def reason(self) -> str:
        if self.progress + self.deadline <= self.asked_at + self.most:
            return f"no progress for network.deadline = {self.deadline:g} s"
        return (
            f"its answer took over {self.most:.3g} s, the most for {self.steps} steps of "
            f"network.deadline = {self.deadline:g} s and {self.size} bytes at "
            f"{chunks.LOWEST_RATE:g} bytes/s"
        )


class Session:
    """Send questions and receive answers on one stream. Lives on the loop; any thread may call `ask`.

    It stores one frame at most: the answer to the latest ticket. Heartbeats only keep the connection
    alive; `patience` limits the wait for an answer.
    """

    def __init__(
        self,
        context: grpc.aio.ServicerContext,
        identity: str,
        epoch: int,
        deliver: Callable[["Session", int, bytearray], None],
    ) -> None:
        self.peer = context.peer()
        self.identity = identity
        self.epoch = epoch
        self.certificate: ClientCertificate | None = None
        """The client's certificate; None in plaintext."""
        self.connection = Connection()
        """Counts of the connection, over all its streams."""
        self.attempt = ("", 0)
        """The client's process, and the number of its connection."""
        self.policy = DevicePolicy()
        """The policy in the client's hello."""
        self.client = -1
        """The index in the roster, once the client is ready."""
        self.patience = Patience(math.inf, 1, 0, 0.0, 0.0)
        """How long to wait for the answer to the latest question."""
        self.delay: float | None = None
        """Seconds the last heartbeat took there and back."""
        self.forgotten = False
        """Whether the client was taken out: what still arrives is not looked at."""
        self.closed = False
        self.since = time.time()
        self._context = context
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        self._assembler = Assembler()
        self._assembler.epoch = epoch
        self._tickets = 0
        self._outbox: asyncio.Queue[tuple[int, Iterator[bytes], Callable[[], object] | None]] = (
            asyncio.Queue()
        )
        self._writing: int | None = None
        """The ticket of the frame that is being sent; 0 if it is not a question."""
        self._heard = time.monotonic()
        self._beats: deque[float] = deque(maxlen=UNASKED_LIMIT)
        """When the heartbeats were sent that have no answer yet."""
        self._signs_allowed = self._beats_sent = 0
        self._closing: asyncio.Future[tuple[grpc.StatusCode, str]] = self._loop.create_future()

    def ask(
        self,
        parts: Parts,
        limit: int,
        sent: Callable[[], object] | None = None,
        *,
        copy: bool = True,
        deadline: float = math.inf,
        steps: int = 1,
    ) -> int:
        """Send a frame and await its answer of at most ``limit`` bytes; return the ticket.

        ``parts`` are copied now, unless they are known never to change (one frame for many clients).
        ``sent`` is called, on the loop, once all of the frame is on its way. The answer may take
        ``steps`` times ``deadline``: see `Patience`.
        """
        self._tickets += 1
        length, now = sum(len(part) for part in parts), time.monotonic()
        # An abandoned answer may still arrive before this one.
        size = length + limit + self._assembler.late
        self.patience = Patience(deadline, steps, size, now, now)
        frame = cut(parts, self.epoch, self._tickets)
        frame = iter(list(frame)) if copy else frame
        signs = steps + 1 + length // chunks.CHUNK
        self._loop.call_soon_threadsafe(self._ask, self._tickets, limit, frame, sent, signs)
        return self._tickets

    def _ask(
        self,
        ticket: int,
        limit: int,
        frame: Iterator[bytes],
        sent: Callable[[], object] | None,
        signs: int,
    ) -> None:
        self._signs_allowed += signs
        self._assembler.expect(ticket, limit)
        self._outbox.put_nowait((ticket, frame, sent))

    def notify(self, parts: Parts) -> None:
        """Send a frame that needs no answer, before whatever is asked next."""
        frame = iter(list(cut(parts, self.epoch, 0)))
        self._loop.call_soon_threadsafe(self._outbox.put_nowait, (0, frame, None))

    @property
    def heard_at(self) -> float:
        """Return when the client last sent anything, in seconds after the epoch."""
        return time.time() - (time.monotonic() - self._heard)

    def abandon(self, reason: str) -> None:
        """Stop waiting. Disconnect a client that has not even received the question, for ``reason``."""
        self._loop.call_soon_threadsafe(self._abandon, reason)

    def _abandon(self, reason: str) -> None:
        self._assembler.abandon()
        if self._writing:
            self._close(grpc.StatusCode.UNAVAILABLE, reason)

    def close(self, code: grpc.StatusCode, reason: str) -> None:
        """End the stream with ``reason`` as soon as the loop gets to it."""
        self._loop.call_soon_threadsafe(self._close, code, reason)

    def _close(self, code: grpc.StatusCode, reason: str) -> None:
        if not self._closing.done():
            self._closing.set_result((code, reason))

    async def run(self) -> tuple[grpc.StatusCode, str] | None:
        """Serve the stream until it ends; return the status to end it with, or None if the client ended it."""
        tasks = [asyncio.create_task(task) for task in (self._read(), self._write(), self._beat())]
        try:
            awaited: list[asyncio.Future[Any]] = [*tasks, self._closing]
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            if self._closing.done():
                return self._closing.result()
            for task in tasks:
                if task.done() and (error := task.exception()) is not None:
                    raise error
            return None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self) -> None:
        while (chunk := await self._context.read()) is not grpc.aio.EOF:
            self.connection.received += len(chunk)
            self._heard = time.monotonic()
            beats = self._assembler.beats
            moved, complete = self._assembler.feed(chunk)
            if moved:
                self.patience.progress = self._heard
            if complete is not None:
                self._deliver(self, *complete)
            if self._assembler.beats > beats and self._beats:
                self.delay = self._heard - self._beats.popleft()
            self._check_unasked()

    def _check_unasked(self) -> None:
        assembler = self._assembler
        unasked = assembler.passed_over + max(0, assembler.beats - self._beats_sent)
        if unasked > UNASKED_LIMIT:
            raise Violation(f"more than {UNASKED_LIMIT} frames nobody asked for")
        if assembler.signs > self._signs_allowed + UNASKED_LIMIT:
            raise Violation(f"{assembler.signs} signs of work, for {self._signs_allowed} steps")

    async def _beat(self) -> None:
        """Send heartbeats; close the stream after a silence.

        A heartbeat does not wait for the answer to the one before: that may queue behind an upload of
        minutes, during which the client must keep receiving heartbeats.
        """
        while (silence := time.monotonic() - self._heard) < chunks.SILENCE_SECONDS:
            await asyncio.sleep(min(chunks.BEAT_SECONDS, chunks.SILENCE_SECONDS - silence))
            if self._writing is None:
                self._beats_sent += 1
                self._beats.append(time.monotonic())
                self._outbox.put_nowait((0, cut([], self.epoch, 0), None))
        self._close(
            grpc.StatusCode.UNAVAILABLE, f"nothing arrived for {chunks.SILENCE_SECONDS:g} s"
        )

    async def _write(self) -> None:
        while True:
            self._writing = None
            ticket, frame, sent = await self._outbox.get()
            self._writing = ticket
            for chunk in frame:
                await self._context.write(chunk)
                self.connection.sent += len(chunk)
                if ticket == self._tickets:
                    self.patience.progress = time.monotonic()
            if sent is not None:
                sent()
