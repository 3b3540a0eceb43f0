"""Receive the frames that a server may send now, and answer them."""

import time
from collections.abc import Mapping
from typing import Any

from semisfl.fleet.outgoing import Cleared
from semisfl.net import messages
from semisfl.net.client.connection import Connection
from semisfl.net.client.lines import brief_logger
from semisfl.net.client.member import Member
from semisfl.net.client.stream import Received, Stream
from semisfl.net.frames import Frame, Schema, decode
from semisfl.net.headers import WireError
from semisfl.stopping import StopFlag, Stopped

log = brief_logger(__name__)

WAIT_SECONDS = 0.02
"""Between two looks at whether the server has taken the last answers."""


class FrameIO:
    """Decode expected frames only, and send what the device's policy lets through."""

    def __init__(self, connection: Connection, stop: StopFlag) -> None:
        self.outgoing = connection.outgoing
        self.joined: Member | None = None
        """The device's part in a run, once it has accepted the terms."""
        self.beginnings: Mapping[str, Schema] = {}
        """The frames that begin a round of the accepted method: no other may be asked for."""
        self.stream: Stream | None = None
        self._connection, self._stop = connection, stop
        self._expected: Mapping[str, Schema] = {}

    @property
    def member(self) -> Member:
        assert self.joined is not None, "the first frame of any connection is a welcome"
        return self.joined

    def receive(self) -> Received:
        """Return the next frame; raise `Stopped` if there will be none."""
        if self.joined is not None:
            self.joined.hardware.streams.before_waiting()
        while not self._stop.requested and not self._connection.over.is_set():
            received = self._connection.receive(0.2)
            if received is not None:
                return received
        raise Stopped

    def decode(self, received: Received) -> Frame | None:
        """Return the frame; None if it is not expected or not valid."""
        if received.stream is not self.stream:
            # Another connection: it starts with a welcome, whatever the last one was about.
            self.stream = received.stream
            self._expected = {"welcome": messages.WELCOME}
        try:
            # Each frame has its own buffer here, so its tensors may stay in it.
            return decode(received.data, self._expected, copy=False)
        except WireError as error:
            log.error("ignored a frame of the server: %s", error)
            return None

    def expect(self, expected: Mapping[str, Schema]) -> None:
        """Accept these frames from now on, and no other."""
        assert self.stream is not None
        self._expected = expected
        self.stream.assembler.limit = max(schema.limit for schema in expected.values())

    def expect_round(self, **more: Schema) -> None:
        """Expect a round to begin, at any time: the server never ends an aborted one explicitly."""
        self.expect({**self.beginnings, **more})

    def answer(
        self,
        received: Received,
        kind: str,
        fields: Mapping[str, Any],
        cleared: Cleared | None = None,
        codecs: Mapping[str, str] | str = "fp32",
        *,
        copy: bool = True,
    ) -> None:
        """Send an answer. ``copy``: training may change its tensors before the last byte is sent."""
        while received.stream.crowded and not self._stop.requested:
            time.sleep(WAIT_SECONDS)
        parts = self.outgoing.frame(kind, fields, cleared, codecs)
        received.stream.answer(received.ticket, [b"".join(parts)] if copy else parts)
