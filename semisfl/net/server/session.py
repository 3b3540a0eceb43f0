"""The server's end of one device's stream: it sends questions and receives the answers."""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

import grpc
import grpc.aio

from semisfl.net import chunks
from semisfl.net.chunks import Assembler, cut
from semisfl.net.server.admission import policy_of
from semisfl.net.server.trust import ClientCertificate

Ending = tuple[grpc.StatusCode, str]
"""A status of gRPC and the reason for it."""


class Session:
    """One device's stream. It lives on the loop; any thread may call `ask`, `tell` and `close`.

    It stores one frame at most: the answer to the latest question.
    """

    def __init__(
        self,
        context: grpc.aio.ServicerContext,
        identity: str,
        hello: Mapping[str, Any],
        certificate: ClientCertificate | None,
        deliver: Callable[["Session", int, bytearray], None],
    ) -> None:
        """Take the fields of the device's ``hello``, and ``deliver``, which is called on the loop with each frame.

        ``certificate`` is None in plaintext.
        """
        self.peer = unquote(context.peer())
        self.identity, self.certificate = identity, certificate
        self.policy = policy_of(hello)
        self.attempt = (hello["instance"], hello["attempt"])
        """The device's process, and the number of its connection."""
        self.client = -1
        """The index in the roster, once the device is enrolled."""
        self.since = self.seen = time.time()
        """When the stream was opened, and when the device last sent anything, in seconds after the epoch."""
        self.progress = time.monotonic()
        """When the device last did something about a question: took a chunk of it, sent a chunk, or reported work."""
        self.forgotten = False
        """Whether the device was taken out of the run: what still arrives is not looked at."""
        self.missing = self.asked = 0
        """With a frozen bottom: how many images' rows are to come, and how many of them the next answer holds."""
        self.downloads = False
        """Whether the device was sent a frozen bottom, and no answer has shown yet that it arrived."""
        self._context, self._deliver = context, deliver
        self._loop = asyncio.get_running_loop()
        self._assembler = Assembler()
        self._tickets = 0
        self._outbox: asyncio.Queue[tuple[int, bytes]] = asyncio.Queue()
        self._writing = False
        self._ending: asyncio.Future[Ending] = self._loop.create_future()

    def ask(self, frame: bytes, limit: int) -> int:
        """Send a question and await its answer of at most ``limit`` bytes; return the ticket."""
        self._tickets += 1
        self.progress = time.monotonic()
        self._loop.call_soon_threadsafe(self._ask, self._tickets, frame, limit)
        return self._tickets

    def _ask(self, ticket: int, frame: bytes, limit: int) -> None:
        self._assembler.expect(ticket, limit)
        self._outbox.put_nowait((ticket, frame))

    def tell(self, frame: bytes) -> None:
        """Send a frame that needs no answer, before whatever is asked next."""
        self._loop.call_soon_threadsafe(self._outbox.put_nowait, (0, frame))

    def close(self, code: grpc.StatusCode, reason: str) -> None:
        """End the stream with ``reason`` as soon as the loop gets to it."""
        self._loop.call_soon_threadsafe(self._close, code, reason)

    def _close(self, code: grpc.StatusCode, reason: str) -> None:
        if not self._ending.done():
            self._ending.set_result((code, reason))

    async def run(self) -> Ending | None:
        """Serve the stream until it ends; return how to end it, or None if the device ended it.

        Raise `WireError` if the device breaks the protocol.
        """
        tasks = [asyncio.create_task(task) for task in (self._read(), self._write(), self._beat())]
        try:
            waiting: list[asyncio.Future[Any]] = [*tasks, self._ending]
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if self._ending in done:
                return self._ending.result()
            for task in done:
                task.result()  # raises what ended it
            return None
        except TimeoutError:
            return grpc.StatusCode.UNAVAILABLE, f"nothing arrived for {chunks.SILENCE_SECONDS:g} s"
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self) -> None:
        async with asyncio.timeout(chunks.SILENCE_SECONDS) as silence:
            while (chunk := await self._context.read()) is not grpc.aio.EOF:
                silence.reschedule(self._loop.time() + chunks.SILENCE_SECONDS)
                self.seen = time.time()
                frame = self._assembler.feed(chunk)
                if frame is None or frame[0]:  # no heartbeat
                    self.progress = time.monotonic()
                if frame is not None and frame[1]:
                    self._deliver(self, *frame)

    async def _write(self) -> None:
        while True:
            ticket, frame = await self._outbox.get()
            self._writing = True
            for chunk in cut(frame, ticket):
                await self._context.write(chunk)
                if frame:
                    self.progress = time.monotonic()
            self._writing = False

    async def _beat(self) -> None:
        """Send heartbeats, which the device answers; bytes that are being sent need none beside them."""
        while True:
            await asyncio.sleep(chunks.BEAT_SECONDS)
            if not self._writing:
                self._outbox.put_nowait((0, b""))
