"""Test how long a server waits for a client: as long as its answer makes progress, up to a limit."""

import threading
import time
from collections.abc import Callable

import pytest

from semisfl.net import chunks
from semisfl.net.client.full_round import OnRequest
from semisfl.net.frames import Frame
from semisfl.runs.loop import run_rounds
from semisfl.settings.run import NetworkConfig
from tests.net.harness import Client, Proxy, audited, network, tiny

AT_MOST = 25.0
"""Seconds after which a misbehaving client of these tests gives up, so that a server that waits for
it for ever fails a test instead of hanging it."""


def stalling(over: threading.Event) -> Callable:
    """Never answers the question that begins a round."""

    def at(client: Client, frame: Frame) -> None:
        if frame.kind in ("split", "full"):
            until_then = time.monotonic() + AT_MOST
            while not over.is_set() and time.monotonic() < until_then:
                time.sleep(0.05)

    return at


@pytest.mark.parametrize("method", ["semisfl", "fedswitch"])
def test_answering_heartbeats_is_no_progress(
    method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The deadline is many heartbeats long, as it is by default."""
    monkeypatch.setattr(chunks, "BEAT_SECONDS", 0.1)
    config, over = tiny(2, method=method, rounds=1, network={"deadline": 2.0}), threading.Event()
    with network(config) as net:
        net.enrol(0, break_at=stalling(over))
        net.enrol(1)
        run_rounds(net.experiment)
        over.set()
        assert time.time() - net.fleet.sessions.enrolled[0].seen < 1, "heartbeats were answered"
        assert {client for _, way, client in net.fleet.traffic.counts if way == "up"} == {1}
    left_out = "client-0 is left out of this round: no progress for network.deadline = 2 s"
    assert left_out in caplog.text


def test_a_state_is_fetched_at_most_once_a_round(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Client 1 downloads the teacher over and over."""
    original = OnRequest.__getitem__

    def greedy(self: OnRequest, name: str) -> dict:
        state = original(self, name)
        for _ in range(3 if self._full_round._device.member.client == 1 else 0):
            original(self, name)
        return state

    monkeypatch.setattr(OnRequest, "__getitem__", greedy)
    config = tiny(3, method="fedswitch", rounds=1, fedswitch={"iid_threshold": 10.0})
    with network(config) as net:
        net.join_all()
        run_rounds(net.experiment)
        downloads = {
            c: n for (kind, _, c), n in net.fleet.traffic.counts.items() if kind == "teacher"
        }
        assert downloads[1] == downloads[0] == downloads[2]
        assert {client for _, way, client in net.fleet.traffic.counts if way == "up"} == {0, 2}
    (line,) = audited(caplog)
    assert "fetch" in line and "not expected" in line


# --- slow links -----------------------------------------------------------------------------------

SCALE = 10
"""Chunks are smaller and the times shorter than in a real run; the number of chunks per time is the same."""
CHUNK = 16 * 1024
MEGABIT = 1e6 / 8


def scaled(monkeypatch: pytest.MonkeyPatch, rate: float) -> float:
    """Bytes a second at which a small chunk takes, in scaled time, what a real one does at ``rate``."""
    slower = CHUNK / chunks.CHUNK * SCALE
    for name in ("BEAT_SECONDS", "SILENCE_SECONDS"):
        monkeypatch.setattr(chunks, name, getattr(chunks, name) / SCALE)
    monkeypatch.setattr(chunks, "LOWEST_RATE", chunks.LOWEST_RATE * slower)
    monkeypatch.setattr(chunks, "CHUNK", CHUNK)
    return rate * slower


@pytest.mark.parametrize(
    "rate, bottom, features",
    [
        # As many chunks as the features of the image100 preset have, 6.6 MB; in the first case
        # they are the first long frame, so that no heartbeat was ever answered before.
        pytest.param(0.8 * MEGABIT, 1, 13, id="0.8 Mbit/s, light model"),
        pytest.param(0.8 * MEGABIT, 6, 13, id="0.8 Mbit/s, heavy model", marks=pytest.mark.slow),
        pytest.param(chunks.LOWEST_RATE, 3, 6, id="the lowest rate", marks=pytest.mark.slow),
    ],
)
def test_a_slow_link_keeps_its_place(
    rate: float, bottom: int, features: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Down come two bottoms and gradients, up go features and a bottom; a heavy model's frames all
    take longer than the silence that is borne, so longer than a heartbeat's answer may be away."""
    width = bottom * CHUNK // (4 * 256)

    layers = [
        {"kind": "flatten"},
        {"kind": "linear", "features": width},
        {"kind": "relu"},
        {"kind": "linear"},
    ]
    batch = features * CHUNK // (8 * width)
    config = tiny(
        1,
        rounds=1,
        model={"layers": layers, "cut": 3},
        clients={"batch": batch, "steps": 1},
        network={"deadline": NetworkConfig().deadline / SCALE},
    )
    slow = scaled(monkeypatch, rate)
    assert features / 2 * CHUNK / slow > chunks.SILENCE_SECONDS, "too short to show anything"
    with network(config) as net:
        proxy = Proxy(f"127.0.0.1:{net.port}", rate=slow)
        client = net.enrol(0, f"127.0.0.1:{proxy.port}")
        run_rounds(net.experiment)
        assert client.device.rounds == 1 and client.link.losses == 0
        assert net.fleet.traffic.by_kind()["model_up"] > 0
        proxy.close()


def test_the_lowest_rate_is_documented_and_leaves_room() -> None:
    """A chunk at the lowest rate is heard of well before anybody is taken for gone or left out."""
    chunk_seconds = chunks.CHUNK / chunks.LOWEST_RATE
    assert 2 * chunk_seconds < chunks.SILENCE_SECONDS < NetworkConfig().deadline
    with open("docs/deploy.md", encoding="utf-8") as page:
        assert f"{chunks.LOWEST_RATE * 8 / 1e6:g} Mbit/s" in page.read()
