"""Masses of HTTP/2 frames that cost a client nothing: it is disconnected, and the run goes on."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from semisfl.net.server import cheap_frames, endpoint
from semisfl.net.server.cheap_frames import MOST_STREAMS, where
from semisfl.net.server.penalties import STRIKES
from semisfl.runs.loop import run_rounds
from tests.net.floods import FLOODS, connect, flood
from tests.net.harness import Network, network, tiny, until
from tests.net.poisoned_grid import certificates

NEVER = 20.0


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Network]:
    certificates(tmp_path, 2)
    with network(tiny(2, network={"deadline": 2.0}), certificates=tmp_path) as net:
        yield net


def attack(net: Network, name: str) -> int:
    """Send a flood as client-1 until the server disconnects; return how many frames it took."""
    assert net.certificates is not None
    with connect(net.certificates, "client-1", net.port) as link:
        time.sleep(0.2)  # its first stream is there
        started = time.monotonic()
        sent = flood(link, FLOODS[name], NEVER)
        assert time.monotonic() - started < NEVER, "the server takes it for ever"
        return sent


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


def test_streams_beyond_the_limit_are_not_looked_at(net: Network) -> None:
    looked: list[str] = []
    trust = net.fleet._listener._trust
    assert trust is not None
    certificate_of = trust.certificate_of
    trust.certificate_of = lambda context: looked.append("") or certificate_of(context)  # type: ignore[method-assign,func-returns-value]
    attack(net, "resets")
    until(lambda: net.fleet._listener.penalties.strikes["client-1"] == 1)
    assert len(looked) <= MOST_STREAMS


def test_a_flood_of_pings_ends_the_connection(net: Network) -> None:
    assert attack(net, "pings") < 100_000


@pytest.mark.parametrize("name", ["settings", "windows"])
def test_bytes_that_are_no_messages_end_the_connection_and_count_as_a_strike(
    net: Network, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cheap_frames, "BESIDE_BYTES", 500_000)
    monkeypatch.setattr(cheap_frames, "CHECKED_AT_ONCE", 1)
    net.join(0)
    attack(net, name)
    until(lambda: net.fleet._listener.penalties.strikes["client-1"] == 1)
    run_rounds(net.experiment)
    assert not net.fleet._listener.penalties.strikes["client-0"]


def test_an_honest_device_is_far_from_the_limit(
    net: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sixteenth of it is enough, for messages that wait in buffers and the heads of frames."""
    monkeypatch.setattr(cheap_frames, "BESIDE_BYTES", 2 * 1024 * 1024)
    monkeypatch.setattr(cheap_frames, "CHECK_SECONDS", 0.01)
    net.join_all()
    run_rounds(net.experiment)
    assert not any(net.fleet._listener.penalties.strikes.values())
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


@pytest.mark.parametrize(
    "peer,place",
    [
        ("ipv4:192.0.2.7:4711", ("192.0.2.7", 4711)),
        ("ipv6:%5B2001:db8::7%5D:4711", ("2001:db8::7", 4711)),
        ("ipv6:[::ffff:192.0.2.7]:4711", ("192.0.2.7", 4711)),
        ("unix:", ("unix:", 0)),
    ],
)
def test_peers_are_read_as_grpc_writes_them(peer: str, place: tuple[str, int]) -> None:
    assert where(peer) == place


def test_streams_one_after_another_are_limited_too() -> None:
    offences: list[tuple[str, str, str]] = []
    frames = cheap_frames.CheapFrames(lambda *offence: offences.append(offence))
    frames.of("ipv4:192.0.2.7:4711").identity = "camera"
    allowed = [frames.stream_opened("ipv4:192.0.2.7:4711") for _ in range(MOST_STREAMS + 1)]
    assert allowed == [True] * MOST_STREAMS + [False]
    assert offences[0][:2] == ("192.0.2.7:4711", "camera") and len(offences) == 1
