"""A device that falls silent in a call keeps no other device from its answer."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import torch

from semisfl.net import chunks, links
from semisfl.net.frames import Schema, encode
from semisfl.net.server import refusals
from semisfl.net.server.admission import Refused
from semisfl.net.server.cheap_frames import MOST_CONNECTIONS, Connection
from semisfl.net.tls import certs
from semisfl.use import split_inference
from semisfl.use.classifier import Classifier
from semisfl.use.model_calls import Places, request
from semisfl.use.model_client import ModelClient
from semisfl.use.model_connection import ModelConnection
from semisfl.use.model_server import ModelServer
from tests import toy
from tests.net import floods
from tests.net.harness import Proxy
from tests.use.serving import connect, served

PIXELS = toy.dataset().test_images[:5]
PATIENCE = 60.0
Silent = Callable[..., list[Any]]


@pytest.fixture
def silent() -> Iterator[Silent]:
    """Open calls that send ``first``, and then nothing."""
    over = threading.Event()

    def never(first: bytes) -> Iterator[bytes]:
        if first:
            yield first
        over.wait()

    def calls(client: ModelClient, count: int, first: bytes = b"") -> list[Any]:
        # A longer answer of a later call would need another channel, and this one with its calls would end.
        channel = client.connection.channel(2**24)
        stub = channel.stream_unary(split_inference.method("Describe"))
        return [stub.future(never(first)) for _ in range(count)]

    yield calls
    over.set()


def wait_until(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.01)


def ending(call: Any) -> tuple[grpc.StatusCode, str]:
    error = call.exception(timeout=PATIENCE)
    return error.code(), error.details()


def others_are_answered(server: ModelServer, model: Classifier, authority: Path) -> None:
    with connect(f"localhost:{server.port}", authority, "camera") as client:
        probabilities = client.probabilities(PIXELS)
    torch.testing.assert_close(probabilities, model.probabilities(PIXELS), rtol=0, atol=1e-6)


def test_calls_per_device_are_limited(model: Classifier, authority: Path, silent: Silent) -> None:
    with (
        served(model, authority, calls_each=5, silence_seconds=PATIENCE) as server,
        connect(f"localhost:{server.port}", authority, "stolen") as client,
    ):
        calls = silent(client, 8)
        wait_until(lambda: sum(call.done() for call in calls) == 3)
        for call in [call for call in calls if call.done()]:
            code, reason = ending(call)
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "stolen has 5 calls under way" in reason and "try again" in reason
        assert server._places.taken == {"stolen": 5}
        others_are_answered(server, model, authority)
        with pytest.raises(ValueError, match="refuses: stolen has 5 calls under way"):
            client.probabilities(PIXELS)
        next(call for call in calls if not call.done()).cancel()
        wait_until(lambda: server._places.taken["stolen"] == 4)
        assert len(client.probabilities(PIXELS)) == len(PIXELS)


def test_the_revoked_are_turned_away_before_they_say_anything(
    model: Classifier, authority: Path, silent: Silent
) -> None:
    certs.make_client(authority, "lost")
    with (
        served(model, authority, silence_seconds=PATIENCE) as server,
        connect(f"localhost:{server.port}", authority, "lost") as client,
    ):
        certs.revoke(authority, "lost")
        calls = silent(client, 8)
        others_are_answered(server, model, authority)
        refused = (grpc.StatusCode.PERMISSION_DENIED, "the certificate of lost is revoked")
        assert [ending(call) for call in calls] == [refused] * 8
        assert not server._places.taken


@pytest.mark.parametrize("first", [b"", bytes(1000)], ids=["at once", "midway"])
def test_a_silent_call_is_ended(
    first: bytes, model: Classifier, authority: Path, silent: Silent
) -> None:
    with (
        served(model, authority, silence_seconds=2) as server,
        connect(f"localhost:{server.port}", authority, "stolen") as client,
    ):
        for call in silent(client, 4, first):
            code, reason = ending(call)
            assert code is grpc.StatusCode.DEADLINE_EXCEEDED
            assert "the rest of the call did not come; a device may be silent for 2 s" in reason
        wait_until(lambda: not server._places.taken)
        others_are_answered(server, model, authority)


def test_connections_per_device_are_limited(model: Classifier, authority: Path) -> None:
    """A call on each keeps it from being idle; each connection takes one of the server's files."""
    first = floods.opened(1, split_inference.method("Describe"))
    with (
        served(model, authority, silence_seconds=PATIENCE, calls_each=64) as server,
        contextlib.ExitStack() as stack,
    ):
        links = []
        for _ in range(MOST_CONNECTIONS + 2):
            link = floods.connect(authority, "stolen", server.port, first=first)
            links.append(stack.enter_context(link))
            links[-1].settimeout(PATIENCE)
        for link in links[MOST_CONNECTIONS:]:
            with contextlib.suppress(ConnectionError):
                while link.recv(1000):
                    pass  # raises TimeoutError if the server keeps the connection
        assert server._places.taken["stolen"] == MOST_CONNECTIONS
        others_are_answered(server, model, authority)
    with served(model, authority) as server:
        for _ in range(2 * MOST_CONNECTIONS):  # one after another
            others_are_answered(server, model, authority)


