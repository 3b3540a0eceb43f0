"""Run directories read as they grow: every row once, every state told apart, nothing disturbed."""

import json
import os
from pathlib import Path

import numpy as np

from semisfl.data import holdings
from semisfl.data.partition import Partition
from semisfl.metrics import RoundMetrics
from semisfl.runs.directory import RunDirectory
from semisfl.watch.follow import Followed
from semisfl.watch.views import Runs
from tests import toy
from tests.watch import directories


def begun(path: Path, *settings: str) -> RunDirectory:
    directory = RunDirectory.create(path, toy.values("semisfl", "rounds=4", *settings))
    directory.record.write(RoundMetrics(round=0, accuracy=40.0, bytes_total=10, seconds=1.0))
    return directory


def columns(runs: Runs, key: str, epoch: int = 0, count: int = 0) -> tuple[int, int, list[int]]:
    answer = runs.rounds({key: (epoch, count)})["runs"][key]
    return answer["epoch"], answer["first"], answer["columns"]["round"]


def test_only_new_rounds_are_told_and_a_resumed_run_begins_anew(tmp_path: Path) -> None:
    directory = begun(tmp_path / "run")
    runs = Runs([tmp_path])
    (run,) = runs.listing()["runs"]
    epoch, first, rounds = columns(runs, run["id"])
    assert (first, rounds) == (0, [0])
    assert columns(runs, run["id"], epoch, 1) == (epoch, 1, [])
    directory.record.write(RoundMetrics(round=1, accuracy=50.0, impurity=0.25))
    assert columns(runs, run["id"], epoch, 1) == (epoch, 1, [1])
    fresh = runs.rounds({run["id"]: (epoch, 0)})["runs"][run["id"]]["columns"]
    assert fresh["impurity"] == [None, 0.25], "a metric that comes later is as long as the others"
    directory.keep_metrics_before(1)
    directory.record.write(RoundMetrics(round=1, accuracy=60.0))
    anew, first, rounds = columns(runs, run["id"], epoch, 2)
    assert anew != epoch and (first, rounds) == (0, [0, 1])
    assert runs.listing()["runs"][0]["accuracy"] == 60.0


def test_half_a_line_is_waited_for_and_a_damaged_one_is_said(tmp_path: Path) -> None:
    directory = begun(tmp_path / "run")
    followed = Followed(directory.path)
    with (directory.path / "metrics.jsonl").open("a") as file:
        file.write('{"round": 1, "accuracy"')
        file.flush()
        followed.look()
        assert followed.done == 1 and followed.problem is None
        file.write(": 55.0}\n")
        file.flush()
        followed.look()
        assert (followed.done, followed.standing.accuracy) == (2, 55.0)
        file.write('nonsense\n{"round": 2}\n')
    followed.look()
    assert followed.done == 3
    assert followed.problem is not None and "metrics.jsonl is damaged" in followed.problem


def test_a_run_with_a_damaged_file_does_not_hide_the_others(tmp_path: Path) -> None:
    for run in ("bad", "good"):
        begun(tmp_path / run).unlock()
    (tmp_path / "bad" / "metrics.jsonl").write_text('["round"]\n')
    bad, good = Runs([tmp_path]).everything()["runs"]["runs"]
    assert "it has no round" in bad["problem"]
    assert (good["accuracy"], good["problem"]) == (40.0, None)


