"""Send frames over gRPC streams: cut into chunks on one side, put together on the other.

A frame is an answer to a *ticket* (the server numbers what it asks on a stream) within an *epoch*
(the server numbers the streams an identity opens). Both stand before its bytes, so that what is
late, repeated or out of turn is passed over without being stored, whatever it contains.
"""

import asyncio
import struct
import threading
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, TypeVar

SERVICE = "semisfl.Fleet"
METHOD = f"/{SERVICE}/Session"
TERMS = f"/{SERVICE}/Terms"
"""Answers with the run's terms, for `semisfl inspect`."""
CHUNK = 512 * 1024
"""Bytes of one message. Half as large costs a tenth more CPU an iteration, twice as large saves less
than can be measured and makes progress on a slow link harder to see (reproduction/benchmarks/network.py)."""
PREFIX = struct.Struct("<4sIIQ")  # magic, epoch, ticket, bytes that follow
MAGIC = b"SSF1"
LARGEST_FRAME = 1 << 32
KEPT_BUFFER = 8 * 1024 * 1024
LARGEST_MESSAGE = 16 * CHUNK
"""Largest message that gRPC delivers. The receiver can refuse one over CHUNK bytes and log its sender;
on a larger one gRPC ends the stream and reports nothing to the receiver."""
WINDOW = 8 * CHUNK
"""Bytes of a stream that may wait in gRPC's memory before they are read. A link whose round trip takes
0.1 s carries 40 MB/s with it."""
BEAT_SECONDS = 10.0
"""Between two heartbeats of the server. A client answers as soon as its connection is free."""
SILENCE_SECONDS = 25.0
"""Each side treats the other as gone after this long without any chunk."""
LOWEST_RATE = 50_000.0
"""Bytes a second (0.4 Mbit/s) that a link must carry in each direction. At this rate a chunk takes
10.5 s, well within SILENCE_SECONDS, and every frame gets the time it needs."""

T = TypeVar("T")
Parts = Sequence[bytes | memoryview]


class Violation(Exception):
    """Raised when the other side breaks the protocol."""


def options(largest: int = LARGEST_MESSAGE, **others: int) -> list[tuple[str, int]]:
    """Return the channel arguments of both sides, for messages of ``largest`` bytes.

    ``others`` are added, or take the place of ours; their names come without "grpc.".
    gRPC's own keepalive is off and its ping timeout long. A ping waits behind whatever a slow link
    still has to carry, so a timeout of seconds takes the link for dead (seen at 60 kB/s with 1.4 MB
    on the way). Our own heartbeats count every chunk that arrives as a sign of life.
    """
    ours = [
        ("grpc.keepalive_time_ms", 2**31 - 1),
        ("grpc.http2.ping_timeout_ms", 600_000),
        # gRPC would widen its window with the link's delay, which the other side can feign.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", WINDOW),
        ("grpc.max_receive_message_length", largest),
        ("grpc.max_metadata_size", 8 * 1024),
        # No message is compressed: a short one could become a long one. 1: as it is, and no other way.
        ("grpc.compression_enabled_algorithms_bitset", 1),
        # Proxies of the environment are for the web: a device would connect to one, or not at all.
        ("grpc.enable_http_proxy", 0),
        # Every client has its own connection and back-off, also where many share a process.
        ("grpc.use_local_subchannel_pool", 1),
    ]
    return list((dict(ours) | {f"grpc.{name}": value for name, value in others.items()}).items())


def cut(parts: Parts, epoch: int, ticket: int) -> Iterator[bytes]:
    """Yield the chunks of one frame. All but the last are exactly CHUNK bytes long."""
    length = sum(len(part) for part in parts)
    pieces: list[bytes | memoryview] = [PREFIX.pack(MAGIC, epoch, ticket, length)]
    room = CHUNK - PREFIX.size
    for part in parts:
        view = memoryview(part).cast("B")
        while len(view) > room:
            pieces.append(view[:room])
            yield b"".join(pieces)
            view, pieces, room = view[room:], [], CHUNK
        pieces.append(view)
        room -= len(view)
    yield b"".join(pieces)


