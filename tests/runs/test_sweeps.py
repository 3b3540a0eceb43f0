"""Sweeps: which runs they consist of, what is refused, and the table and picture over the values."""

import json
from pathlib import Path

import pytest

from semisfl.cli.main import main
from semisfl.runs import compare, grouping, plots, report
from semisfl.runs.compare import Sweep
from semisfl.runs.report import sweep_of
from semisfl.settings.config import ConfigError
from tests.pictures import cut_off
from tests.runs.test_compare import VALUES, fake_training

LABELS = Sweep.parse("data.labeled=10, 20,100")
METHODS = ["supervised", "semisfl"]


def test_every_value_has_every_method_and_seed_in_a_directory_of_its_own(tmp_path: Path) -> None:
    jobs = compare.list_jobs(VALUES, METHODS, 2, tmp_path, [LABELS])
    configs = {job.path.name: job.config for job in jobs}
    assert len(configs) == len(jobs) == 12
    config = configs["semisfl-data.labeled-100-seed6"]
    assert (config.method, config.data.labeled, config.seed) == ("semisfl", 100, 6)
    assert [job.config.seed for job in jobs] == [5] * 6 + [6] * 6
    for job in jobs[:3]:
        fake_training(job)
    again = compare.list_jobs(VALUES, METHODS, 2, tmp_path, [LABELS])
    assert [job.status for job in again] == ["finished"] * 3 + ["new"] * 9


def test_two_sweeps_are_a_grid(tmp_path: Path) -> None:
    codecs = Sweep.parse("wire.models=fp32,int8")
    jobs = compare.list_jobs(VALUES, ["semisfl"], 1, tmp_path, [LABELS, codecs])
    pairs = [(job.config.data.labeled, job.config.wire.models) for job in jobs]
    assert pairs == [(n, codec) for n in (10, 20, 100) for codec in ("fp32", "int8")]
    assert jobs[1].path.name == "semisfl-data.labeled-10-wire.models-int8-seed5"
    assert compare.run_in_turn(jobs, fake_training)
    swept = sweep_of(compare.results(jobs), ["wire.models", "data.labeled"])
    assert swept is not None and swept.values == ["fp32", "int8"]
    assert list(swept.lines) == [f"SemiSFL data.labeled={number}" for number in (10, 20, 100)]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["data.labeled"], "is not KEY=V1,V2"),
        (["data.labeled=,"], "is not KEY=V1,V2"),
        (["seed=1,2"], "seed cannot be swept; use --seeds"),
        (["method=semisfl"], "method cannot be swept; use --methods"),
        (["data.labeled=1", "data.labeled=2"], "names a key twice"),
        (["data.labeld=1,2"], "did you mean 'data.labeled'"),
        (["data.labeled=10,10.0"], "would be the same run"),
    ],
)
def test_settings_that_cannot_be_swept_are_refused(
    words: list[str], error: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=error):
        compare.list_jobs(VALUES, ["semisfl"], 1, tmp_path, [Sweep.parse(word) for word in words])


def test_a_method_that_does_not_read_what_is_swept_is_named(tmp_path: Path) -> None:
    sweep = Sweep.parse("semisfl.temperature=0.1,0.5")
    sentence = "supervised does not read semisfl.temperature; leave supervised out of --methods"
    with pytest.raises(ConfigError, match=sentence):
        compare.list_jobs(VALUES, ["semisfl", "supervised"], 1, tmp_path, [sweep])


def test_a_report_has_a_column_per_value_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = compare.list_jobs(VALUES, METHODS, 2, tmp_path / "runs", [LABELS])
    assert compare.run_in_turn(jobs[:-1], fake_training)  # semisfl at 100 labels has one seed
    assert main(["report", str(tmp_path / "runs")]) == 0
    printed = capsys.readouterr().out
    table = printed[printed.index("test accuracy over data.labeled") :].splitlines()
    assert "mean ± standard error" in table[0]
    assert table[2].split() == ["method", "10", "20", "100"]
    cells = [line.split() for line in table if line.strip().startswith(("SemiSFL", "Superv"))]
    level = ["65.5", "±", "0.5"]
    assert ["Supervised-only", *level, *level, *level] in cells
    semisfl = ["70.5", "±", "0.5"]
    assert ["SemiSFL", *semisfl, *semisfl, "70.0"] in cells
    assert (tmp_path / "runs" / "report-sweep.png").read_bytes().startswith(b"\x89PNG")

    assert main(["report", str(tmp_path / "runs"), "--json"]) == 0
    sweep = json.loads(capsys.readouterr().out)["sweep"]
    assert (sweep["key"], sweep["values"]) == ("data.labeled", ["10", "20", "100"])
    assert sweep["lines"]["SemiSFL"]["20"] == {"mean": 70.5, "stderr": pytest.approx(0.5)}


def test_runs_that_differ_in_much_are_no_sweep(tmp_path: Path) -> None:
    for number, more in enumerate(([], ["data.labeled=9", "clients.batch=2", "clients.steps=2"])):
        values = compare.configs.override(VALUES, more)
        (job,) = compare.list_jobs(values, ["semisfl"], 1, tmp_path / str(number))
        fake_training(job)
    groups = grouping.group_runs(grouping.find_runs([tmp_path / "0", tmp_path / "1"]))
    assert len(groups) == 2
    assert sweep_of([(group, report.summarise(group)) for group in groups]) is None


def test_values_that_are_words_are_drawn_too_and_nothing_is_cut_off(tmp_path: Path) -> None:
    jobs = compare.list_jobs(VALUES, METHODS, 2, tmp_path, [Sweep.parse("wire.models=int8,fp32")])
    compare.run_in_turn(jobs, fake_training)
    swept = sweep_of(compare.results(jobs), ["wire.models"])
    assert swept is not None
    figure = plots.sweep_picture(swept)
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["fp32", "int8"]
    assert cut_off(figure) == 0
