"""Make few of a page's answers at a time, and send them piece by piece.

A slow reader has one piece in its buffer, not a copy of the answer.
"""

import asyncio
from collections import Counter
from collections.abc import Collection

from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

PIECE = 64 * 1024
"""Bytes written at once; the next piece waits until the reader has taken most of this one."""
MOST_UNSENT = 64 * 1024 * 1024
"""Bytes of all answers that are being sent. Equal answers are counted once."""

AT_ONCE = 2
"""Answers that are made at a time: training needs the interpreter too."""


class Turns:
    """Let requests wait for their turn. Those whose reader has left are not answered; ``free`` paths never wait."""

    def __init__(self, app: ASGIApp, free: Collection[str] = ()) -> None:
        self._app, self._free = app, free
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in self._free:
            return await self._app(scope, receive, send)
        has_turn = begun = False

        def give_turn() -> None:
            nonlocal has_turn
            if has_turn:
                self._turns.release()
            has_turn = False

        async def answering(message: Message) -> None:
            nonlocal begun
            begun = True
            give_turn()  # it is made: sending it may take long
            await send(message)

        try:
            await self._turns.acquire()
            has_turn = True
            if not await Request(scope, receive).is_disconnected():
                await self._app(scope, receive, answering)
        except asyncio.CancelledError:
            if begun:
                raise
            # Else the log has a traceback for each that waits.
            await PlainTextResponse("the page ends", 503)(scope, receive, send)
        finally:
            give_turn()


class Paced:
    """Let the readers of equal answers share their bytes, and refuse answers beyond ``most`` bytes."""

    def __init__(self, app: ASGIApp, most: int = MOST_UNSENT) -> None:
        self._app, self._most = app, most
        self._shared: dict[bytes, bytes] = {}
        """The long answers that are being sent: of equal ones, the first."""
        self._readers: Counter[bytes] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        long: list[Message] = []
        start: Message | None = None

        async def collected(message: Message) -> None:
            """Send what is short. A long answer waits until the app has ended and holds no copy of it."""
            nonlocal start
            if message["type"] == "http.response.start":
                start = message
            elif len(message.get("body", b"")) > PIECE:
                long.append(message)
            else:
                if start is not None:
                    await send(start)
                    start = None
                await send(message)

        await self._app(scope, receive, collected)
        if not long:
            return
        (message,) = long  # the page streams nothing
        if self._has_room(message["body"]):
            if start is not None:
                await send(start)
            await self._send_pieces(message, send)
        else:
            busy = PlainTextResponse("too much is being sent; ask again", 503)
            await busy(scope, receive, send)

    def _has_room(self, body: bytes) -> bool:
        sent = sum(map(len, self._shared))
        return body in self._shared or sent + len(body) <= self._most

    async def _send_pieces(self, message: Message, send: Send) -> None:
        body = message["body"] = self._shared.setdefault(message["body"], message["body"])
        self._readers[body] += 1
        try:
            last = (len(body) - 1) // PIECE * PIECE
            for begin in range(0, last, PIECE):
                piece = body[begin : begin + PIECE]
                await send({**message, "body": piece, "more_body": True})
            await send({**message, "body": body[last:]})
        finally:
            self._readers[body] -= 1
            if not self._readers[body]:
                del self._readers[body], self._shared[body]
