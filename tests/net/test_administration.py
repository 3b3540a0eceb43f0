"""A fleet is administered: places are freed, devices listed and removed, and it may grow at a resume."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from semisfl.cli.main import main
from semisfl.files import read_json
from semisfl.net.client.rejection import Rejected
from semisfl.net.messages import REVOKED
from semisfl.net.server.roster import REMOVED, Roster, remove_device
from semisfl.net.server.sessions import STRIKES
from semisfl.net.terms import Terms
from semisfl.net.tls import certs
from semisfl.runs.directory import RunDirectory
from semisfl.runs.loop import run_rounds
from tests.net.harness import Client, Network, certificates, network, tiny, until


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


def remove(net: Network, directory: RunDirectory, name: str) -> None:
    """Remove a device as the operator does; the server looks before each round."""
    remove_device(directory.path, name)
    net.fleet.sessions.review()


def listed(directory: RunDirectory) -> int:
    """How many devices the status file has."""
    return len(read_json(directory.path / "fleet.json").get("clients", []))


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
        net.fleet.device_log.renew()
        until(lambda: listed(directory) == 2)
        assert main(["fleet", run, "remove", "plaintext:client-0"]) == 0
        net.fleet.wait_ready()
        net.clients[0].join(30)
        assert "removed by the operator" in str(net.clients[0].error)
        third = net.clients[0] = Client(net.address, net.data.images[:12], "third")
        net.wait_for(2)
        assert net.fleet.roster.index["plaintext:third"] == place
        again = Client(net.address, net.data.images[:12], "client-0")
        again.join(30)
        assert "removed by the operator" in str(again.error)
        run_rounds(net.experiment, directory)
        net.fleet.device_log.renew()
        until(lambda: "plaintext:third" in (directory.path / "fleet.json").read_text())
        capsys.readouterr()
        assert main(["fleet", run, "list"]) == 0
        output = capsys.readouterr().out
        assert "plaintext:third" in output and "2 here, 2 of 2 places taken" in output
        assert main(["fleet", run, "list", "--json"]) == 0
        assert len(json.loads(capsys.readouterr().out)["clients"]) == 2
        assert main(["fleet", run, "remove", "nobody"]) == 2
        assert "'nobody' has no place" in capsys.readouterr().err
    assert ("removed", "plaintext:client-0") in events(directory)
    assert (directory.path / REMOVED).read_text() == "plaintext:client-0\n"
    restarted = Roster(2)
    restarted.keep_in(directory.path / "roster.json")
    assert restarted.index == {"plaintext:third": place, "plaintext:client-1": 1 - place}


def test_a_device_is_not_shown_with_the_bytes_or_rounds_of_the_one_that_it_replaced(
    tmp_path: Path,
) -> None:
    def shown(net: Network) -> dict[str, int]:
        listed = net.fleet.status()["clients"]
        return {one["name"]: one["bytes_up"] + one["bytes_down"] for one in listed}

    with administered(tmp_path / "run", config={"rounds": 4}) as (net, directory):
        net.join_all()
        net.experiment.method.round(0)
        net.fleet.settle(good=True)
        first = shown(net)
        assert all(first.values()) and sum(first.values()) == net.fleet.traffic.total()
        remove(net, directory, "plaintext:client-0")
        net.clients[0].join(30)
        net.clients[0] = Client(net.address, net.data.images[:12], "third")
        net.wait_for(2)
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
        remove(net, directory, "plaintext:third")
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
                remove(net, directory, "plaintext:client-0")
                net.clients[2] = Client(net.address, net.data.images[:12], "third")
                until(lambda: "plaintext:third" in net.fleet.roster.index)
                until(lambda: len(net.fleet.present()) == 2)

        def hold(client: Client, frame: Any) -> None:
            """Answer no step after the first: the removal comes before its answer."""
            if frame.kind == "gradients":
                until(lambda: "plaintext:client-0" not in net.fleet.roster.index)

        net.join(0, break_at=hold)
        net.wait_for(1)
        net.join(1, break_at=replace)
        net.wait_for(2)
        rounds = run_rounds(net.experiment, directory).rounds
        assert replaced and [metrics["contributing"] for metrics in rounds] == [1, 2]


def test_a_revoked_device_leaves_its_place_also_when_it_is_away(tmp_path: Path) -> None:
    place = certificates(tmp_path / "authority", 2, "new")
    with administered(tmp_path / "run", certificates=place) as (net, directory):
        net.join_all()
        net.clients[0].device.stop()
        net.clients[0].join(30)
        certs.revoke(place, "client-0")
        new = certs.load_client_credentials(place, "new")
        net.clients[2] = Client(net.address, net.data.images[:12], "new", credentials=new)
        net.wait_for(2)
        assert set(net.fleet.roster.index) == {"client-1", "new"}
        ends = {entry.name: entry.valid_until for entry in certs.listing(place)}
        listed = net.fleet.status()["clients"]
        until = {one["name"]: one["certificate_until"] for one in listed}
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
    with administered(tmp_path / "run", 3) as (net, directory):
        for name in ("stays", "removed", "breaches"):
            net.fleet.roster.enrol(name, 12)
        assert set(net.fleet.members()) == {0, 1, 2}, "absent ones may come back"
        penalties = net.fleet.sessions
        remove(net, directory, "removed")
        for _ in range(STRIKES):
            penalties.breach("?", "breaches", "nonsense")
        assert set(net.fleet.members()) == {0}


def test_an_old_revoked_certificate_does_not_free_its_devices_place(tmp_path: Path) -> None:
    """An attacker who found it knocks; the device has a renewed one."""
    place = certificates(tmp_path / "authority", 1)
    old = certs.load_client_credentials(place, "client-0")
    stolen = replace(old, path=None)  # with the path, it would read the renewed one and show that
    serial = certs.listing(place)[-1].serial
    certs.renew_client(place, "client-0")
    with administered(tmp_path / "run", 1, certificates=place) as (net, _):
        net.join(0)
        net.wait_for(1)
        certs.revoke_serial(place, f"{serial:x}")
        thief = Client(net.address, net.data.images[:12], "thief", credentials=stolen)
        thief.join(30)
        assert REVOKED in str(thief.error)
        net.fleet.wait_ready()
        assert net.fleet.present() == [0] and "client-0" in net.fleet.roster.index
        assert net.clients[0].link.losses == 0, "the device was never disconnected"


# --- at a resume ----------------------------------------------------------------------------------


def test_a_fleet_may_grow_at_a_resume(tmp_path: Path) -> None:
    config = tiny(2)
    directory = RunDirectory.create(tmp_path / "run", config.in_fleet("network"))
    changes = ["clients.total=4", "clients.active=3", "network.quorum=2", "network.deadline=9"]
    directory.keep_config(directory.changed(changes))
    now = RunDirectory.open(directory.path).config()
    assert (now.clients.total, now.clients.active) == (4, 3)
    assert (now.network.quorum, now.network.deadline) == (2, 9.0)
    # Limits stay on the server, so devices go on with the terms that they accepted.
    limited = directory.changed(["robust.aggregate=clipped_mean", "robust.clipped_mean.limit=2"])
    assert limited.robust.of_rule.limit == 2  # type: ignore[attr-defined]
    about: tuple[Any, ...] = ((1, 28, 28), 10, (0.5,), (0.5,))
    assert Terms(limited, *about).digest == Terms(now, *about).digest
    for refused in ("clients.batch=8", "model.name=vgg13"):
        with pytest.raises(ValueError, match=r"what can be changed is .*clients\.total"):
            directory.changed([refused])
    simulated = RunDirectory.create(tmp_path / "simulated", config)
    with pytest.raises(ValueError, match="--resume continues a run as it was set up"):
        simulated.changed(["clients.total=4"])


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
        net.wait_for(2)
        net.fleet.waiting._settled = True
        assert len(run_rounds(net.experiment, first=2).rounds) == 2
        assert all(client.error is None for client in net.clients.values())
