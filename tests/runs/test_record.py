"""A run as one file: it means the same run as its directory, now and when presets have changed."""

import errno
import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from semisfl import train
from semisfl.cli.main import main
from semisfl.costs.replay import replay
from semisfl.data import sources
from semisfl.files import write_whole
from semisfl.paper.identity import identity
from semisfl.paper.missing import missing
from semisfl.paper.run_index import RunIndex
from semisfl.runs import grouping, reading, record
from semisfl.runs.directory import RunDirectory
from semisfl.runs.preset_changes import changes, flat
from semisfl.settings import config as configs
from semisfl.settings import presets
from tests.costs.test_replay import WORLD
from tests.paper.fakes import digits_cell, leave_run

SHORT = ("rounds=2", "clients.steps=1", "server.steps=1", "clients.active=2", "optimizer.lr=0.013")


def written(folder: Path, run: Path) -> Path:
    file = folder / f"{run.name}{reading.SUFFIX}"
    record.write(run, file)
    return file


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a run directory of two rounds, and its record."""
    folder = tmp_path_factory.mktemp("record")
    config = configs.parse(configs.override(presets.values_of("digits"), list(SHORT)))
    data = sources.load("digits")
    few = replace(data, test_images=data.test_images[:100], test_labels=data.test_labels[:100])
    train(config, out=folder / "run", data=few, device="cpu")
    return folder / "run", written(folder, folder / "run")


def test_a_record_reads_as_the_directory_does(trained: tuple[Path, Path]) -> None:
    run, file = trained
    before, after = (configs.parse(reading.read_config(path)) for path in trained)
    assert identity(after) == identity(before) and after.seed == before.seed
    assert after.optimizer == before.optimizer and after.data == before.data
    pairs = zip(grouping.read_run(run).rounds, grouping.read_run(file).rounds, strict=True)
    for ours, theirs in pairs:
        assert theirs.bytes == ours.bytes and theirs.bytes_total == ours.bytes_total
        assert theirs.accuracy == pytest.approx(ours.accuracy, rel=1e-4)
        assert theirs.accuracies.keys() == ours.accuracies.keys()
        assert theirs.loss_semi == pytest.approx(ours.loss_semi, rel=1e-4)
    assert reading.read_holdings(file) == reading.read_holdings(run)
    assert len(reading.read_holdings(file)["clients"]) == 10
    assert reading.read_images(file) == reading.read_images(run) is not None
    assert reading.read_environment(file)["torch"] == reading.read_environment(run)["torch"]


def test_a_record_is_small_text_with_a_line_per_metric(trained: tuple[Path, Path]) -> None:
    lines = trained[1].read_text(encoding="utf-8").splitlines()
    assert sum(line.startswith('  "accuracy": [') for line in lines) == 1
    content = json.loads("\n".join(lines))
    assert content["preset"] == "digits"
    changed = dict(text.split("=") for text in SHORT) | {"method": "semisfl", "seed": "0"}
    assert {key: str(value) for key, value in content["settings"].items()} == changed


def test_a_brief_record_has_no_metrics_per_client_and_per_class(
    trained: tuple[Path, Path], tmp_path: Path
) -> None:
    brief = [tmp_path / f"{number}.run.json" for number in range(2)]
    for path, file in zip(trained, brief, strict=True):
        assert main(["record", str(path), str(file), "--brief"]) == 0
    whole, ours = (reading.read_rounds(path, dict) for path in (trained[1], brief[0]))
    parts = {"bytes", "bytes_by_client", "coverage_by_class", "coverage_by_client"}
    assert parts <= whole[0].keys()
    for before, after in zip(whole, ours, strict=True):
        assert after == {
            key: value for key, value in before.items() if not isinstance(value, list | dict)
        }
    assert brief[0].read_bytes() == brief[1].read_bytes(), "a record can be made brief as well"
    assert reading.read_holdings(brief[0]) == reading.read_holdings(trained[0])


@pytest.mark.parametrize("name", presets.PRESETS)
def test_a_preset_differs_in_nothing_from_itself(name: str) -> None:
    values = presets.preset(name).model_dump(mode="json", exclude_none=True)
    assert changes(flat(values)) == (name, {})


def test_a_record_keeps_its_settings_when_presets_and_defaults_change(
    trained: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = reading.read_config(trained[1])
    monkeypatch.setitem(presets.PRESETS, "digits", lambda: {"data": {"name": "svhn"}})
    assert reading.read_config(trained[1]) == before
    settings = json.loads(trained[1].read_text())
    held = settings["settings"].keys() | settings["as_in_preset"].keys()
    config = configs.parse(before)
    for section in ("data.labeled", "optimizer.momentum", "teacher.ema_decay", "rounds"):
        assert section in held, "a default is written down too"
    assert not any(key.startswith("fedmatch.") for key in held), "another method's setting"
    assert config.data.labeled == 40


def test_replay_counts_the_same_bytes_and_hours(trained: tuple[Path, Path]) -> None:
    ours, theirs = (replay(grouping.read_run(path), WORLD) for path in trained)
    assert theirs.traffic == ours.traffic
    assert theirs.seconds == ours.seconds


@pytest.mark.usefixtures("no_pictures")
def test_report_takes_a_record_and_a_folder_of_both(
    trained: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = []
    for paths in ([trained[0]], [trained[1]]):
        words = ["report", *map(str, paths), "--json", "--out", str(tmp_path / "x.png")]
        assert main(words) == 0
        outputs.append(json.loads(capsys.readouterr().out)["results"][0])
    assert outputs[1]["accuracy"]["mean"] == pytest.approx(outputs[0]["accuracy"]["mean"], rel=1e-4)
    assert {key: outputs[0][key] for key in ("bytes", "rounds", "label")} == {
        key: outputs[1][key] for key in ("bytes", "rounds", "label")
    }
    places = [run.path for run in grouping.find_runs([trained[0].parent])]
    assert places == list(trained)


def test_a_page_is_written_of_a_record(
    trained: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(trained[1]), "--html", str(tmp_path / "x.html")]) == 0
    assert '"run"' in (tmp_path / "x.html").read_text(encoding="utf-8")


def test_reproduce_finds_a_record_and_never_continues_it(tmp_path: Path) -> None:
    cell = digits_cell()
    run = leave_run(tmp_path / "elsewhere" / "run", cell.config(), [10.0, 20.0])
    (tmp_path / "out").mkdir()
    file = written(tmp_path / "out", run)
    index = RunIndex(tmp_path / "out")
    assert [one.path for one in index.result(cell).runs] == [file]
    assert missing([cell], index) == []
    begun = leave_run(tmp_path / "elsewhere" / "begun", cell.config(seed=1), [10.0])
    written(tmp_path / "out", begun)
    (left,) = missing([cell], RunIndex(tmp_path / "out"), seeds=2)
    assert left.config.seed == 1 and left.path.suffix != ".json"


def test_absent_metrics_are_left_out_of_a_record(tmp_path: Path) -> None:
    columns: dict[str, list[Any]] = {"impurity": [None, 0.123456789]}
    run = leave_run(tmp_path / "run", digits_cell().config(), [10.0, 20.0], **columns)
    rows = reading.read_rounds(written(tmp_path, run), dict)
    assert "impurity" not in rows[0] and rows[1]["impurity"] == 0.12346
    assert rows[1]["bytes_total"] == 2_000_000_000 and rows[1]["round"] == 1


def test_a_record_can_be_unpacked(trained: tuple[Path, Path], tmp_path: Path) -> None:
    place = record.unpack(trained[1], tmp_path / "again")
    assert reading.read_rounds(place, dict) == reading.read_rounds(trained[1], dict)
    assert reading.read_holdings(place) == reading.read_holdings(trained[1])
    assert identity(configs.parse(reading.read_config(place))) == identity(
        configs.parse(reading.read_config(trained[1]))
    )


def test_the_machine_is_named_by_its_kind_only(tmp_path: Path) -> None:
    run = leave_run(tmp_path / "run", digits_cell().config(), [10.0, 20.0])
    where = "Linux-6.8.0-1021-somecloud-x86_64-with-glibc2.39"
    (run / "environment.json").write_text(json.dumps({"platform": where, "cpus": 2}))
    environment = reading.read_environment(written(tmp_path, run))
    assert environment == {"platform": "Linux x86_64", "cpus": 2}


def test_names_that_no_folder_would_find_and_files_that_are_there_are_refused(
    trained: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["record", str(trained[0]), str(tmp_path / "x.json")]) == 2
    assert f"must end in .run.json; call it {tmp_path}/x.run.json" in capsys.readouterr().err
    assert main(["record", str(trained[0]), str(trained[1])]) == 2
    assert "already there" in capsys.readouterr().err
    assert main(["record", str(trained[0]), str(tmp_path / "no" / "x.run.json")]) == 2
    assert f"there is no folder {tmp_path / 'no'}" in capsys.readouterr().err
    assert main(["record", str(tmp_path), str(tmp_path / "x.run.json")]) == 2
    assert "holds no run" in capsys.readouterr().err
    assert main(["record", str(trained[0]), str(tmp_path / "x.run.json")]) == 0
    assert "x.run.json" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"record": 99}, "format 99 is newer"),
        ({"metrics": {"round": [0, 1], "accuracy": [1.0]}}, "different numbers of rounds"),
        ({"settings": None}, "is damaged"),
        ({"settings": {"new": 1, "new.kind": 2}}, "is damaged: 'new' is a value, not a section"),
        ({"metrics": None}, "is damaged"),
    ],
)
def test_a_record_that_cannot_be_read_is_named(
    change: dict[str, Any], reason: str, trained: tuple[Path, Path], tmp_path: Path
) -> None:
    file = tmp_path / "x.run.json"
    file.write_text(json.dumps(json.loads(trained[1].read_text()) | change))
    with pytest.raises(ValueError, match=rf"x\.run\.json.*{reason}"):
        grouping.read_run(file)
    for text, damage in (("{", "Expecting"), ("[1]", "it does not hold the record of a run")):
        file.write_text(text)
        with pytest.raises(ValueError, match=rf"x\.run\.json is damaged: {damage}"):
            grouping.read_run(file)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("last", [True, False])
def test_a_line_with_nan_is_refused_wherever_it_is(value: str, last: bool, tmp_path: Path) -> None:
    """Only an incomplete last line is left out; this one is complete and wrong."""
    lines = ['{"round": 0, "accuracy": 50.0}', f'{{"round": 1, "accuracy": {value}}}']
    file = tmp_path / "metrics.jsonl"
    file.write_text("\n".join(lines if last else [lines[1], lines[0]]) + "\n")
    number = 2 if last else 1
    with pytest.raises(
        ValueError, match=f"line {number} is damaged: it holds {value}, which is no"
    ):
        reading.read_rounds(file.parent, dict)


def test_any_damage_names_the_file(tmp_path: Path) -> None:
    deep = "[" * 200_000
    metrics, record = tmp_path / "metrics.jsonl", tmp_path / "x.run.json"
    metrics.write_text(f'{deep}\n{{"round": 1}}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 1 is damaged: it is nested too"):
        RunDirectory(tmp_path).keep_metrics_before(1)
    metrics.write_text('{"round": 0, "accuracy": "high"}\n{"round": 1}\n')
    with pytest.raises(
        ValueError, match=r"metrics\.jsonl, line 1 is damaged: its accuracy is 'high'"
    ):
        RunDirectory(tmp_path).keep_metrics_before(1)
    record.write_text(deep)
    with pytest.raises(ValueError, match=r"x\.run\.json is damaged: it is nested too deeply"):
        grouping.read_run(record)


@pytest.mark.usefixtures("no_pictures")
def test_a_run_of_somebody_else_imports_no_method(
    trained: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The run names a module on Python's path; importing the module would run its code."""
    runs, planted = tmp_path / "runs", tmp_path / "planted_method.py"
    planted.write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'owned')!r}).touch()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained[0], runs / "run")
    config = (runs / "run" / "config.toml").read_text()
    method = 'method = "planted_method:Thing"'
    (runs / "run" / "config.toml").write_text(re.sub("^method = .*", method, config))
    record = json.loads(trained[1].read_text())
    record["settings"]["method"] = "planted_method:Thing"
    (runs / "sent.run.json").write_text(json.dumps(record))
    for words in ("replay runs/run", "replay runs/sent.run.json", "record runs/run x.run.json"):
        assert main(words.split()) == 2
        assert "add --allow-method planted_method:Thing" in " ".join(
            capsys.readouterr().err.split()
        )
    assert main(["report", "runs"]) == 0
    assert main(["report", "runs", "--html", "x.html"]) == 0
    assert main(["reproduce", "table1", "--no-run", "--from", "runs", "--out", "out"]) == 0
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("state", ["3", "[]", '{"model": null}', '{"model": {"description": {}}}'])
def test_a_checkpoint_of_another_form_says_nothing_of_images(state: str, tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "latest.safetensors", metadata={"state": state})
    assert reading.read_images(tmp_path) is None


def test_a_read_only_disk_names_the_file_and_no_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(place: str | Path, *_: object, **__: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(place))

    monkeypatch.setattr(os, "open", refuses)
    monkeypatch.setattr(Path, "unlink", refuses)
    with pytest.raises(OSError, match="Read-only") as caught:
        write_whole(tmp_path / "a.run.json", b"{}")
    assert caught.value.filename == str(tmp_path / "a.run.json")
