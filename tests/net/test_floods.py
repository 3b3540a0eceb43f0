"""Masses of HTTP/2 frames that cost a client nothing: it is disconnected, and the run goes on."""

import asyncio
import contextlib
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from semisfl.net import chunks, links
from semisfl.net.links import where
from semisfl.net.server import cheap_frames, endpoint
from semisfl.net.server.admission import MOST_IMAGES, Refused, refused_by_policy
from semisfl.net.server.cheap_frames import MOST_CONNECTIONS, MOST_STREAMS
from semisfl.net.server.device_log import DeviceLog
from semisfl.net.server.penalties import STRIKES
from semisfl.net.server.session_table import MOST_ARRIVALS
from semisfl.net.tls import certs
from semisfl.runs.loop import run_rounds
from tests.net.floods import FLOODS, connect, flood, hello, identity, no_room, opened
from tests.net.harness import Network, certificates, network, tiny, until

NEVER = 60.0


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Network]:
    certificates(tmp_path, 2)
    with network(tiny(2, network={"deadline": 2.0}), certificates=tmp_path) as net:
        yield net


@pytest.fixture
def few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the time of a connection that serves no stream is over before 32 MB have come."""
    monkeypatch.setattr(links, "BESIDE_BYTES", 500_000)


def attack(net: Network, name: str, first: bytes | None = None) -> int:
    """Send a flood as client-1 until the server disconnects; return how many frames it took."""
    assert net.certificates is not None
    with connect(net.certificates, "client-1", net.port, first) as link:
        time.sleep(0.2)  # its first stream is there
        started = time.monotonic()
        sent = flood(link, FLOODS[name], NEVER)
        assert time.monotonic() - started < NEVER, "the server takes it for ever"
        return sent


@pytest.mark.usefixtures("few_bytes")
@pytest.mark.parametrize(("name", "times"), [("resets", STRIKES), ("half_streams", 1)])
def test_a_flood_of_streams_ends_the_connection_and_counts_as_a_strike(
    net: Network, name: str, times: int
) -> None:
    net.join(0)
    strikes = net.fleet._listener.penalties.strikes
    for count in range(1, times + 1):
        attack(net, name)
        until(lambda count=count: strikes["client-1"] == count)  # type: ignore[misc]
    run_rounds(net.experiment)
    assert not strikes["client-0"] and net.fleet.present() == [0]


@pytest.mark.usefixtures("few_bytes")
def test_streams_to_a_method_that_there_is_not_count_too(net: Network) -> None:
    """gRPC refused them by itself, so that their device got no strike, however often it came back."""
    attack(net, "nowhere", first=b"")
    until(lambda: net.fleet._listener.penalties.strikes["client-1"] == 1)


@pytest.mark.usefixtures("few_bytes")
def test_streams_beyond_the_limit_are_not_looked_at(net: Network) -> None:
    looked: list[str] = []
    trust = net.fleet._listener._trust
    assert trust is not None
    certificate_of = trust.certificate_of
    trust.certificate_of = lambda context: looked.append("") or certificate_of(context)  # type: ignore[method-assign,func-returns-value]
    attack(net, "resets")
    until(lambda: net.strikes == {"client-1": 1})
    assert len(looked) <= MOST_STREAMS


def test_a_flood_of_pings_ends_the_connection(
    net: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC gives up on it at once, and where cores are busy it stays to read the rest."""
    monkeypatch.setattr(cheap_frames, "UNSERVED_SENDER_SECONDS", 1.0)
    attack(net, "pings")


def test_a_few_pings_in_a_row_are_told_to_be_too_many(net: Network) -> None:
    """gRPC's own limit: without it, only the silence of the attacker's stream would end its connection."""
    assert net.certificates is not None
    with connect(net.certificates, "client-1", net.port) as link:
        link.sendall(b"".join(map(FLOODS["pings"], range(10))))
        answer = b""
        while b"too_many_pings" not in answer:
            piece = link.recv(65536)
            assert piece, "disconnected for another reason"
            answer += piece


@pytest.mark.usefixtures("few_bytes")
@pytest.mark.parametrize("name", ["settings", "windows"])
def test_bytes_that_are_no_messages_end_the_connection_and_count_as_a_strike(
    net: Network, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cheap_frames, "CHECKED_AT_ONCE", 1)
    net.join(0)
    attack(net, name)
    until(lambda: net.strikes == {"client-1": 1})
    run_rounds(net.experiment)
    assert "client-0" not in net.strikes


