"""Differences seed by seed, and tables for papers: hand-computed numbers."""

import csv
import json
from pathlib import Path
from statistics import fmean

import pytest

from semisfl.cli.main import main
from semisfl.runs import report
from tests.runs.test_report import write_run


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Write runs in which SemiSFL is 1, 2 and 6 points better with seeds 0, 1 and 2, and alone has seed 3."""
    folder = tmp_path / "runs"
    for seed, (one, other) in enumerate(((81.0, 80.0), (84.0, 82.0), (87.0, 81.0))):
        write_run(folder / f"a{seed}", [50.0, one], seed=seed)
        write_run(folder / f"b{seed}", [50.0, other], seed=seed, method="supervised")
    write_run(folder / "a3", [50.0, 10.0], seed=3)
    return folder


def test_differences_pair_the_seeds_that_both_have(runs: Path) -> None:
    groups = report.group_runs(report.find_runs([runs]))
    (pair,) = report.differences(groups)
    assert (pair.first, pair.second) == ("SemiSFL", "Supervised-only")
    assert (pair.seeds, pair.wins) == (3, 3)
    assert pair.mean == pytest.approx(3.0)
    # The deviations are -2, -1, 3: variance 14 / 2, t(2) = 4.3027, so 4.3027 * sqrt(7 / 3).
    assert pair.interval == pytest.approx((3 - 6.5725, 3 + 6.5725), abs=1e-3)
    assert pair.interval == pytest.approx((-3.5725, 9.5725), abs=1e-3)
    (turned,) = report.differences(groups[::-1])
    assert (turned.mean, turned.wins) == (pytest.approx(-3.0), 0)


def test_one_shared_seed_has_no_interval_and_none_no_difference(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [80.0], seed=0)
    write_run(tmp_path / "b", [70.0], seed=0, method="supervised")
    write_run(tmp_path / "c", [60.0], seed=1, method="fedswitch")
    (pair,) = report.differences(report.group_runs(report.find_runs([tmp_path])))
    assert (pair.seeds, pair.mean, pair.interval, pair.wins) == (1, 10.0, None, 1)


def test_accuracies_on_other_images_are_not_compared(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [80.0], **{"data.name": "photos"})
    write_run(tmp_path / "b", [70.0], **{"data.name": "/elsewhere/photos"}, method="supervised")
    write_run(tmp_path / "c", [60.0], **{"data.name": "letters"}, method="supervised")
    (pair,) = report.differences(report.group_runs(report.find_runs([tmp_path])))
    assert pair.mean == 10


def test_the_test_set_counts_where_rounds_are_judged_on_validation_images(tmp_path: Path) -> None:
    for name, method, last, test in (("a", "semisfl", 90.0, 70.0), ("b", "supervised", 80.0, 75.0)):
        path = write_run(tmp_path / name, [last], method=method)
        with (path / "config.toml").open("a") as file:
            file.write("[data]\nvalidation = 0.1\n")
        metrics = json.loads((path / "metrics.jsonl").read_text()) | {"test_accuracy": test}
        (path / "metrics.jsonl").write_text(json.dumps(metrics) + "\n")
    (pair,) = report.differences(report.group_runs(report.find_runs([tmp_path])))
    assert (pair.mean, pair.judged_on) == (-5.0, "test")
    assert " points of test accuracy " in report.latex([], [pair])


@pytest.mark.parametrize(
    ("freedom", "value"), [(1, 12.706), (4, 2.776), (9, 2.262), (10, 2.228), (30, 2.042)]
)
def test_quantiles_of_students_t(freedom: int, value: float) -> None:
    assert report.quantile(freedom) == pytest.approx(value, abs=5e-4)


@pytest.mark.usefixtures("no_pictures")
def test_csv_and_latex_of_a_report(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place, paper = tmp_path / "table.csv", tmp_path / "table.tex"
    command = ["report", str(runs), "--target", "85", "--table", str(place), "--table", str(paper)]
    assert main(command) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "+3.0" in out and "-3.6 to +9.6" in out
    seeds, pairs = (tmp_path / f"table-{name}.csv" for name in ("seeds", "differences"))
    assert f"tables: {place}, {seeds}, {pairs}, {paper}" in out
    each = list(csv.DictReader(seeds.read_text().splitlines()))
    assert [(one["label"], one["seed"]) for one in each[3:5]] == [
        ("SemiSFL", "3"),
        ("Supervised-only", "0"),
    ]
    assert fmean(float(one["accuracy"]) for one in each[:4]) == 65.5
    assert Path(each[0]["run"]).is_dir() and "accuracy_stderr" not in each[0]
    first, second = csv.DictReader(place.read_text().splitlines())
    assert (first["label"], first["seeds"], float(first["accuracy"])) == ("SemiSFL", "4", 65.5)
    assert (first["target_reached"], first["bytes"], first["test"]) == ("1", "200.0", "65.5")
    assert float(second["accuracy_stderr"]) == pytest.approx(1 / 3**0.5, abs=1e-4)
    (pair,) = csv.DictReader((tmp_path / "table-differences.csv").read_text().splitlines())
    assert (pair["seeds"], pair["wins"], float(pair["difference"])) == ("3", "3", 3.0)
    text = paper.read_text()
    assert r"Supervised-only & 3 & $81.0 \pm 0.6$ & $81.0 \pm 0.6$ \\" in text
    assert r"SemiSFL $-$ Supervised-only & 3 & $3.0$ & [$-3.6$, $9.6$] & 3 \\" in text
    assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") == 2
    assert main([*command[:2], "--json"]) == 0
    (pair,) = json.loads(capsys.readouterr().out)["differences"]
    assert pair["interval"] == pytest.approx([-3.5725, 9.5725], abs=1e-3)
