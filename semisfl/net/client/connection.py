"""Connect a client to its server, and connect again whenever the connection breaks."""

import asyncio
import logging
import queue
import random
import secrets
import threading
import time
from collections.abc import Collection

import grpc
import grpc.aio

from semisfl.fleet.outgoing import Outgoing
from semisfl.net import chunks, messages
from semisfl.net.chunks import PREFIX, LoopThread, Parts, Violation, cut
from semisfl.net.client.identity import Identity, Target
from semisfl.net.client.lines import brief_logger
from semisfl.net.client.owner import Owner
from semisfl.net.client.rejection import FINAL, Rejected
from semisfl.net.client.stream import Received, Stream
from semisfl.net.frames import encode
from semisfl.net.links import Fetched
from semisfl.net.tls.x509_parts import CertError
from semisfl.settings import lookup
from semisfl.settings.addresses import split_address

log = brief_logger(__name__)

FIRST_DELAY = 0.25
LONGEST_DELAY = 6.0
DOUBLINGS = 10
"""Doublings of the first delay at most: after a thousand it is no longer a float."""
PROGRESS_SECONDS = 0.5
INBOX = 2
"""Frames that may wait to be looked at. The next ones wait at the server: nothing more is read."""
ROOM_SECONDS = 0.01
GOODBYE_SECONDS = 1.0
MOST_VIOLATIONS = 3
"""A device ends when its server has broken the protocol this often."""


