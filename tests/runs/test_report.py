"""Reports: what they read, how they group and average, and that nothing of training is needed."""

import csv
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from reproduction import records
from semisfl.cli.main import main
from semisfl.runs import plots, report
from semisfl.runs.start import train
from tests import toy
from tests.pictures import cut_off


def write_run(
    path: Path, accuracies: list[float | None], rounds: int | None = None, **config: Any
) -> Path:
    path.mkdir(parents=True)
    values = {"method": "semisfl", "rounds": rounds or len(accuracies), "seed": 0} | config
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    (path / "config.toml").write_text("\n".join(lines) + "\n[clients]\ntotal = 3\n")
    with open(path / "metrics.jsonl", "w") as file:
        for number, accuracy in enumerate(accuracies):
            row = {"round": number, "seconds": 2.0, "bytes_total": 100 * (number + 1)}
            if accuracy is not None:
                row["accuracy"] = accuracy
            file.write(json.dumps(row) + "\n")
    return path


def test_mean_and_standard_error_over_seeds(tmp_path: Path) -> None:
    for seed, last in enumerate((80.0, 83.0, 86.0)):
        write_run(tmp_path / f"s{seed}", [50.0, 90.0, last], seed=seed)
    (group,) = report.group_runs(report.find_runs([tmp_path]))
    summary = report.summarise(group)
    assert summary.accuracy.mean == pytest.approx(83.0)
    assert summary.accuracy.stderr == pytest.approx(3.0 / math.sqrt(3))
    assert summary.best.mean == 90.0
    assert (summary.rounds, summary.bytes, summary.seconds) == (3, 300, 6.0)
    assert str(summary.accuracy) == "83.0 ± 1.7"


def test_a_round_that_left_the_run_diverged_is_not_its_best_and_reaches_no_target(
    tmp_path: Path,
) -> None:
    run = report.read_run(write_run(tmp_path / "r", [50.0, 90.0, 60.0]))
    run.rounds[1] = replace(run.rounds[1], diverged=True)
    (group,) = report.group_runs([run])
    summary = report.summarise(group, target=55.0)
    assert summary.best.mean == 60.0
    assert summary.to_target is not None and summary.to_target.rounds == 3


def test_cost_of_a_target_counts_only_runs_that_reach_it(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [None, 70.0, 85.0, 80.0], seed=1)
    write_run(tmp_path / "b", [None, 90.0, 91.0, 92.0], seed=2)
    write_run(tmp_path / "c", [None, 70.0, 71.0, 72.0], seed=3)
    (group,) = report.group_runs(report.find_runs([tmp_path]))
    cost = report.summarise(group, target=85.0).to_target
    assert cost == report.ToTarget(reached=2, rounds=2.5, bytes=250.0, seconds=5.0)
    never = report.summarise(group, target=99.0).to_target
    assert never == report.ToTarget(0, None, None, None)


def test_a_run_over_several_ranks_is_averaged_with_runs_of_one_process(tmp_path: Path) -> None:
    for seed, kind in enumerate(("local", "cluster", "network")):
        write_run(tmp_path / kind, [50.0 + seed], seed=seed, fleet=kind)
        file = tmp_path / kind / "config.toml"
        file.write_text(file.read_text().replace(f'fleet = "{kind}"', f'fleet.kind = "{kind}"'))
    groups = report.group_runs(report.find_runs([tmp_path]))
    assert {group.label: len(group.runs) for group in groups} == {
        "SemiSFL fleet.kind=local": 2,
        "SemiSFL fleet.kind=network": 1,
    }


# --- unfinished runs -----------------------------------------------------------------------------


def test_an_unfinished_seed_is_left_out_of_the_mean_with_a_note(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [50.0, 80.0, 90.0])
    write_run(tmp_path / "b", [50.0, 70.0, 80.0], seed=1)
    late = write_run(tmp_path / "c", [10.0, 20.0], rounds=3, seed=2)
    (group,) = report.group_runs(report.find_runs([tmp_path]))
    summary = report.summarise(group, target=15.0)
    assert (summary.accuracy.mean, summary.rounds, summary.bytes) == (85.0, 3, 300)
    assert summary.left_out == [late]
    assert summary.to_target is not None and summary.to_target.reached == 2
    assert summary.remark == f"1 of 3 runs left out as unfinished: {late} (round 2 of 3)"
    assert plots._curve(group, plots.Chart(), "accuracy")[1] == [50.0, 75.0, 85.0]
    assert plots._legend(group) == "SemiSFL (2 seeds)"


