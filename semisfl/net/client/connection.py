"""A device's connection to its server: it is opened again whenever it breaks, until the run is finished.

One `Connection` lasts as long as the device. It opens one `Stream` after another, and each stream hands out the
frames that arrive on it as `Received`. An answer goes back through the stream of its question: if that stream has
ended, nobody waits for the answer any more. The network runs on an event loop in a thread of its own, so that
training never delays it; `Connection.receive` and `Stream.answer` are the two ways between the threads.
"""

import asyncio
import logging
import queue
import random
import secrets
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from semisfl.fleet.outgoing import Outgoing
from semisfl.net import chunks, hostport, messages
from semisfl.net.chunks import Assembler, LoopThread, cut
from semisfl.net.client.owner import Owner
from semisfl.net.client.rejection import FINAL, TLS_CAUSES, Rejected, plain
from semisfl.net.frames import encode
from semisfl.net.tls import credentials
from semisfl.net.tls.credentials import Credentials
from semisfl.net.tls.x509_parts import CertError
from semisfl.settings import catalog

log = logging.getLogger(__name__)

FIRST_DELAY = 0.25
"""Seconds before the second attempt; each later delay is twice as long."""
LONGEST_DELAY = 6.0
"""Seconds of a delay at most."""
DOUBLINGS = 10
"""Doublings of the first delay at most: after a thousand it is no longer a float."""
PROGRESS_SECONDS = 0.5
"""Between two reports that a long frame is still arriving."""
GOODBYE_SECONDS = 1.0
"""For the server to end the stream after a goodbye."""


@dataclass(frozen=True)
class Target:
    """The server to connect to, and what a device shows it. Refuses plaintext beyond this machine."""

    address: str
    certificate: Credentials | None
    insecure_loopback: bool = False
    """Connect in plaintext, whatever the certificate."""
    name: str = ""
    """The device's name in plaintext; a certificate has its own."""

    def __post_init__(self) -> None:
        hostport.check_target(self.address, self.certificate is not None, self.insecure_loopback)

    @property
    def credentials(self) -> Credentials | None:
        """Return the certificate to show; None: plaintext."""
        return None if self.insecure_loopback else self.certificate


def open_channel(
    address: str,
    certificate: Credentials | None,
    options: Sequence[tuple[str, int]],
    kind: Any = grpc,
) -> Any:
    """Return a gRPC channel to ``address`` (HOST:PORT) with mutual TLS.

    Args:
        certificate: what this side shows, and the authority that it trusts; None: a channel in plaintext.
        options: channel arguments, see `semisfl.net.chunks.options`.
        kind: `grpc` for blocking calls, or `grpc.aio`.
    """
    if certificate is None:
        return kind.insecure_channel(address, options=options)
    files = certificate.authority, certificate.key, certificate.certificate
    return kind.secure_channel(address, grpc.ssl_channel_credentials(*files), options=options)


class Stream:
    """One stream to the server: the frame that arrives and the answers that wait to be sent.

    Any thread may call `answer` and `beat`, also after the stream has ended.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Make a stream whose answers are sent on ``loop``."""
        self.welcomed = False
        """Whether the server has sent its first frame."""
        self.outbox: asyncio.Queue[tuple[int, bytes] | None] = asyncio.Queue()
        """Tickets with the frames that answer them; no bytes: a sign of life. None ends the stream."""
        self.drained = asyncio.Event()
        """Set once everything was sent, or nothing more can be."""
        self.enrolled = False
        """Whether the server gave this client its place; set by the thread that trains."""
        self._loop, self._beaten, self._assembler = loop, time.monotonic(), Assembler()

    def answer(self, ticket: int, frame: bytes) -> None:
        """Send ``frame`` as the answer to the question ``ticket``."""
        self._loop.call_soon_threadsafe(self.outbox.put_nowait, (ticket, frame))

    def beat(self, ticket: int) -> None:
        """Tell the server that ``ticket`` is still being worked on, unless answers wait, which say so too."""
        if self.outbox.empty():
            self.answer(ticket, b"")

    def feed(self, chunk: bytes) -> "Received | None":
        """Return a frame once it is complete. Answer a heartbeat; report now and then that a long frame arrives.

        Sent bytes may wait in many buffers: only the receiver knows that they still arrive.
        """
        complete = self._assembler.feed(chunk)
        if complete is not None and complete[1]:
            self.welcomed = True
            return Received(self, *complete)
        now, ticket = time.monotonic(), self._assembler.ticket
        if complete is not None:
            self.beat(0)
        elif ticket and now - self._beaten >= PROGRESS_SECONDS:
            self._beaten = now
            self.beat(ticket)
        return None


