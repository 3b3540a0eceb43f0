"""Test how connections and runs end."""

from pathlib import Path

import grpc
import pytest

from semisfl.net import chunks
from semisfl.net.client import connection
from semisfl.net.server.roster import Roster
from tests.net.harness import Proxy, network, tiny, until


def test_a_lost_connection_is_told_from_a_goodbye(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "BEAT_SECONDS", 1.0)
    with caplog.at_level("INFO", logger="semisfl"), network(tiny(3)) as net:
        proxy = Proxy(f"127.0.0.1:{net.port}")
        for client, address in ((0, None), (1, None), (2, f"127.0.0.1:{proxy.port}")):
            net.join(client, address)
        net.wait_for(3)
        net.clients[0].device.stop()
        until(lambda: "client-0 said goodbye" in caplog.text)
        net.clients[1].kill()
        until(lambda: "the connection to plaintext:client-1 was lost" in caplog.text)
        proxy.cut(for_good=True)
        until(lambda: "the connection to plaintext:client-2 was lost" in caplog.text)
    for client, other in ((0, "was lost"), (1, "said goodbye"), (2, "said goodbye")):
        lines = [line for line in caplog.text.splitlines() if f"client-{client}" in line]
        assert not [line for line in lines if other in line], lines


def test_a_client_that_was_away_when_the_run_ended_is_told_when_it_returns() -> None:
    with network(tiny(2)) as net:
        proxy = Proxy(f"127.0.0.1:{net.port}")
        net.enrol(0)
        client = net.enrol(1, f"127.0.0.1:{proxy.port}")
        proxy.cut()
        until(lambda: net.fleet.present() == [0])
        net.fleet.close(finished=True)
        client.join(30)
        assert not client.is_alive() and client.error is None
        assert client.link.over.is_set()
        proxy.close()


def test_an_enrolment_that_the_disk_refuses_is_none(tmp_path: Path) -> None:
    roster = Roster(2)
    roster.keep_in(tmp_path / "not there" / "roster.json")
    with pytest.raises(OSError):
        roster.enrol("a", 5)
    assert not roster.index and not roster.images
    (tmp_path / "not there").mkdir()
    assert roster.enrol("b", 7) == 0 and roster.enrol("a", 5) == 1


def test_a_device_waits_longer_each_time_until_it_has_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A server whose disk takes nothing welcomes its devices and cannot enrol them."""
    monkeypatch.setattr(connection, "FIRST_DELAY", 0.001)
    with network(tiny(1)) as net:
        net.fleet.roster.keep_in(tmp_path / "full" / "roster.json")
        link = net.join(0).link
        until(lambda: link._failures >= 3)
        assert link.losses >= 3, "it was welcomed each time"
        assert "(the server cannot write what it has to keep: No such file or dir" in caplog.text
        (tmp_path / "full").mkdir()
        until(lambda: link._current is not None and link._current.enrolled)
        net.fleet.sessions.enrolled[0].close(grpc.StatusCode.UNAVAILABLE, "lost")
        until(lambda: link._failures == 1)


def test_a_proxy_of_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    with network(tiny(1)) as net:
        net.enrol(0)