def test_a_run_that_sends_once_is_one_point_in_the_chart_of_bytes(tmp_path: Path) -> None:
    run = report.read_run(write_run(tmp_path / "r", [50.0, 80.0]))
    for once, points in ((False, [1e-7, 2e-7]), (True, [1e-7])):
        if once:
            run.rounds[:] = [replace(one, bytes_total=100) for one in run.rounds]
        picture = plots.picture([report.Group("SemiSFL", [run])], [plots.Chart(plots.GIGABYTES)])
        (line,) = picture.axes[0].get_lines()
        assert list(line.get_xdata()) == pytest.approx(points)


# --- files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "variations",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("codecs", "compare", "paper")),
    ],
)
def test_the_picture_shows_all_its_text(name: str) -> None:
    groups = report.group_runs([records.run_of(name, one) for one in records.entries(name)])
    assert cut_off(plots.picture(groups)) == 0


def test_a_line_cut_off_at_the_end_is_left_out_and_one_in_the_middle_is_said(
    tmp_path: Path,
) -> None:
    metrics = write_run(tmp_path / "r", [50.0, 60.0, 70.0], rounds=4) / "metrics.jsonl"
    text = metrics.read_text()
    metrics.write_text(text + '{"round": 3, "acc')
    run = report.read_run(tmp_path / "r")
    assert [row.round for row in run.rounds] == [0, 1, 2]
    assert not run.finished
    metrics.write_text("garbage\n" + text)
    with pytest.raises(ValueError, match="line 1 is damaged"):
        report.read_run(tmp_path / "r")


def test_seeds_on_other_images_are_not_averaged(tmp_path: Path) -> None:
    data = toy.dataset()
    for seed, one in enumerate((data, data, replace(data, images=255 - data.images))):
        settings = toy.values("supervised", "rounds=1", f"seed={seed}", *toy.FLAT)
        train(settings, data=one, device="cpu", out=tmp_path / f"s{seed}")
    groups = report.group_runs(report.find_runs([tmp_path]))
    assert [len(group.runs) for group in groups] == [2, 1]
    assert len({group.label for group in groups}) == 2


def test_a_seed_that_is_there_twice_counts_once(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [10.0], rounds=2)
    write_run(tmp_path / "b", [10.0, 20.0], rounds=2)
    write_run(tmp_path / "c", [10.0, 30.0], rounds=2)
    write_run(tmp_path / "d", [10.0, 40.0], rounds=2, seed=1)
    (group,) = report.group_runs(report.find_runs([tmp_path]))
    assert [run.path.name for run in group.runs] == ["b", "d"]
    assert "2 of 4 runs left out as there twice" in group.remark


def test_every_number_of_every_round_as_one_long_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"semisfl.temperature": 0.2}  # not read by the other method, so no difference
    for seed, labels in ((0, 10), (3, 40)):
        settings = {"seed": seed, "data.labeled": labels, **own}
        write_run(tmp_path / "runs" / str(labels), [50.0, None], **settings)
    write_run(tmp_path / "runs" / "c", [50.0, None], method="supervised", **{"data.labeled": 10})
    place, packed = tmp_path / "long.csv", tmp_path / "long.parquet"
    assert main(["report", str(tmp_path / "runs"), "--long", str(place)]) == 0
    assert capsys.readouterr().out == "", "a table only if asked for"
    rows = list(csv.DictReader(place.read_text().splitlines()))
    assert list(rows[0]) == ["run", "method", "seed", "data.labeled", "round", "key", "value"]
    assert main(["report", str(tmp_path / "runs"), "--long", str(packed)]) == 0
    table = pyarrow.parquet.read_table(packed).to_pylist()
    assert [{key: str(value) for key, value in one.items()} for one in table] == rows
    assert {type(value) for value in table[0].values()} == {str, int, float}
    found = {(r["method"], r["seed"], r["data.labeled"], r["round"], r["key"]): r for r in rows}
    assert float(found["semisfl", "3", "40", "0", "accuracy"]["value"]) == 50.0
    assert float(found["supervised", "0", "10", "1", "bytes_total"]["value"]) == 200
    assert ("semisfl", "3", "40", "1", "accuracy") not in found
    assert main(["report", str(tmp_path / "runs"), "--long", "long.xlsx"]) == 2
    assert "must end in .csv or .parquet" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert main(["report", str(tmp_path / "runs"), "--long", str(packed)]) == 2
    assert "pip install 'semisfl[datasets]'" in capsys.readouterr().err