def test_what_a_connection_may_bring_beside_messages_is_not_saved_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A device of a long run could bring gigabytes at once, and gRPC keep them."""
    monkeypatch.setattr(time, "monotonic", lambda: now)
    now, messages = 0.0, 10**9
    beside = links.Beside()
    assert beside.excess(messages, messages, messages) is None
    now = 10**6
    assert beside.excess(messages + 1000, messages, messages) is None
    reached = messages + 1000 + links.BESIDE_BYTES
    assert beside.excess(reached, messages, messages) is None
    assert beside.excess(reached + 1, messages, messages) == reached + 1 - messages


def test_clients_that_share_a_process_may_receive_one_after_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(links, "BESIDE_BYTES", 500_000)
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as stack:
        port = listener.getsockname()[1]
        fetched = links.Fetched(port)

        def connected() -> tuple[socket.socket, socket.socket]:
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            return client, stack.enter_context(listener.accept()[0])

        def receives(link: tuple[socket.socket, socket.socket]) -> None:
            for _ in range(100):
                link[1].sendall(bytes(20_000))
                link[0].recv(20_000, socket.MSG_WAITALL)

        ours = connected()
        receives(ours)
        assert fetched.excess(2_000_000, 0) is None
        other = connected()
        assert fetched.excess(2_000_000, 0) is None
        receives(other)
        assert fetched.excess(2_000_000, 0) is None
        receives(ours)
        found = fetched.excess(2_000_000, 0)
        assert found is not None and found[0] >= 2_000_000


def test_an_honest_device_is_far_from_the_limit(
    net: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sixteenth of it is enough, for messages that wait in buffers and the heads of frames."""
    monkeypatch.setattr(links, "BESIDE_BYTES", 2 * 1024 * 1024)
    monkeypatch.setattr(links, "CHECK_SECONDS", 0.01)
    net.join_all()
    run_rounds(net.experiment)
    assert not net.strikes
    assert net.fleet.present() == [0, 1]


def test_a_connection_without_a_stream_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that only holds connections open must not use up the server's files."""
    monkeypatch.setattr(endpoint, "IDLE_SECONDS", 1)
    certificates(tmp_path, 2)
    with (
        network(tiny(2), certificates=tmp_path) as net,
        connect(tmp_path, "client-1", net.port, first=b"") as link,
    ):
        link.settimeout(20)
        while link.recv(1000):
            pass  # raises TimeoutError if the server keeps the connection


def test_a_device_has_few_connections_at_a_time(net: Network) -> None:
    """Streams without a hello keep them from being idle, and each takes one of the server's files."""
    assert net.certificates is not None
    with contextlib.ExitStack() as stack:
        links = []
        for _ in range(MOST_CONNECTIONS + 4):
            links.append(stack.enter_context(connect(net.certificates, "client-1", net.port)))
            links[-1].settimeout(20)
        for link in links[MOST_CONNECTIONS:]:
            with contextlib.suppress(ConnectionError):
                while link.recv(1000):
                    pass  # raises TimeoutError if the server keeps the connection
        net.join(0)
        assert net.fleet.wait_for(1, 20), "there is room for the others"
        for link in links[:MOST_CONNECTIONS]:
            link.sendall(opened(3))
    assert not net.strikes


@pytest.mark.usefixtures("few_bytes")
def test_a_revoked_certificate_earns_no_strike_for_the_device_that_has_a_new_one(
    net: Network, tmp_path: Path
) -> None:
    """A finder of the old one could otherwise shut the device out, or use up its connections."""
    assert net.certificates is not None
    stolen = tmp_path / "stolen"
    shutil.copytree(net.certificates, stolen, ignore=shutil.ignore_patterns("stolen"))
    certs.revoke(net.certificates, "client-1")
    certs.make_client(net.certificates, "client-1", overwrite=True)
    with contextlib.ExitStack() as stack:
        for _ in range(MOST_CONNECTIONS):
            stack.enter_context(connect(stolen, "client-1", net.port))
        until(lambda: net.fleet.device_log.events["refused"] >= MOST_CONNECTIONS)
        net.join(1)
        assert net.fleet.wait_for(1, 20), "its own connections are not used up"

    def flooded() -> bool:
        with connect(stolen, "client-1", net.port) as link:
            flood(link, FLOODS["resets"], NEVER)
        return bool(net.strikes)

    until(flooded)  # on a busy machine gRPC may end the connection before so many streams are seen
    assert "client-1" not in net.strikes