def test_every_state_of_a_run_is_shown(tmp_path: Path) -> None:
    directory = begun(tmp_path / "run")
    followed = Followed(directory.path)

    def state() -> tuple[str, str]:
        followed.look()
        return followed.state()

    assert state()[0] == "running" and state()[1].startswith("round 2 of 4, process ")
    waits = "waiting for devices (1 here, 2 needed)"
    (directory.path / "fleet.json").write_text(json.dumps({"waiting": waits, "clients": []}))
    assert state() == ("waiting", f"{waits}; 1 of 4 rounds are done")
    (directory.path / "fleet.json").write_text(json.dumps({"clients": []}))
    assert state()[0] == "running"
    directory.unlock()
    assert state()[0] == "crashed" and "ended without saying why in round 2" in state()[1]
    (directory.path / "run.log").write_text("2026 INFO stopped before round 1 was complete\n")
    assert state()[0] == "stopped"
    (directory.path / "run.log").write_text("2026 INFO stopped by a callback after round 1\n")
    assert state()[0] == "stopped"
    directory.lock()
    assert state()[0] == "running", "looking did not keep it from the lock"
    directory.unlock()
    (directory.path / "run.lock").write_text("process 1 on another-machine")
    assert state()[0] == "running", "it wrote a moment ago"
    for file in directory.path.iterdir():
        os.utime(file, (0, 0))
    assert state()[0] != "running", "it wrote nothing for long"
    (directory.path / "run.lock").unlink()
    assert state() == ("unfinished", "1 of 4 rounds are there")
    directory.record.write(RoundMetrics(round=3, accuracy=50.0))
    assert state() == ("finished", "4 rounds done")


def test_a_limit_that_is_met_is_the_end(tmp_path: Path) -> None:
    directory = begun(tmp_path / "run", "stop.target=40")
    followed = Followed(directory.path)
    followed.look()
    assert followed.state() == ("finished", "stop.target = 40.0 is met")
    directory.unlock()


def test_runs_that_come_later_are_found_and_told_apart(tmp_path: Path) -> None:
    runs = Runs([tmp_path])
    assert runs.listing()["runs"] == []
    begun(tmp_path / "a").unlock()
    begun(tmp_path / "b", "seed=1").unlock()
    begun(tmp_path / "c", "optimizer.lr=0.5").unlock()
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "config.toml").write_text("not toml [")
    by_name = {run["name"]: run for run in runs.listing()["runs"]}
    assert [by_name[name]["differs"] for name in "abc"] == ["", "seed=1", "optimizer.lr=0.5"]
    assert "config.toml is not TOML" in by_name["d"]["problem"] and by_name["a"]["problem"] is None
    settings = runs.settings()["runs"]
    assert settings[by_name["c"]["id"]]["optimizer.lr"] == "0.5"


def test_every_setting_in_which_runs_differ_is_named(tmp_path: Path) -> None:
    lengths = [f"clients.{name}=2" for name in ("batch", "steps", "active")]
    begun(tmp_path / "a", "seed=7", *lengths, "server.steps=3", "optimizer.lr=0.5").unlock()
    begun(tmp_path / "b", "stop.target=90").unlock()
    a, b = (run["differs"].split(", ") for run in Runs([tmp_path]).listing()["runs"])
    keys = ["clients.batch", "clients.steps", "optimizer.lr", "seed", "server.steps", "stop.target"]
    assert [text.partition("=")[0] for text in a] == [text.partition("=")[0] for text in b] == keys
    assert "stop.target=none" in a and "stop.target=90.0" in b


def test_runs_are_known_by_their_names_and_by_their_paths_where_two_have_one(
    tmp_path: Path,
) -> None:
    for place in ("one/a", "one/b", "two/a"):
        begun(tmp_path / place).unlock()
    runs = Runs([tmp_path / "one", tmp_path / "two"])
    keys = [run["id"] for run in runs.listing()["runs"]]
    assert keys == [str(tmp_path / "one" / "a"), "b", str(tmp_path / "two" / "a")]


def test_clients_in_folders_are_called_by_their_folders(tmp_path: Path) -> None:
    one = Partition(np.arange(4), (np.arange(4, 7), np.arange(7, 9)), names=("St. Mary", "x"))
    held = holdings.count(one, np.arange(9) % 2, ["a", "b"])
    config = toy.values("semisfl", "clients.total=2", "clients.active=2")
    RunDirectory.create(tmp_path / "run", config, held).unlock()
    runs = Runs([tmp_path])
    (run,) = runs.listing()["runs"]
    clients = runs.clients(run["id"])["clients"]
    assert [(client["name"], client["images"]) for client in clients] == [("St. Mary", 3), ("x", 2)]