@dataclass(frozen=True)
class Received:
    """A frame's bytes, with the stream and the ticket that it came with."""

    stream: Stream
    ticket: int
    data: bytearray


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
        """Connect in the background.

        Args:
            target: the server, and the certificate or name to show.
            owner: the limits of the device's owner.
            allow_methods: methods of other packages (``package.module:Class``) that a server may ask for,
                besides those that are installed under a name.
            thread: the event loop to use; None: one of its own.
        """
        self.owner = owner or Owner()
        """The limits of the device's owner."""
        self.methods = frozenset(catalog.METHODS) | frozenset(allow_methods)
        """Methods that the server may ask for."""
        self.outgoing = Outgoing(self.owner.policy, encode, unpredictable=True)
        """Makes every frame that this device sends."""
        self.run = ""
        """The run this device belongs to, once it was welcomed to one."""
        self.over = threading.Event()
        """Set once the server has reported that the run is finished."""
        self.losses = 0
        """Streams that broke after a welcome."""
        self.sent = self.received = 0
        """Bytes of all streams so far, framing included."""
        self._address, self._name = target.address, target.name
        self.name = f"plaintext:{target.name}"
        """The name by which the server knows this device."""
        if target.credentials is not None:
            self.name = credentials.identity(target.credentials.certificate)
        self._certificate = target.credentials
        self._instance, self._attempts = secrets.token_hex(8), 0
        self._failures = 0
        """Attempts since the server last gave this device its place."""
        # Before Python 3.13 a signal at the wrong moment makes the wait of a SimpleQueue endless.
        self._inbox: queue.Queue[Received | Exception | None] = queue.Queue()
        self._thread = thread or LoopThread("semisfl-client")
        self._owns_thread = thread is None
        self._current: Stream | None = None
        self._task = asyncio.run_coroutine_threadsafe(self._stay_connected(), self._thread.loop)

    @property
    def connected(self) -> bool:
        """Return whether a server has welcomed this device and the stream is open."""
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
        """Say goodbye: send what is queued, for at most ``seconds``, close, and stop trying."""
        self._thread.call(self._goodbye(seconds))
        self.kill()

    def kill(self) -> None:
        """Drop the connection without a goodbye, as a crash would."""
        self._thread.call(self._drop())
        if self._owns_thread:
            self._thread.stop()

    async def _goodbye(self, seconds: float) -> None:
        """Send what is queued and end the stream, so that the server knows that the device leaves."""
        if (stream := self._current) is None:
            return
        stream.outbox.put_nowait(None)
        try:
            await asyncio.wait_for(stream.drained.wait(), seconds)
        except TimeoutError:
            log.warning("could not send the last answer within %g s", seconds)
        # Wait for the server to end the stream: else it takes the goodbye for a lost connection.
        await asyncio.wait([asyncio.wrap_future(self._task)], timeout=GOODBYE_SECONDS)

    async def _drop(self) -> None:
        task = asyncio.wrap_future(self._task)
        self._task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    # --- attempts --------------------------------------------------------------------------------

    async def _stay_connected(self) -> None:
        """Run until the server ends the run or refuses this device; `receive` learns which."""
        try:
            await self._until_over()
        except (Rejected, CertError) as error:
            self._inbox.put(error if isinstance(error, Rejected) else Rejected(str(error)))
        else:
            self.over.set()
            self._inbox.put(None)

    async def _until_over(self) -> None:
        """Open streams until the run is finished; raise `Rejected` if no further attempt can help."""
        while True:
            self._renew_certificate()
            if self._certificate and (fault := credentials.expired(self._certificate)):
                raise Rejected(fault)
            stream = Stream(asyncio.get_running_loop())
            code, reason = await self._attempt(stream)
            if code is grpc.StatusCode.OK:
                return
            if code in FINAL and not self._renew_certificate():
                raise Rejected.by_server(self._address, code, reason)
            self.losses += stream.welcomed
            self._failures = 1 if stream.enrolled else self._failures + 1
            delay, reason = self._delay(), plain(reason)
            if self._certificate and not stream.welcomed:
                reason = f"{reason}; {TLS_CAUSES}"
            level = logging.WARNING if self._failures == 1 else logging.INFO
            text = "no connection to %s (%s); next attempt in %.1f s"
            log.log(level, text, self._address, reason, delay)
            await asyncio.sleep(delay)

    def _renew_certificate(self) -> bool:
        """Read the certificate's files again; return whether they were renewed."""
        if (before := self._certificate) is None:
            return False
        try:
            self._certificate = credentials.newest(before)
        except CertError as error:
            log.warning("%s; going on with the certificate read before", error)
        if self._certificate is before:
            return False
        log.info("new %s: used from now on", before.label)
        return True

    def _delay(self) -> float:
        """Return the seconds until the next attempt."""
        # Half of the delay is random: a server's devices must not all return at the same moment.
        longest = min(LONGEST_DELAY, FIRST_DELAY * 2 ** min(self._failures, DOUBLINGS))
        return longest * random.SystemRandom().uniform(0.5, 1)

    async def _attempt(self, stream: Stream) -> tuple[grpc.StatusCode, str]:
        """Connect and serve the stream to its end; return how it ended. Any error counts as a lost connection."""
        lost, options = grpc.StatusCode.UNAVAILABLE, chunks.options()
        try:
            async with open_channel(self._address, self._certificate, options, grpc.aio) as channel:
                call = channel.stream_stream(chunks.METHOD)()
                await self._exchange(stream, call)
                return await call.code(), await call.details() or "connection lost"
        except TimeoutError:
            return lost, f"nothing arrived for {chunks.SILENCE_SECONDS:g} s"
        except asyncio.CancelledError:
            # gRPC also raises this for a call that the server cancelled.
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            return lost, "the call was cancelled"
        except Exception as error:
            return lost, f"{type(error).__name__}: {error}"

    async def _exchange(self, stream: Stream, call: grpc.aio.StreamStreamCall) -> None:
        """Read frames and write answers until the call ends."""
        writer = asyncio.create_task(self._write(stream, call))
        try:
            await self._read(stream, call)
        except grpc.aio.AioRpcError:
            pass  # the call has its code
        finally:
            self._current = None
            stream.drained.set()
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)

    async def _read(self, stream: Stream, call: grpc.aio.StreamStreamCall) -> None:
        """Read to the end of the call; raise `TimeoutError` if nothing arrives for too long."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(chunks.SILENCE_SECONDS) as silence:
            while (chunk := await call.read()) is not grpc.aio.EOF:
                self.received += len(chunk)
                silence.reschedule(loop.time() + chunks.SILENCE_SECONDS)
                if (received := stream.feed(chunk)) is not None:
                    self._current = stream
                    self._inbox.put(received)

    async def _write(self, stream: Stream, call: grpc.aio.StreamStreamCall) -> None:
        """Send a hello, then every answer, until `_goodbye` ends the outbox."""
        self._attempts += 1
        fields = messages.hello(
            self.methods,
            self.run,
            self._name,
            self._instance,
            self._attempts,
            self.outgoing.own,
        )
        await self._send(call, 0, b"".join(self.outgoing.frame("hello", fields)))
        while (item := await stream.outbox.get()) is not None:
            await self._send(call, *item)
        await call.done_writing()
        stream.drained.set()

    async def _send(self, call: grpc.aio.StreamStreamCall, ticket: int, frame: bytes) -> None:
        for chunk in cut(frame, ticket):
            await call.write(chunk)
            self.sent += len(chunk)
