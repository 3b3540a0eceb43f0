"""Send frames over gRPC streams: a frame is cut into chunks, and reassembled by the receiver.

    magic "SSF2" | ticket u32 | bytes that follow u64      little-endian, before the first chunk of a frame

The server numbers its questions on a stream; the number is the *ticket*, and the answer carries it too. So the server
recognises an answer that comes too late. A frame of no bytes is a sign of life: with ticket 0 a heartbeat, with another
ticket the report that the device still receives, or works on, that question.
"""

import asyncio
import struct
import threading
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

from semisfl.net.frames import WireError

SERVICE = "semisfl.Fleet"
METHOD = f"/{SERVICE}/Session"
TERMS = f"/{SERVICE}/Terms"
"""Answers with the run's terms, for `semisfl inspect`."""
CHUNK = 512 * 1024
"""Bytes of one message. Half as large costs a tenth more CPU per iteration, twice as large saves less than can be
measured and makes progress on a slow link harder to see."""
PREFIX = struct.Struct("<4sIQ")
MAGIC = b"SSF2"
LARGEST_FRAME = 1 << 32
"""Most bytes of any frame: the weights of the largest model, twice."""
LARGEST_MESSAGE = 16 * CHUNK
"""Largest message that gRPC delivers."""
WINDOW = 8 * CHUNK
"""Bytes of a stream that may wait in gRPC's memory before they are read. A link whose round trip takes
0.1 s carries 40 MB/s with it."""
BEAT_SECONDS = 10.0
"""Time between two heartbeats of the server. A device answers each."""
SILENCE_SECONDS = 25.0
"""Each side treats the other as gone after this long without any chunk."""
LOWEST_RATE = 50_000.0
"""Bytes per second (0.4 Mbit/s) that a link must carry in each direction. At this rate a chunk takes
10.5 s, well within SILENCE_SECONDS."""

T = TypeVar("T")


def options(largest: int = LARGEST_MESSAGE, **others: int) -> list[tuple[str, int]]:
    """Return gRPC's channel arguments for both sides, with messages of at most ``largest`` bytes.

    ``others`` are added, or replace ours; their names come without "grpc.".

    gRPC's own keepalive is off and its ping timeout long. A ping waits behind whatever a slow link
    still has to carry, so a timeout of seconds takes the link for dead (seen at 60 kB/s with 1.4 MB
    queued). With our own heartbeats every chunk that arrives is a sign of life.
    """
    ours = {
        "keepalive_time_ms": 2**31 - 1,
        "http2.ping_timeout_ms": 600_000,
        "http2.lookahead_bytes": WINDOW,
        "max_receive_message_length": largest,
        # A device reaches its server directly: proxies of the environment are for the web.
        "enable_http_proxy": 0,
        # Every client has its own connection and back-off, also where many share a process.
        "use_local_subchannel_pool": 1,
    }
    return [(f"grpc.{name}", value) for name, value in (ours | others).items()]


def cut(frame: bytes, ticket: int) -> Iterator[bytes]:
    """Yield the chunks of a frame for ``ticket``; all but the last are CHUNK bytes long."""
    view, first = memoryview(frame), CHUNK - PREFIX.size
    yield PREFIX.pack(MAGIC, ticket, len(view)) + view[:first]
    for start in range(first, len(view), CHUNK):
        yield bytes(view[start : start + CHUNK])


class Assembler:
    """Reassemble the frames of one stream.

    A device keeps every frame. The server keeps only the answer to its open question, and skips every other frame
    without storing it.
    """

    def __init__(self, limit: int = LARGEST_FRAME) -> None:
        """Keep every frame, of at most ``limit`` bytes."""
        self.ticket = 0
        """The ticket of the frame that arrives."""
        self._awaited: int | None = None
        self._limit = limit
        self._frame: bytearray | None = None
        self._left = 0

    def expect(self, ticket: int, limit: int) -> None:
        """From now on, keep only the frame of ``ticket``, which may have ``limit`` bytes."""
        self._awaited, self._limit = ticket, limit

    def feed(self, chunk: bytes) -> tuple[int, bytearray] | None:
        """Return a frame's ticket and bytes if this chunk completes it, or a sign of life's ticket and no bytes.

        None: the frame goes on, or is skipped. Raise `WireError` if the chunk is malformed or its frame too long.
        """
        data = memoryview(chunk)
        if not self._left:
            if len(data) < PREFIX.size:
                raise WireError(
                    f"a frame begins with {len(data)} bytes; a prefix has {PREFIX.size}"
                )
            magic, self.ticket, self._left = PREFIX.unpack_from(data)
            kept = self._awaited is None or self.ticket == self._awaited
            most = self._limit if kept else LARGEST_FRAME
            if magic != MAGIC or self._left > most:
                raise WireError(
                    f"a frame begins with {magic!r} and has {self._left} bytes; at most {most} are due"
                )
            self._frame = bytearray() if kept or not self._left else None
            data = data[PREFIX.size :]
        if len(data) > self._left:
            raise WireError(f"a chunk has {len(data)} bytes where {self._left} are due")
        self._left -= len(data)
        if self._frame is None:
            return None
        self._frame += data
        return None if self._left else (self.ticket, self._frame)


class LoopThread:
    """An asyncio loop in its own thread, so that networking never waits for training."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def call(self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run ``coroutine`` on the loop and return its result; raise `TimeoutError` after ``timeout`` seconds."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout)

    def stop(self) -> None:
        """End the loop and its thread."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(5)