def test_clients_devices_and_log_of_a_crowd(tmp_path: Path) -> None:
    runs = Runs([directories.crowd(tmp_path / "crowd", clients=50, rounds=200)])
    (run,) = runs.listing()["runs"]
    assert run["network"] and run["state"] == "crashed" and run["done"] == 200
    clients = runs.clients(run["id"])
    assert len(clients["clients"]) == 50
    assert sum(client["rounds"] for client in clients["clients"]) == 200 * 20
    assert len(clients["coverage"]["rounds"]) <= 60
    assert {len(row) for row in clients["coverage"]["shares"]} == {
        len(clients["coverage"]["rounds"])
    }
    devices = runs.devices(run["id"])
    assert devices["counts"] == {"left_out": 1, "refused": 3, "here": 50}
    assert devices["devices"][7]["left_out"] == 1
    assert {device["state"] for device in devices["devices"][:50]} == {"away", "refused"}
    assert [(device["name"], device["state"]) for device in devices["devices"][50:]] == [
        ("camera-x", "revoked"),
        ("camera-y", "refused"),
    ]
    log = runs.log(run["id"], -1)
    assert "is left out" in log["lines"][-1] and len(log["lines"]) < 3001
    assert all(line.startswith("2026-") for line in log["lines"]), "no half of a line"
    assert runs.log(run["id"], log["next"]) == {"lines": [], "next": log["next"]}
    json.dumps(runs.everything(), allow_nan=False)


def test_coverage_is_the_mean_over_a_columns_rounds(tmp_path: Path) -> None:
    directory = begun(tmp_path / "run", "rounds=9")
    for number in range(1, 5):
        shares = {"0": number / 10, "2": None}
        directory.record.write(RoundMetrics(round=number, coverage_by_client=shares))
    directory.unlock()
    followed = Followed(directory.path)
    followed.look()
    starts, clients = followed.coverage.over(bins=3)
    assert starts == [0, 2, 4] and list(clients) == [0, 2]
    assert [of.means(3) for of in clients.values()] == [[0.1, 0.25, 0.4], [None, None, None]]
    assert (clients[2].missed, clients[0].last_round) == (4, 4)


def test_a_device_in_the_place_of_another_one_has_none_of_its_rounds(tmp_path: Path) -> None:
    directory = begun(tmp_path / "run", "rounds=9")
    runs = Runs([tmp_path])

    def rows() -> list[tuple[str | None, int, int, float | None]]:
        answer = runs.clients(runs.listing()["runs"][0]["id"])
        assert answer["coverage"]["clients"] == [one["client"] for one in answer["clients"]]
        keys = ("name", "rounds", "missed", "mean")
        return [tuple(one[key] for key in keys) for one in answer["clients"]]

    def has(number: int, share: float | None) -> None:
        shares = {"0": share, "1": 0.5}
        directory.record.write(RoundMetrics(round=number, coverage_by_client=shares))

    roster = {"index": {"lost": 0, "other": 1}}
    (directory.path / "roster.json").write_text(json.dumps(roster))
    for number, share in enumerate([0.25, None, 0.25], 1):
        has(number, share)
    assert rows() == [("lost", 2, 1, 0.25), ("other", 3, 0, 0.5)]
    removed = {"event": "removed", "name": "lost", "client": 0, "round": 3}
    with (directory.path / "fleet.jsonl").open("a") as events:
        events.write(json.dumps(removed) + "\n")
    (directory.path / "roster.json").write_text(json.dumps({"index": {"new": 0, "other": 1}}))
    has(4, None)
    has(5, 0.75)
    assert rows() == [("new", 1, 1, 0.75), ("other", 5, 0, 0.5)]
