"""A run directory becomes an entry of a study, and an entry a run directory again."""

import json
from pathlib import Path

import pytest

from reproduction import records
from semisfl.runs import start
from semisfl.runs.reading import read_environment
from semisfl.runs.report import read_run
from semisfl.settings import config as configs, presets

SMALL = ("rounds=2", "clients.steps=1", "server.steps=1", "clients.total=2", "clients.active=2")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run directory of two rounds."""
    folder = tmp_path_factory.mktemp("run") / "one"
    config = configs.parse(configs.override(presets.values_of("digits"), list(SMALL)))
    with start.begin(config, out=folder, device="cpu") as run:
        run.go()
    return folder


def test_a_run_is_recorded_and_unpacked(trained: Path, no_records: Path, tmp_path: Path) -> None:
    records.record(trained, "mine/first", "hand-drawn")
    records.record(trained, "mine/second")
    assert [one["name"] for one in records.entries("mine")] == ["first", "second"]
    assert list(no_records.iterdir()) == [no_records / "mine.jsonl.xz"]
    one = records.entry("mine/first")
    assert one["data"] == "hand-drawn" and one["holdings"]["clients"]
    assert one["environment"]["platform"] in ("Linux x86_64", "Linux aarch64", "")
    assert not any(
        isinstance(value, list | dict) for values in one["metrics"].values() for value in values
    )
    before, after = read_run(trained), records.run("mine/first")
    assert before.config == after.config | {"sinks": []}
    assert after.accuracy == pytest.approx(before.accuracy, rel=1e-4)
    assert [row.bytes_total for row in after.rounds] == [row.bytes_total for row in before.rounds]
    folder = records.unpack("mine/first", tmp_path / "again")
    again = read_run(folder)
    assert again.rounds == after.rounds and configs.parse(again.config).rounds == 2
    assert read_environment(folder)["torch"]


def test_a_name_is_recorded_once(trained: Path, no_records: Path) -> None:
    records.record(trained, "mine/first")
    for path in ("mine/first", "mine"):
        with pytest.raises(ValueError, match="choose another name"):
            records.record(trained, path)


def test_settings_that_are_gone_do_not_make_a_record_unreadable(no_records: Path) -> None:
    settings = {"method": "semisfl", "rounds": 1, "gone": {"deeply": 3}, "wire": {"gone": True}}
    metrics = {"round": [0], "accuracy": [50.0], "unknown": [7]}
    records.write("old", [{"name": "one", "settings": settings, "metrics": metrics}])
    assert records.run("old/one").accuracy == 50
    assert records.known_today(settings) == {"method": "semisfl", "rounds": 1}
    assert json.dumps(records.entry("old/one")["settings"]) == json.dumps(settings)