class Connection:
    """Keep a stream to ``target`` open and hand out frames with the stream they came on."""

    def __init__(
        self,
        target: Target,
        owner: Owner | None = None,
        *,
        allow_methods: Collection[str] = (),
        thread: LoopThread | None = None,
    ) -> None:
        self.owner = owner or Owner()
        self.methods = frozenset(lookup.METHODS.names()) | frozenset(allow_methods)
        """Methods that a server may ask for: installed under a name, or allowed by the operator."""
        self.outgoing = Outgoing(self.owner.policy, encode, unpredictable=True)
        """Makes every frame that this client sends."""
        self.run = ""
        """The run this client belongs to, once it was welcomed to one."""
        self.over = threading.Event()
        """Set once the server has reported that the run is finished."""
        self.losses = 0
        self.sent = self.received = 0
        """Bytes of all streams so far, framing included."""
        self._address = target.address
        self._name = target.name
        self._instance = secrets.token_hex(8)
        self._attempts = 0
        self._failures = 0
        """Attempts since the server last gave this client its place."""
        self._violations = 0
        self._options = chunks.options()
        # Before Python 3.13 a signal at the wrong moment makes the wait of a SimpleQueue endless.
        self._inbox: queue.Queue[Received | Exception | None] = queue.Queue()
        self._jitter = random.SystemRandom()
        self._thread = thread or LoopThread("semisfl-client")
        self._owns_thread = thread is None
        self._current: Stream | None = None
        self._identity = Identity(target.address, target.credentials)
        self._task = asyncio.run_coroutine_threadsafe(self._stay_connected(), self._thread.loop)

    @property
    def connected(self) -> bool:
        """Return whether a server has welcomed this client and the stream is open."""
        return self._current is not None

    def receive(self, seconds: float) -> Received | None:
        """Return the next frame, or None after ``seconds``; raise `Rejected` once there will be none."""
        try:
            item = self._inbox.get(timeout=seconds)
        except queue.Empty:
            return None
        if isinstance(item, Exception):
            raise item
        return item

    def close(self, seconds: float = 5.0) -> None:
        """Say goodbye: send what is queued, close, and stop trying."""
        self._thread.call(self._goodbye(seconds))
        if self._owns_thread:
            self._thread.stop()

    def kill(self) -> None:
        """Drop the connection without a goodbye, as a crash would; for tests."""
        self._thread.call(self._drop())
        if self._owns_thread:
            self._thread.stop()

    async def _goodbye(self, seconds: float) -> None:
        stream = self._current
        if stream is not None:
            stream.outbox.put_nowait(None)
            try:
                await asyncio.wait_for(stream.drained.wait(), seconds)
            except TimeoutError:
                log.warning("could not send the last answer within %g s", seconds)
            # Wait for the server to end the stream: else it takes the goodbye for a lost connection.
            await asyncio.wait([asyncio.wrap_future(self._task)], timeout=GOODBYE_SECONDS)
        await self._drop()

    async def _drop(self) -> None:
        task = asyncio.wrap_future(self._task)
        self._task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def _stay_connected(self) -> None:
        try:
            await self._until_over()
        except (Rejected, CertError) as error:
            self._inbox.put(error if isinstance(error, Rejected) else Rejected(str(error)))
        else:
            self.over.set()
            self._inbox.put(None)

    async def _until_over(self) -> None:
        while True:
            self._identity.renew()
            self._identity.check()
            welcomed, code, reason = await self._attempt()
            if code is grpc.StatusCode.OK:
                return
            if self._violations >= MOST_VIOLATIONS:
                raise Rejected(f"{self._address}, {self._violations} times: {reason}", "refused")
            if code in FINAL and not self._identity.renew():
                raise Rejected.by_server(self._address, code, reason)
            if not welcomed:
                reason = await self._identity.look_into(reason)
            self.losses += welcomed
            self._failures += 1
            await self._pause(reason)

    def _delay(self) -> float:
        """Return the seconds until the next attempt."""
        # Half of the delay is random: a server's clients must not all return at the same moment.
        longest = min(LONGEST_DELAY, FIRST_DELAY * 2 ** min(self._failures, DOUBLINGS))
        return longest * self._jitter.uniform(0.5, 1)

    async def _pause(self, reason: str) -> None:
        delay = self._delay()
        level = logging.WARNING if self._failures == 1 else logging.INFO
        log.log(
            level, "no connection to %s (%s); next attempt in %.1f s", self._address, reason, delay
        )
        await asyncio.sleep(delay)

    async def _attempt(self) -> tuple[bool, grpc.StatusCode, str]:
        """Connect once. Any error counts as a lost connection, unless this task is cancelled."""
        try:
            return await self._connect()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return False, grpc.StatusCode.UNAVAILABLE, "the call was cancelled"
        except Exception as error:
            log.warning("unexpected error in the connection to %s: %r", self._address, error)
            return False, grpc.StatusCode.UNAVAILABLE, f"{type(error).__name__}: {error}"

    async def _connect(self) -> tuple[bool, grpc.StatusCode, str]:
        """Connect and serve until the end; return whether it was welcomed and how it ended."""
        stream = Stream(asyncio.get_running_loop())
        fetched = Fetched(split_address(self._address)[1])
        channel = self._identity.channel(self._options)
        try:
            call = channel.stream_stream(chunks.METHOD)()
            writer = asyncio.create_task(self._write(stream, call))
            try:
                await self._read_watched(stream, call, fetched)
            except Violation as error:
                self._violations += 1
                return True, grpc.StatusCode.UNAVAILABLE, f"the server broke the protocol: {error}"
            except TimeoutError:
                return (
                    self._welcomed(stream),
                    grpc.StatusCode.UNAVAILABLE,
                    f"nothing arrived for {chunks.SILENCE_SECONDS:g} s",
                )
            except grpc.aio.AioRpcError:
                pass
            finally:
                self._current = None
                if stream.enrolled:
                    self._failures = 0
                stream.drained.set()
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)
            return (
                self._welcomed(stream),
                await call.code(),
                await call.details() or "connection lost",
            )
        finally:
            await channel.close()

    @staticmethod
    def _welcomed(stream: Stream) -> bool:
        return stream.assembler.epoch > 0

    async def _read_watched(
        self, stream: Stream, call: grpc.aio.StreamStreamCall, fetched: Fetched
    ) -> None:
        """Read until the end; raise `Violation` if the server sends masses of what are no messages."""
        reading = asyncio.create_task(self._read(stream, call))
        received, sent = self.received, self.sent
        try:
            while not (await asyncio.wait([reading], timeout=fetched.pause))[0]:
                ours = self.received - received, self.sent - sent
                if (flood := fetched.end_flood(*ours)) is not None:
                    raise Violation(flood)
            await reading
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _read(self, stream: Stream, call: grpc.aio.StreamStreamCall) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(chunks.SILENCE_SECONDS) as silence:
            while (chunk := await call.read()) is not grpc.aio.EOF:
                self.received += len(chunk)
                silence.reschedule(loop.time() + chunks.SILENCE_SECONDS)
                beats = stream.assembler.beats
                complete = stream.feed(chunk)
                if complete is None:
                    self._show_life(stream, answer=stream.assembler.beats > beats)
                    continue
                if not stream.assembler.epoch:
                    stream.assembler.epoch = PREFIX.unpack_from(chunk)[1]
                    self._current = stream
                self._inbox.put(Received(stream, *complete))
                while self._inbox.qsize() >= INBOX:
                    await asyncio.sleep(ROOM_SECONDS)
                    silence.reschedule(loop.time() + chunks.SILENCE_SECONDS)

    def _show_life(self, stream: Stream, answer: bool) -> None:
        """Answer a heartbeat, or report from time to time that a long frame is still arriving.

        Sent bytes may wait in many buffers: only the receiver knows that they still arrive.
        """
        now = time.monotonic()
        if stream.crowded:
            return
        if answer:
            stream.outbox.put_nowait((0, []))
        elif stream.assembler.ticket and now - stream.beaten >= PROGRESS_SECONDS:
            stream.beaten = now
            stream.outbox.put_nowait((stream.assembler.ticket, []))

    async def _write(self, stream: Stream, call: grpc.aio.StreamStreamCall) -> None:
        self._attempts += 1
        fields = messages.hello(
            self.methods,
            self.run,
            self._name,
            self._instance,
            self._attempts,
            self.outgoing.own,
        )
        await self._send(call, 0, 0, [b"".join(self.outgoing.frame("hello", fields))])
        while (item := await stream.outbox.get()) is not None:
            ticket, parts = item
            if parts:
                stream.useless.answered()
            await self._send(call, stream.assembler.epoch, ticket, parts)
        await call.done_writing()
        stream.drained.set()

    async def _send(
        self, call: grpc.aio.StreamStreamCall, epoch: int, ticket: int, parts: Parts
    ) -> None:
        for chunk in cut(parts, epoch, ticket):
            await call.write(chunk)
            self.sent += len(chunk)
