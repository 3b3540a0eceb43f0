"""A running server is administered by its own user: places are freed, rounds paused, the run drained."""

import json
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from semisfl.cli.main import main
from semisfl.fleet.base import SplitRound
from semisfl.net.client.rejection import Rejected
from semisfl.net.frames import encode
from semisfl.net.messages import REVOKED
from semisfl.net.server import administration
from semisfl.net.server.administration import SOCKET, ask
from semisfl.net.server.penalties import STRIKES
from semisfl.net.server.roster import Roster
from semisfl.net.terms import Terms
from semisfl.net.tls import certs
from semisfl.runs.directory import RunDirectory
from semisfl.runs.loop import run_rounds
from semisfl.runs.reading import read_rounds
from semisfl.runs.result import Result
from tests.net.harness import Client, Network, certificates, network, on_loop, tiny, until


@contextmanager
def administered(path: Path, count: int = 2, **how: Any) -> Iterator[tuple[Network, RunDirectory]]:
    """A server with a directory; every place is free."""
    config = tiny(count, **how.pop("config", {}))
    directory = RunDirectory.create(path, config)
    with network(config, **how) as net:
        net.fleet.roster.load_state_dict({"index": {}, "images": {}})
        net.fleet.open(directory.path)
        yield net, directory


def events(directory: RunDirectory) -> list[tuple[str, str]]:
    lines = (directory.path / "fleet.jsonl").read_text().splitlines()
    return [(line["event"], line["name"]) for line in map(json.loads, lines)]


