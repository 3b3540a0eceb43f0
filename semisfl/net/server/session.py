"""The server's end of one client's stream."""

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import grpc.aio

from semisfl.net import chunks
from semisfl.net.chunks import Assembler, Parts, Violation, cut
from semisfl.net.server.trust import Shown

PASSED_OVER_LIMIT = 64
"""Frames nobody asked for that a client may send before it is taken for an offender."""


class Session:
    """Asks and answers on one stream. Lives on the loop; `ask` may be called from any thread.

    At most one frame is ever held: the answer to the latest ticket. ``progress`` is the monotonic
    time at which bytes last moved for it, in either direction, so a slow link never looks dead.
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
        self.shown: Shown | None = None
        """The client's certificate; None in plaintext."""
        self.came = ("", 0)
        """Which process of the client this is, and which of its connections."""
        self.client = -1
        """The index in the roster, once the client is ready."""
        self.progress = time.monotonic()
        self.delay: float | None = None
        """Seconds the last heartbeat took there and back."""
        self.closed = False
        self.sent = 0
        self.received = 0
        self._context = context
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        self._assembler = Assembler()
        self._assembler.epoch = epoch
        self._tickets = 0
        self._outbox: asyncio.Queue[tuple[Iterator[bytes], Callable[[], object] | None]] = (
            asyncio.Queue()
        )
        self._writing = False
        self._heard = time.monotonic()
        self._beats = 0
        self._beat_at: float | None = None
        self._closing: asyncio.Future[tuple[grpc.StatusCode, str]] = self._loop.create_future()

    def ask(
        self,
        parts: Parts,
        limit: int,
        sent: Callable[[], object] | None = None,
        *,
        copy: bool = True,
    ) -> int:
        """Send a frame and await its answer of at most ``limit`` bytes; returns the ticket.

        ``parts`` are copied now, unless they are known never to change (one frame for many clients).
        ``sent`` is called, on the loop, once all of the frame is on its way.
        """
        self._tickets += 1
        self.progress = time.monotonic()
        chunks = cut(parts, self.epoch, self._tickets)
        frame = iter(list(chunks)) if copy else chunks
        self._loop.call_soon_threadsafe(self._ask, self._tickets, limit, frame, sent)
        return self._tickets

    def _ask(
        self, ticket: int, limit: int, frame: Iterator[bytes], sent: Callable[[], object] | None
    ) -> None:
        self._assembler.expect(ticket, limit)
        self._outbox.put_nowait((frame, sent))

    def tell(self, parts: Parts) -> None:
        """Send a frame that needs no answer, before whatever is asked next."""
        frame = iter(list(cut(parts, self.epoch, 0)))
        self._loop.call_soon_threadsafe(self._outbox.put_nowait, (frame, None))

    def abandon(self) -> None:
        """Await nothing any more. A client that does not even take what is sent is disconnected."""
        self._loop.call_soon_threadsafe(self._abandon)

    def _abandon(self) -> None:
        self._assembler.abandon()
        if self._writing:
            self._close(grpc.StatusCode.UNAVAILABLE, "too slow: no progress until the deadline")

    def close(self, code: grpc.StatusCode, reason: str) -> None:
        """End the stream with ``reason`` as soon as the loop gets to it."""
        self._loop.call_soon_threadsafe(self._close, code, reason)

    def _close(self, code: grpc.StatusCode, reason: str) -> None:
        if not self._closing.done():
            self._closing.set_result((code, reason))

    async def run(self) -> tuple[grpc.StatusCode, str] | None:
        """Serve the stream until it ends; how it is to be ended, or None if the client did."""
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
            self.received += len(chunk)
            self._heard = time.monotonic()
            moved, complete = self._assembler.feed(chunk)
            if moved:
                self.progress = time.monotonic()
            if complete is not None:
                self._deliver(self, *complete)
            if self._assembler.beats and self._beat_at is not None:
                self.delay, self._beat_at = self._heard - self._beat_at, None
            unasked = self._assembler.passed_over + max(0, self._assembler.beats - self._beats)
            if unasked > PASSED_OVER_LIMIT:
                raise Violation(f"more than {PASSED_OVER_LIMIT} frames nobody asked for")

    async def _beat(self) -> None:
        """Keep both sides sure of each other, and find out when they no longer can be."""
        while (silence := time.monotonic() - self._heard) < chunks.SILENCE_SECONDS:
            await asyncio.sleep(min(chunks.BEAT_SECONDS, chunks.SILENCE_SECONDS - silence))
            if self._beat_at is None and not self._writing:
                self._beats += 1
                self._beat_at = time.monotonic()
                self._outbox.put_nowait((cut([], self.epoch, 0), None))
        self._close(
            grpc.StatusCode.UNAVAILABLE, f"nothing was heard for {chunks.SILENCE_SECONDS:g} s"
        )

    async def _write(self) -> None:
        while True:
            frame, sent = await self._outbox.get()
            self._writing = True
            for chunk in frame:
                await self._context.write(chunk)
                self.sent += len(chunk)
                self.progress = time.monotonic()
            if sent is not None:
                sent()
            self._writing = not self._outbox.empty()