def test_a_connection_that_is_lost_leaves_no_call(
    model: Classifier, authority: Path, silent: Silent
) -> None:
    with served(model, authority, silence_seconds=PATIENCE) as server:
        with connect(f"localhost:{server.port}", authority) as client:
            calls = silent(client, 2, bytes(1000))
            wait_until(lambda: server._places.taken["camera"] == len(calls))
        wait_until(lambda: not server._places.taken)


def test_a_device_that_takes_no_answer_keeps_no_place(
    model: Classifier, authority: Path, caplog: pytest.LogCaptureFixture
) -> None:
    call = floods.frame(floods.DATA, 1, 1, floods.message(encode("describe", {}, {})))
    first = floods.no_room() + floods.opened(1, split_inference.method("Describe")) + call
    with served(model, authority, silence_seconds=0.5) as server:
        with floods.connect(authority, "stolen", server.port, first=first) as link:
            link.settimeout(PATIENCE)
            with contextlib.suppress(ConnectionError):
                while link.recv(1000):
                    pass  # raises TimeoutError if the server keeps the connection
        wait_until(lambda: not server._places.taken)
    (line,) = caplog.messages
    assert (
        "refused peer=ipv" in line
        and "identity=stolen reason=the answer was not taken within 0.5" in line
    )


def test_calls_per_server_are_limited() -> None:
    places = Places(most=3, each=2)
    with contextlib.ExitStack() as held:
        for name in ("a", "a", "b"):
            held.enter_context(places.place(name))
        with pytest.raises(Refused, match="a has 2 calls under way"), places.place("a"):
            raise AssertionError
        with pytest.raises(Refused, match="3 calls are under way"), places.place("c"):
            raise AssertionError
    assert not places.taken
    with places.place("c"):
        assert places.taken == {"c": 1}


# --- how long a request may take -----------------------------------------------------------------


