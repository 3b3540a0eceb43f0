"""Reports: what they read, how they group and average, and that nothing of training is needed."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from semisfl.runs import plots, report

PNG = b"\x89PNG"


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


def test_a_single_run_has_no_standard_error(tmp_path: Path) -> None:
    (group,) = report.group_runs(report.find_runs([write_run(tmp_path / "r", [50.0, 60.0])]))
    told = report.as_json(report.summarise(group))
    assert told["accuracy"] == {"mean": 60.0, "stderr": None}
    assert told["to_target"] is None


def test_cost_of_a_target_counts_only_runs_that_reach_it(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [None, 70.0, 85.0, 80.0], seed=1)
    write_run(tmp_path / "b", [None, 90.0, 91.0, 92.0], seed=2)
    write_run(tmp_path / "c", [None, 70.0, 71.0, 72.0], seed=3)
    (group,) = report.group_runs(report.find_runs([tmp_path]))
    cost = report.summarise(group, target=85.0).to_target
    assert cost == report.ToTarget(reached=2, rounds=2.5, bytes=250.0, seconds=5.0)
    never = report.summarise(group, target=99.0).to_target
    assert never == report.ToTarget(0, None, None, None)


def test_groups_are_told_apart_by_what_differs(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [50.0], labeled=10)
    write_run(tmp_path / "b", [50.0], labeled=20)
    write_run(tmp_path / "c", [50.0], method="supervised", labeled=20)
    write_run(tmp_path / "d", [50.0], labeled=10, seed=4)
    groups = report.group_runs(report.find_runs([tmp_path]))
    assert [group.label for group in groups] == [
        "semisfl labeled=10",
        "semisfl labeled=20",
        "supervised",
    ]
    assert [len(group.runs) for group in groups] == [2, 1, 1]


def test_a_line_cut_off_at_the_end_is_left_out_and_one_in_the_middle_is_said(
    tmp_path: Path,
) -> None:
    metrics = write_run(tmp_path / "r", [50.0, 60.0, 70.0], rounds=4) / "metrics.jsonl"
    whole = metrics.read_text()
    metrics.write_text(whole + '{"round": 3, "acc')
    run = report.read_run(tmp_path / "r")
    assert [row["round"] for row in run.rows] == [0, 1, 2]
    assert not run.finished
    metrics.write_text("garbage\n" + whole)
    with pytest.raises(ValueError, match="line 1 is damaged"):
        report.read_run(tmp_path / "r")


def test_no_runs_and_no_tested_round_are_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no run"):
        report.find_runs([tmp_path])
    with pytest.raises(ValueError, match="no round was tested yet"):
        report.find_runs([write_run(tmp_path / "r", [None], rounds=5)])


def test_curves_average_over_rounds_that_all_seeds_have(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [10.0, 20.0, 30.0], rounds=3)
    write_run(tmp_path / "b", [30.0, 40.0], rounds=3, seed=1)
    (group,) = report.group_runs(report.find_runs([tmp_path]))
    x, mean, error = plots._curve(group, "seconds", "accuracy")
    assert (x, mean) == ([2.0, 4.0], [20.0, 30.0])
    assert error == pytest.approx([10.0, 10.0])


def test_pictures_are_drawn_also_without_traffic_or_losses(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a", [10.0, 20.0])
    (group,) = report.group_runs(report.find_runs([tmp_path / "runs"]))
    for row in group.runs[0].rows:
        row["bytes_total"] = 0
    plots.draw([group], tmp_path / "all.png")
    plots.draw([group], tmp_path / "some.png", plots.ACCURACY)
    assert (tmp_path / "all.png").read_bytes().startswith(PNG)
    assert (tmp_path / "some.png").read_bytes().startswith(PNG)


def test_reports_need_nothing_that_trains() -> None:
    code = "import sys, semisfl.runs.report, semisfl.runs.plots; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
