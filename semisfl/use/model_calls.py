"""Limit calls to a model's server: their number, and how long a device may be silent in one."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator

import grpc
import grpc.aio

from semisfl.net import chunks
from semisfl.net.server.admission import Refused
from semisfl.net.server.cheap_frames import Connection
from semisfl.use import split_inference as protocol


class Places:
    """Count the calls in progress: at most ``most`` in all and ``each`` per device."""

    def __init__(self, most: int, each: int) -> None:
        self._most, self._each = most, each
        self.taken: Counter[str] = Counter()

    @contextlib.contextmanager
    def place(self, identity: str) -> Iterator[None]:
        """Occupy a place inside the block; if all are taken, the caller is asked to retry later."""
        if self.taken[identity] >= self._each:
            raise _come_again(f"{identity} has {self._each} calls under way, the most for a device")
        if self.taken.total() >= self._most:
            raise _come_again(f"{self._most} calls are under way, the most for this server")
        self.taken[identity] += 1
        try:
            yield
        finally:
            self.taken[identity] -= 1
            if not self.taken[identity]:
                del self.taken[identity]


def _come_again(reason: str) -> Refused:
    return Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{reason}; try again in a moment")


async def request(
    context: grpc.aio.ServicerContext, silence: float, connection: Connection, most: int
) -> bytearray:
    """Return all messages of a call, ``most`` bytes joined; count them as those of its ``connection``.

    Each message must arrive within ``silence`` seconds; after these seconds the whole call must also
    keep the lowest bandwidth allowed.
    """
    most, data, now = min(most, protocol.LARGEST_CALL), bytearray(), asyncio.get_running_loop().time
    begun = now()
    while True:
        slowest = begun + silence + len(data) / chunks.LOWEST_RATE
        try:
            async with asyncio.timeout_at(min(now() + silence, slowest)):
                message = await context.read()
        except TimeoutError as error:
            raise Refused(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                f"the rest of the call did not come; a device may be silent for {silence:g} s, and its "
                f"link must carry {chunks.LOWEST_RATE:g} bytes/s",
            ) from error
        if message is grpc.aio.EOF:
            return data
        data += message
        connection.received += len(message)
        if len(data) > most:
            raise Refused(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"a call of over {most} bytes; send fewer images at a time",
            )