class Leaping(asyncio.SelectorEventLoop):
    """An event loop in which time passes only while everybody sleeps, and then at once."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        due = [timer.when() for timer in self._scheduled if not timer.cancelled()]  # type: ignore[attr-defined]
        if due and not self._ready:  # type: ignore[attr-defined]
            self.now = max(self.now, min(due))
        super()._run_once()  # type: ignore[misc]


class Device:
    """A device that sends a message of so many bytes after so many seconds, for each of ``sends``."""

    def __init__(self, sends: list[tuple[float, int]]) -> None:
        self._sends = iter(sends)

    async def read(self) -> Any:
        seconds, size = next(self._sends, (0.0, -1))
        await asyncio.sleep(seconds)
        return bytes(size) if size >= 0 else grpc.aio.EOF


def received(sends: list[tuple[float, int]], most: int = 1 << 40) -> int:
    device: Any = Device(sends)
    with asyncio.Runner(loop_factory=Leaping) as runner:
        return len(runner.run(request(device, 25.0, Connection(), most)))


def test_frames_around_an_unfinished_call_do_not_pile_up(
    model: Classifier,
    authority: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """gRPC keeps 8 KB for 24 bytes of a message, if it came between other frames."""
    monkeypatch.setattr(links, "BESIDE_BYTES", 500_000)
    call = floods.opened(1, split_inference.method("Describe"))
    with (
        served(model, authority) as server,
        floods.connect(authority, "camera", server.port, call) as link,
    ):
        with contextlib.suppress(OSError):
            link.sendall(floods.frame(floods.SETTINGS, 1, 0) + floods.begun(1 << 20))
            for _ in range(1000):
                link.sendall(floods.crumb() * 10)
        wait_until(lambda: "frames that are no messages" in caplog.text)
        assert "identity=camera" in caplog.text


def test_frames_around_an_unfinished_answer_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "BESIDE_BYTES", 500_000)
    most = 300_000_000
    port, serving, taken = floods.crumbs_taken(most)
    connection = ModelConnection(f"127.0.0.1:{port}", None)
    with contextlib.closing(connection), pytest.raises(ValueError, match="that are no messages"):
        connection.ask("Fetch", b"", "bottom", Schema(max_bytes=1 << 23))
    serving.join()
    assert taken[0] < most, "the device takes all of it"


def test_a_long_answer_may_come_slowly(
    model: Classifier, authority: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts as received once it is complete."""
    monkeypatch.setattr(links, "BESIDE_BYTES", 500_000)
    monkeypatch.setattr(links, "LOOK_SECONDS", 0.01)
    part = torch.arange(split_inference.PART) % 251
    with served(model, authority) as server:
        server.__dict__["_parts"] = [part.to(torch.uint8)]
        proxy = Proxy(f"127.0.0.1:{server.port}", rate=4e6)
        credentials = certs.load_client_credentials(authority, "camera")
        connection = ModelConnection(f"localhost:{proxy.port}", credentials)
        request = b"".join(encode("fetch", {"part": 0}, {}))
        (schema,) = split_inference.parts_schemas(split_inference.PART)
        with contextlib.closing(connection):
            for _ in range(2):
                frame = connection.ask("Fetch", request, "part", schema)
                assert torch.equal(frame.tensors["bytes"], part.to(torch.uint8))


def test_a_slow_device_is_waited_for() -> None:
    chunk = chunks.CHUNK / chunks.LOWEST_RATE
    assert received([(chunk, chunks.CHUNK)] * 50) == 50 * chunks.CHUNK
    assert received([(24.0, chunks.CHUNK), (1.0, 5)]) == chunks.CHUNK + 5
    assert received([(0.0, chunks.CHUNK), (24.0, 5)]) == chunks.CHUNK + 5
    assert received([]) == 0


@pytest.mark.parametrize(
    "sends",
    [
        [(26.0, 5)],
        [(0.0, 64 * chunks.CHUNK), (26.0, 5)],
        [(1.0, 1)] * 40,
        [(1.0, 0)] * 40,
        [(2 * chunks.CHUNK / chunks.LOWEST_RATE, chunks.CHUNK)] * 50,
    ],
    ids=["silent", "silent after much", "drops", "empty messages", "half the slowest"],
)
def test_silence_and_drops_are_not_waited_for(sends: list[tuple[float, int]]) -> None:
    with pytest.raises(Refused, match="the rest of the call did not come") as refusal:
        received(sends)
    assert refusal.value.code is grpc.StatusCode.DEADLINE_EXCEEDED


def test_a_request_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_inference, "LARGEST_CALL", 100)
    assert received([(0.0, 60), (0.0, 40)]) == 100
    with pytest.raises(Refused, match="a call of over 100 bytes") as refusal:
        received([(0.0, 60), (0.0, 41)])
    assert refusal.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    with pytest.raises(Refused, match="a call of over 70 bytes"):
        received([(0.0, 60), (0.0, 11)], most=70)


def test_a_revoked_device_that_calls_again_and_again_leaves_few_lines(
    model: Classifier,
    authority: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(refusals, "AUDIT_LINES", 2)
    certs.make_client(authority, "noisy")
    certs.revoke(authority, "noisy")
    with served(model, authority) as server:
        for _ in range(5):
            with pytest.raises(ValueError, match="noisy is revoked"):
                connect(f"localhost:{server.port}", authority, "noisy")
    lines = [line for line in caplog.messages if "identity=noisy" in line]
    assert len(lines) == 3 and "3 more refused" in lines[-1]