class Assembler:
    """Put chunks together to the frame of the awaited ticket; skip every other frame.

    With ``in_order`` (a client's side) any ticket later than the last is awaited.
    """

    def __init__(self, in_order: bool = False) -> None:
        self.epoch = 0
        self.awaited: int | None = None
        self.limit = 0
        self.passed_over = 0
        """Frames skipped so far that nobody could have been waiting for."""
        self.beats = 0
        """Heartbeats so far: empty frames of ticket 0."""
        self.signs = 0
        """Signs of work so far: empty frames of a ticket that is, or was, awaited."""
        self._in_order = in_order
        self._last = 0
        self._longest = LARGEST_FRAME if in_order else 0
        """Most bytes of a frame that is skipped: those of the longest that was ever awaited."""
        self._abandoned: set[int] = set()
        self._owed = 0
        self._buffer: bytearray | None = None
        self.ticket = self._filled = self._left = 0
        self._room = CHUNK
        self._late = False
        self._kept = bytearray()

    def expect(self, ticket: int, limit: int) -> None:
        """Wait for ``ticket``, of at most ``limit`` bytes; what was awaited before is abandoned."""
        self.abandon()
        self.awaited, self.limit = ticket, limit
        self._longest = max(self._longest, limit)

    def abandon(self) -> None:
        """Wait for nothing; an answer that is on its way is skipped."""
        if self.awaited is not None:
            self._abandoned.add(self.awaited)
            self._owed = self.limit
            # Its rest still has to pass the link, before anything else can.
            self._late = self._left > 0 and (self._late or self.ticket == self.awaited)
        self.awaited = self._buffer = None

    @property
    def late(self) -> int:
        """Return the most bytes of an earlier answer that may still come before the next."""
        return self.limit if self.awaited is not None else self._owed

    def feed(self, chunk: bytes) -> tuple[bool, tuple[int, bytearray] | None]:
        """Return whether this chunk is progress, and the awaited frame's ticket and bytes once complete."""
        if len(chunk) > CHUNK:
            raise Violation(f"a message of {len(chunk)} bytes exceeds the {CHUNK} of a chunk")
        if not self._left:
            return self._begin(chunk)
        return self._go_on(memoryview(chunk))

    def _begin(self, chunk: bytes) -> tuple[bool, tuple[int, bytearray] | None]:
        if len(chunk) < PREFIX.size:
            raise Violation(f"a frame begins with {len(chunk)} bytes, its prefix has {PREFIX.size}")
        magic, epoch, ticket, length = PREFIX.unpack_from(chunk)
        if magic != MAGIC:
            raise Violation(f"a frame begins with {magic!r} instead of {MAGIC!r}")
        if length > LARGEST_FRAME:
            raise Violation(
                f"a frame of {length} bytes exceeds the {LARGEST_FRAME} any frame may have"
            )
        ours = self._is_awaited(epoch, ticket)
        if length > (most := self.limit if ours else self._longest):
            raise Violation(f"a frame of {length} bytes exceeds the {most} this phase allows")
        late = epoch == self.epoch and ticket in self._abandoned
        if length == 0 and len(chunk) != PREFIX.size:
            raise Violation(f"an empty frame is followed by {len(chunk) - PREFIX.size} bytes")
        if length == 0 and ticket == 0:
            self.beats += 1
            return False, None
        if not ours and not late:
            self.passed_over += 1
        if length == 0:
            # No answer, only a sign that its sender is at work on it.
            self.signs += ours or late
            return ours, None
        self.ticket, self._left, self._filled, self._late = ticket, length, 0, late
        self._buffer = self._room_for(length) if ours else None
        self._room = CHUNK - PREFIX.size
        return self._go_on(memoryview(chunk)[PREFIX.size :])

    def _room_for(self, length: int) -> bytearray:
        """Return a buffer. The server reuses one: it decodes an answer before it awaits the next."""
        if self._in_order or length > KEPT_BUFFER:
            return bytearray(length)
        if len(self._kept) != length:
            self._kept = bytearray(length)
        return self._kept

    def _is_awaited(self, epoch: int, ticket: int) -> bool:
        if self._in_order:
            return self.epoch in (0, epoch) and (ticket == 0 or ticket > self._last)
        return epoch == self.epoch and ticket == self.awaited

    def _go_on(self, data: memoryview) -> tuple[bool, tuple[int, bytearray] | None]:
        due = min(self._left, self._room)
        if len(data) != due:
            raise Violation(f"a chunk brings {len(data)} bytes where {due} are due")
        self._room = CHUNK
        self._left -= due
        if self._buffer is not None:
            self._buffer[self._filled : self._filled + due] = data
            self._filled += due
        progress = self._buffer is not None or self._late
        if self._left:
            return progress, None
        if self._late:
            self._abandoned.discard(self.ticket)
            self._owed = self._owed if self._abandoned else 0
        frame, self._buffer = self._buffer, None
        if frame is None:
            return progress, None
        self._last, self.awaited = max(self._last, self.ticket), None
        return progress, (self.ticket, frame)


class LoopThread:
    """Run an asyncio loop in its own thread, so that networking never waits for training."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def call(self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run ``coroutine`` on the loop and wait for what it returns."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout)

    def stop(self) -> None:
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(5)