def test_a_revoked_device_does_not_come_in_with_a_ticket_of_an_earlier_connection(
    net: Network,
) -> None:
    """TLS does not look at its certificate again: the server must."""
    assert net.certificates is not None
    way = net.certificates, "client-1", net.port
    device = identity(net.certificates, "client-1")
    with connect(*way, hello(), device) as first:
        until(lambda: net.fleet.device_log.events["refused"] or first.recv(1 << 16))
        ticket = first.session
    assert not net.fleet.device_log.events["refused"]
    certs.revoke(net.certificates, "client-1")
    with connect(*way, hello(), device, ticket) as again:
        until(lambda: net.fleet.device_log.events["refused"])
        assert again.session_reused, "it showed its certificate again"


@pytest.mark.parametrize("side", ["server", "client"])
def test_neither_side_inflates_a_compressed_message(side: str) -> None:
    """A short one could become a very long one. ``side`` is ours; the other one compresses."""
    zeros = bytes(4 * 2**20)
    received: list[int] = []

    async def answer(_: Any, context: Any) -> None:
        if side == "client":
            await context.write(zeros)
        else:
            received.append(_length(await context.read()))

    async def exchange() -> None:
        ours, gzip = chunks.options(), grpc.Compression.Gzip
        theirs = [("grpc.max_send_message_length", -1)]
        how = {"options": theirs, "compression": gzip} if side == "client" else {"options": ours}
        server = grpc.aio.server(**how)
        handler = {"Call": grpc.stream_stream_rpc_method_handler(answer)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Any", handler),))
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        how = {"options": theirs, "compression": gzip} if side == "server" else {"options": ours}
        await server.start()
        try:
            async with asyncio.timeout(60), grpc.aio.insecure_channel(address, **how) as channel:
                call = channel.stream_stream("/Any/Call")()
                with contextlib.suppress(grpc.aio.AioRpcError):
                    if side == "server":
                        await call.write(zeros)
                        await call.done_writing()
                    received.append(_length(await call.read()))
        finally:
            await server.stop(None)

    asyncio.run(exchange())
    assert not any(received)


def _length(message: Any) -> int:
    return len(message) if isinstance(message, bytes) else 0


@pytest.mark.parametrize("call", [opened(1, chunks.TERMS), hello()], ids=["terms", "session"])
def test_a_device_that_takes_no_answer_does_not_hold_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: bytes
) -> None:
    """The end of a stream waits behind bytes that the device does not take."""
    monkeypatch.setattr(cheap_frames, "UNSERVED_SECONDS", 1.0)
    certificates(tmp_path, 2)
    with (
        network(tiny(2), certificates=tmp_path, handshake_seconds=1.0) as net,
        contextlib.ExitStack() as stack,
    ):
        links = [
            stack.enter_context(connect(tmp_path, "client-1", net.port, first=no_room() + call))
            for _ in range(3)
        ]
        for link in links[:2]:  # the latest session of a device stays while it shows life
            link.settimeout(20)
            with contextlib.suppress(ConnectionError):
                while link.recv(1000):
                    pass  # raises TimeoutError if the server keeps the connection