def in_background(act: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


def test_a_removed_device_leaves_its_place_to_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with administered(tmp_path / "run") as (net, directory):
        net.join_all()
        place = net.fleet.roster.index["plaintext:client-0"]
        third = Client(net.address, net.data.images[:12], "third")
        third.join(30)
        assert isinstance(third.error, Rejected)
        assert "semisfl fleet RUN remove NAME" in str(third.error)
        run = str(directory.path)
        assert main(["fleet", run, "remove", "plaintext:client-0"]) == 0
        net.clients[0].join(30)
        assert "removed by the operator" in str(net.clients[0].error)
        third = net.clients[0] = Client(net.address, net.data.images[:12], "third")
        assert net.fleet.wait_for(2, 30)
        assert net.fleet.roster.index["plaintext:third"] == place
        again = Client(net.address, net.data.images[:12], "client-0")
        again.join(30)
        assert "removed by the operator" in str(again.error), "not while this server runs"
        capsys.readouterr()
        assert main(["fleet", run, "list"]) == 0
        output = capsys.readouterr().out
        assert "plaintext:third" in output and "2 here, 2 of 2 places taken" in output
        assert main(["fleet", run, "list", "--json"]) == 0
        assert len(json.loads(capsys.readouterr().out)["clients"]) == 2
        run_rounds(net.experiment, directory)
        assert main(["fleet", run, "remove", "nobody"]) == 2
        assert "'nobody' has no place" in capsys.readouterr().err
    assert ("removed", "plaintext:client-0") in events(directory)
    restarted = Roster(2)
    restarted.keep_in(directory.path / "roster.json")
    assert restarted.index == {"plaintext:third": place, "plaintext:client-1": 1 - place}


def test_a_device_is_not_shown_with_the_bytes_or_rounds_of_the_one_that_it_replaced(
    tmp_path: Path,
) -> None:
    def shown(net: Network) -> dict[str, int]:
        listed = net.fleet.devices()
        return {device.name: device.bytes_up + device.bytes_down for device in listed}

    with administered(tmp_path / "run", config={"rounds": 4}) as (net, directory):
        net.join_all()
        net.experiment.method.round(0)
        net.fleet.settle(good=True)
        first = shown(net)
        assert all(first.values()) and sum(first.values()) == net.fleet.traffic.total()
        ask(directory.path, "remove", "plaintext:client-0")
        net.clients[0].join(30)
        net.clients[0] = Client(net.address, net.data.images[:12], "third")
        assert net.fleet.wait_for(2, 30)
        assert shown(net) == {
            "plaintext:client-1": first["plaintext:client-1"],
            "plaintext:third": 0,
        }
        net.experiment.method.round(1)
        net.fleet.settle(good=True)
        now = shown(net)
        assert 0 < now["plaintext:third"] <= now["plaintext:client-1"] / 2
        port, before = net.port, net.experiment.state_dict()
        net.fleet.close(finished=False)
        net.start_server(port)
        net.experiment.load_state_dict(before)
        net.fleet.open(directory.path)
        assert shown(net) == now, "also after a restart of the server"
        ask(directory.path, "remove", "plaintext:third")
    lines = map(json.loads, (directory.path / "fleet.jsonl").read_text().splitlines())
    # The page counts the rounds of the next one in the place from here.
    assert [line["round"] for line in lines if line["event"] == "removed"] == [0, 1]


def test_a_device_may_be_removed_in_the_middle_of_a_round(tmp_path: Path) -> None:
    """The device that takes its place meanwhile is not asked for its answers."""
    with administered(tmp_path / "run") as (net, directory):
        replaced: list[Client] = []

        def replace(client: Client, frame: Any) -> None:
            if frame.kind == "gradients" and not replaced:
                replaced.append(client)
                ask(directory.path, "remove", "plaintext:client-0")
                net.clients[2] = Client(net.address, net.data.images[:12], "third")
                until(lambda: "plaintext:third" in net.fleet.roster.index)
                until(lambda: len(net.fleet.present()) == 2)

        def hold(client: Client, frame: Any) -> None:
            """Answer no step after the first: the removal comes before its answer."""
            if frame.kind == "gradients":
                until(lambda: "plaintext:client-0" not in net.fleet.roster.index)

        net.join(0, break_at=hold)
        assert net.fleet.wait_for(1, 30)
        net.join(1, break_at=replace)
        assert net.fleet.wait_for(2, 30)
        rounds = run_rounds(net.experiment, directory).rounds
        assert replaced and [metrics["contributing"] for metrics in rounds] == [1, 2]


def test_pause_resume_and_drain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with administered(tmp_path / "run", config={"rounds": 1000}) as (net, directory):
        net.join_all()
        results: list[Result] = []
        training = in_background(lambda: results.append(run_rounds(net.experiment, directory)))
        until(lambda: len(read_rounds(directory.path, dict)) >= 1)
        ask(directory.path, "pause")
        until(lambda: net.fleet.waiting.state == "paused by the operator (2 devices here)")
        done = len(read_rounds(directory.path, dict))
        assert ask(directory.path, "list")["waiting"].startswith("paused")
        until(lambda: '"waiting": "paused' in (directory.path / "fleet.json").read_text())
        assert len(read_rounds(directory.path, dict)) == done
        ask(directory.path, "resume")
        until(lambda: len(read_rounds(directory.path, dict)) > done)
        assert main(["fleet", str(directory.path), "drain"]) == 0
        again = f"`semisfl serve --resume {directory.path} --labeled DIR` goes on"
        assert again in capsys.readouterr().out
        training.join(30)
        (result,) = results
        assert result.stopped and len(result.rounds) < 1000
        assert directory.load()["round"] == len(result.rounds), "its last round is complete"
    logged = [event for event, name in events(directory) if name == "fleet"]
    assert logged == ["paused", "resumed", "draining"]


def test_a_revoked_device_leaves_its_place_also_when_it_is_away(tmp_path: Path) -> None:
    place = certificates(tmp_path / "authority", 2, "new")
    with administered(tmp_path / "run", certificates=place) as (net, directory):
        net.join_all()
        net.clients[0].device.stop()
        net.clients[0].join(30)
        certs.revoke(place, "client-0")
        new = certs.load_client_credentials(place, "new")
        net.clients[2] = Client(net.address, net.data.images[:12], "new", credentials=new)
        assert net.fleet.wait_for(2, 30)
        assert set(net.fleet.roster.index) == {"client-1", "new"}
        ends = {entry.name: entry.valid_until for entry in certs.listing(place)}
        until = {device.name: device.certificate_until for device in net.fleet.devices()}
        assert until == {
            name: f"{ends[name]:%Y-%m-%dT%H:%M:%SZ}" for name in ("client-1", "new")
        }, "the page counts the days left"
        # Connected, and revoked: its place is free before the next round.
        certs.revoke(place, "client-1")
        net.fleet.wait_ready()
        assert set(net.fleet.roster.index) == {"new"}
    assert ("removed", "client-0") in events(directory)
    assert ("removed", "client-1") in events(directory)


def test_a_removed_and_a_quarantined_device_do_not_belong_to_the_run(tmp_path: Path) -> None:
    with administered(tmp_path / "run", 3) as (net, _):
        for name in ("stays", "removed", "breaches"):
            net.fleet.roster.enrol(name, 12)
        assert set(net.fleet.members()) == {0, 1, 2}, "absent ones may come back"
        penalties = net.fleet._listener.penalties
        penalties.remove("removed")
        for _ in range(STRIKES):
            penalties.breach("?", "breaches", "nonsense")
        assert set(net.fleet.members()) == {0}


def test_a_device_that_is_removed_just_before_it_is_ready_does_not_take_its_place_back(
    tmp_path: Path,
) -> None:
    """It came back to its place; its answer is read before the loop gets to close its connection."""
    loads = threading.Event()
    with administered(tmp_path / "run", 1) as (net, _):
        net.fleet.roster.enrol("plaintext:client-0", 12)
        images = net.data.images[:12]

        def load(_: Any) -> tuple[Any, int]:
            loads.wait(10)
            return images, 0

        net.join(0, load=load)
        table = net.fleet._listener.table
        until(lambda: "plaintext:client-0" in table.streams)
        session = table.streams["plaintext:client-0"]
        digest = net.fleet._schemas.digest
        ready = encode("ready", {"model": digest, "images": 12, "skipped": 0}, {})

        async def removed_then_ready() -> None:
            net.fleet._listener.penalties.remove("plaintext:client-0")
            table._arrived(session, 1, bytearray(b"".join(ready)))

        on_loop(removed_then_ready())
        loads.set()
        assert not net.fleet.roster.index and not net.fleet.present()


def test_an_old_revoked_certificate_does_not_free_its_devices_place(tmp_path: Path) -> None:
    """An attacker who found it knocks; the device has a renewed one."""
    place = certificates(tmp_path / "authority", 1)
    old = certs.load_client_credentials(place, "client-0")
    stolen = replace(old, path=None)  # with the path, it would read the renewed one and show that
    serial = certs.listing(place)[-1].serial
    certs.renew_client(place, "client-0")
    with administered(tmp_path / "run", 1, certificates=place) as (net, _):
        net.join(0)
        assert net.fleet.wait_for(1, 30)
        certs.revoke_serial(place, f"{serial:x}")
        thief = Client(net.address, net.data.images[:12], "thief", credentials=stolen)
        thief.join(30)
        assert REVOKED in str(thief.error)
        net.fleet.wait_ready()
        assert net.fleet.present() == [0] and "client-0" in net.fleet.roster.index
        assert net.clients[0].link.losses == 0, "the device was never disconnected"


# --- who may ask ----------------------------------------------------------------------------------


def test_only_the_same_user_may_ask(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Even if somebody has opened the socket to all: the kernel says whose connection it is."""
    with administered(tmp_path / "run") as (net, directory):
        path = directory.path / SOCKET
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        if os.geteuid() != 0:
            pytest.skip("only root can become another user for this test")
        path.chmod(0o666)
        for folder in (directory.path, *directory.path.parents):
            folder.chmod(folder.stat().st_mode | 0o555)
        read, write = os.pipe()
        if not (child := os.fork()):
            try:
                os.chdir(directory.path)
                os.setuid(65534)
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
                    link.connect(SOCKET)
                    link.sendall(b'{"action": "drain"}\n')
                    os.write(write, link.recv(999))
            except BaseException as error:
                os.write(write, str(error).encode())
            os._exit(0)
        os.waitpid(child, 0)
        assert b"user 65534 does not run this server" in os.read(read, 999)
        assert not net.fleet.waiting.draining
    assert not path.exists(), "removed at the end"


def test_another_user_cannot_answer_in_the_server_s_place(tmp_path: Path) -> None:
    """Where others may write to the run's folder, one of them could replace the socket."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user for this test")
    (tmp_path / "config.toml").touch()
    tmp_path.chmod(0o777)
    for folder in tmp_path.parents:
        folder.chmod(folder.stat().st_mode | 0o555)
    read, write = os.pipe()
    if not (child := os.fork()):
        try:
            os.setuid(65534)
            os.chdir(tmp_path)
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
                listener.bind(SOCKET)
                listener.listen()
                os.write(write, b"!")
                link, _ = listener.accept()
                link.sendall(b'{"draining": true}\n')
                link.recv(1000)
        finally:
            os._exit(0)
    assert os.read(read, 1) == b"!"
    with pytest.raises(ValueError, match=r"user 65534 answers .*, who did not start this command"):
        ask(tmp_path, "drain")
    os.waitpid(child, 0)


@pytest.mark.parametrize(
    "line", [b"", b"\n", b"[]\n", b'{"action": "explode"}\n', b"\xff\n", b"x" * 100_000 + b"\n"]
)
def test_nonsense_harms_nothing(line: bytes, tmp_path: Path) -> None:
    with administered(tmp_path / "run") as (_, directory):
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(str(directory.path / SOCKET))
            link.sendall(line)
            link.shutdown(socket.SHUT_WR)
            link.settimeout(20)
            assert link.recv(1000) == b""
        assert ask(directory.path, "list")["total"] == 2


def test_without_a_server_it_says_how_to_start_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = RunDirectory.create(tmp_path / "run", tiny(1))
    assert main(["fleet", str(tmp_path), "list"]) == 2
    assert "holds no run" in capsys.readouterr().err
    for _ in range(2):  # also where a killed server left its socket
        assert main(["fleet", str(directory.path), "drain"]) == 2
        assert "a run of devices goes on with `semisfl serve --resume" in capsys.readouterr().err
        with socket.socket(socket.AF_UNIX) as left:
            if not (directory.path / SOCKET).exists():
                left.bind(str(directory.path / SOCKET))
    assert main(["fleet", str(directory.path), "remove"]) == 2
    assert "remove needs the NAME" in capsys.readouterr().err


def test_a_server_that_does_not_answer_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process may be stopped."""
    (tmp_path / "config.toml").touch()
    monkeypatch.setattr(administration, "SECONDS", 0.1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / SOCKET))
        listener.listen()
        with pytest.raises(ValueError, match=r"did not answer within 0.1 s; is its process"):
            ask(tmp_path, "list")


def test_a_long_path_has_a_socket_too(tmp_path: Path) -> None:
    deep = tmp_path / ("long" * 20) / ("name" * 20) / "run"
    with administered(deep) as (_, directory):
        assert ask(directory.path, "list")["clients"] == []


# --- at a resume ----------------------------------------------------------------------------------


def test_a_server_that_ends_before_it_answers_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.toml").touch()
    monkeypatch.chdir(tmp_path)  # the address of a socket may have 107 bytes at most
    for reads in (False, True):  # with unread bytes the connection is reset, else only closed
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
            door.bind(SOCKET)
            door.listen()

            def end(reads: bool = reads, door: socket.socket = door) -> None:
                link, _ = door.accept()
                link.recv(1000 if reads else 1)
                link.close()

            server = threading.Thread(target=end)
            server.start()
            with pytest.raises(ValueError, match=r"ended before it answered; look at .*run\.log"):
                ask(tmp_path, "list")
            server.join()
        Path(SOCKET).unlink()


def test_a_fleet_may_grow_at_a_resume(tmp_path: Path) -> None:
    config = tiny(2)
    directory = RunDirectory.create(tmp_path / "run", config.in_fleet("network"))
    changes = ["clients.total=4", "clients.active=3", "network.quorum=2", "network.deadline=9"]
    directory.keep_config(directory.changed(changes))
    now = RunDirectory.open(directory.path).config()
    assert (now.clients.total, now.clients.active) == (4, 3)
    assert (now.network.quorum, now.network.deadline) == (2, 9.0)
    for refused in ("clients.batch=8", "model.name=vgg13"):
        with pytest.raises(ValueError, match=r"what can be changed is .*clients\.total"):
            directory.changed([refused])
    simulated = RunDirectory.create(tmp_path / "simulated", config)
    with pytest.raises(ValueError, match="--resume continues a run as it was set up"):
        simulated.changed(["clients.total=4"])


def test_a_fleet_that_grows_may_get_limits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They stay on the server, so devices go on with the terms that they accepted."""
    config = tiny(2).in_fleet("network")
    directory = RunDirectory.create(tmp_path / "run", config)
    limits = ["robust.aggregate=clipped_mean", "robust.clipped_mean.limit=2"]
    now = directory.changed(limits)
    assert now.robust.of_rule.limit == 2  # type: ignore[attr-defined]
    about: tuple[Any, ...] = ((1, 28, 28), 10, (0.5,), (0.5,))
    assert Terms(now, *about).digest == Terms(config, *about).digest
    directory.keep_config(now)
    directory.keep_config(directory.changed(["robust.aggregate=median"]))
    assert directory.config().robust.aggregate == "median"
    simulated = RunDirectory.create(tmp_path / "simulated", tiny(2))
    with pytest.raises(ValueError, match="--resume continues a run as it was set up"):
        simulated.changed(limits)


def test_devices_go_on_with_a_server_that_has_more_places(tmp_path: Path) -> None:
    """They wait for the run that they know, and a larger fleet is the same run."""
    with administered(tmp_path / "run", config={"rounds": 4, "semisfl": {"align": "client"}}) as (
        net,
        _,
    ):
        net.join_all()
        for index in range(2):
            net.experiment.method.round(index)
        port, before = net.port, net.experiment.state_dict()
        net.fleet.close(finished=False)
        clients = net.config.clients.model_copy(update={"total": 5, "active": 3})
        net.config = net.config.model_copy(update={"clients": clients})
        net.start_server(port)
        net.experiment.load_state_dict(before)
        assert net.fleet.wait_for(2, 20), "nobody had to be restarted"
        net.fleet.waiting._settled = True
        assert len(run_rounds(net.experiment, first=2).rounds) == 2
        assert all(client.error is None for client in net.clients.values())


def test_who_takes_a_place_in_a_round_is_not_blamed_for_who_had_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with network(tiny(3)) as net:
        net.join_all()
        removed, fleet = "plaintext:client-0", net.fleet
        bottom = net.experiment.method.student.bottom.state_dict()
        fleet.start_round(SplitRound(0, (0, 1, 2), 2, 0.02, bottom, bottom))
        fleet._listener.penalties.remove(removed)
        newcomer = Client(net.address, net.data.images[:4], "newcomer")
        until(lambda: fleet.roster.index.get("plaintext:newcomer") == 0)
        fleet.forward()
        assert f"{removed} is left out of this round" in caplog.text
        monkeypatch.setattr(fleet._questions.size_checks, "suspect", lambda others: 0)
        assert fleet.settle(False) == removed
        assert fleet.present() == [0, 1, 2], "the newcomer is not on trial"
        fleet.settle(True)
        assert net.strikes == {removed: 1}
        newcomer.device.stop()
