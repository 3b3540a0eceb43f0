"""Test the files about a run's devices."""

import json
import logging
from pathlib import Path

import pytest

from semisfl.net.server.device_log import DeviceLog
from semisfl.runs.loop import run_rounds
from tests.disk import largest_file
from tests.net.harness import Client, network, tiny, until
from tests.net.test_faults import dying


def test_devices_that_come_go_are_left_out_and_refused(tmp_path: Path) -> None:
    with network(tiny(3)) as net:
        net.fleet.device_log.open(tmp_path, net.fleet.status)
        for client in range(3):
            net.join(client, break_at=dying("broadcast", 1, 0) if client == 2 else None)
        net.wait_for(3)
        stranger = Client(net.address, net.data.images[:4], "stranger")
        until(lambda: net.fleet.device_log.events["refused"] == 1)
        run_rounds(net.experiment)
        stranger.device.stop()
        moved = net.fleet.traffic.by_client()
        assert sum(map(sum, moved.values())) == net.fleet.traffic.total()
        here = [one["client"] for one in net.fleet.status()["clients"] if "since" in one]
        assert here == [0, 1]
    events = [json.loads(line) for line in (tmp_path / "fleet.jsonl").read_text().splitlines()]
    of = {
        kind: [row for row in events if row["event"] == kind]
        for kind in net.fleet.device_log.events
    }
    assert {(row["name"], row["client"], row["images"]) for row in of["here"]} == {
        (f"plaintext:client-{client}", client, 12) for client in range(3)
    }
    (refused,) = of["refused"]
    assert refused["name"] == "plaintext:stranger" and "client" not in refused
    assert refused["peer"].startswith("ipv4:127.0.0.1:")
    assert refused["reason"].startswith("all clients.total = 3 places are taken")
    (left_out,) = of["left_out"]
    assert (left_out["client"], left_out["reason"]) == (2, "its connection was lost")
    assert of["gone"][0]["client"] == 2
    devices = json.loads((tmp_path / "fleet.json").read_text())["clients"]
    assert [(row["bytes_up"], row["bytes_down"]) for row in devices] == [
        moved[client] for client in range(3)
    ]
    assert all("seen" in row and "since" not in row for row in devices), "nobody is here any more"


def test_a_disk_that_refuses_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("semisfl"), "propagate", True)
    device_log = DeviceLog()
    device_log.open(tmp_path, lambda: {"clients": []})
    with largest_file(10):
        for _ in range(3):
            device_log.note("here", "camera", client=0)
        device_log.close()
    warnings = [record.getMessage() for record in caplog.records]
    assert [line for line in warnings if "cannot write the devices' events" in line] == warnings[:1]
    device_log.note("here", "camera", client=0)
    assert list(tmp_path.iterdir()) == [tmp_path / "fleet.jsonl"]
    assert (tmp_path / "fleet.jsonl").read_text() == "", (
        "nothing half written, nothing after the end"
    )