def test_a_device_that_takes_no_heartbeat_does_not_hold_connections(
    net: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the welcome, and the end of its session waits behind a heartbeat."""
    monkeypatch.setattr(endpoint, "ABORT_SECONDS", 1.0)
    monkeypatch.setattr(chunks, "BEAT_SECONDS", 0.1)
    assert net.certificates is not None
    table = net.fleet._listener.table
    with connect(net.certificates, "client-1", net.port, first=hello()) as link:
        until(lambda: "client-1" in table.streams and table.streams["client-1"].connection.sent > 0)
        monkeypatch.setattr(cheap_frames, "UNSERVED_SECONDS", 1.0)
        link.sendall(no_room())
        until(lambda: table.streams["client-1"]._writing == 0)
        table.streams["client-1"].close(grpc.StatusCode.ABORTED, "another one is here")
        link.settimeout(20)
        with contextlib.suppress(ConnectionError):
            while link.recv(1000):
                pass  # raises TimeoutError if the server keeps the connection


def test_a_device_that_joins_again_and_again_is_told_to_wait(net: Network) -> None:
    """Each arrival is a line of the log and wakes the run."""
    table = net.fleet._listener.table
    for _ in range(MOST_ARRIVALS):
        table.arrives("client-1")
    with pytest.raises(Refused, match="client-1 connected 20 times within 60 s; come again later"):
        table.arrives("client-1")
    net.join(0)
    net.join(1)
    assert net.fleet.wait_for(1, 30)
    until(lambda: net.fleet.device_log.events["refused"] > 0)
    assert net.fleet.present() == [0] and not net.strikes


def test_the_events_of_one_device_stay_below_what_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It uses every connection that it may have in a minute, and is refused in between with its own words."""
    log, name = DeviceLog(), "c" * 63
    monkeypatch.setattr(log, "_directory", tmp_path)
    for _ in range(MOST_ARRIVALS):
        log.here(name, 1999, MOST_IMAGES)
        log.gone(name, 1999)
    reason = refused_by_policy('"' * 2000).reason
    for _ in range(1000):
        log.refused(f"ipv6:%5B{':'.join(['2001'] * 8)}%5D:49152", name, reason, "device")
    log._refusals.sum_up()
    minute = (tmp_path / "fleet.jsonl").stat().st_size
    assert 24 * 60 * minute < 40_000_000


@pytest.mark.parametrize("enrolled", [False, True])
def test_devices_that_come_and_go_while_a_run_waits_leave_nothing(
    enrolled: bool, tmp_path: Path
) -> None:
    """No round takes what arrives then: each connection that was lost would stay in memory."""
    certificates(tmp_path, 2)
    with network(tiny(2, network={"quorum": 2}), certificates=tmp_path) as net:
        waiting = threading.Thread(target=run_rounds, args=(net.experiment,), daemon=True)
        waiting.start()
        for _ in range(5):
            if enrolled:
                client = net.enrol(1)
                client.device.stop()
                client.join(20)
            else:
                with connect(tmp_path, "client-1", net.port, first=hello()) as link:
                    assert link.recv(10)
        table = net.fleet._listener.table
        until(lambda: not table.streams)
        until(table._context.inbox.empty)
        net.experiment.stop.request()
        waiting.join(20)


@pytest.mark.parametrize(
    "peer,place",
    [
        ("ipv4:192.0.2.7:4711", ("192.0.2.7", 4711)),
        ("ipv6:%5B2001:db8::7%5D:4711", ("2001:db8::7", 4711)),
        ("ipv6:[::ffff:192.0.2.7]:4711", ("192.0.2.7", 4711)),
        ("ipv6:%5Bfe80::7%254%5D:4711", ("fe80::7", 4711)),
        ("unix:", ("unix:", 0)),
    ],
)
def test_peers_are_read_as_grpc_writes_them(peer: str, place: tuple[str, int]) -> None:
    assert where(peer) == place


def test_connections_to_other_programs_of_the_machine_are_passed_over(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as link:
        listener.bind(str(tmp_path / "log"))
        listener.listen()
        link.connect(listener.getsockname())
        assert not list(links.accepted(4711))
        links.disconnect(("192.0.2.7", 4711))


def test_streams_one_after_another_are_limited_too() -> None:
    offences: list[tuple[str, str, str]] = []
    frames = cheap_frames.CheapFrames(lambda *offence: offences.append(offence))
    frames.of("ipv4:192.0.2.7:4711").identity = "camera"
    allowed = [frames.stream_opened("ipv4:192.0.2.7:4711") for _ in range(MOST_STREAMS + 1)]
    assert allowed == [True] * MOST_STREAMS + [False]
    assert offences[0][:2] == ("192.0.2.7:4711", "camera") and len(offences) == 1


def test_the_end_of_a_stream_whose_client_is_gone_fills_no_log() -> None:
    class Call:
        def __init__(self, error: Exception) -> None:
            self.error = error

        async def abort(self, *_: object) -> None:
            raise self.error

    def end(error: Exception) -> None:
        call: Any = Call(error)
        asyncio.run(endpoint.abort(call, grpc.StatusCode.UNAVAILABLE, "late"))

    end(grpc.aio.InternalError("gone"))
    with pytest.raises(grpc.aio.AbortError):  # by which gRPC ends a call
        end(grpc.aio.AbortError("ended here"))
