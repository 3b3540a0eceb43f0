"""Sweeps: which runs they consist of, what is refused, and the table and picture over the values."""

from pathlib import Path

import pytest

from semisfl.cli.main import main
from semisfl.runs import compare
from semisfl.runs.compare import Sweep
from semisfl.settings.config import ConfigError
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
    assert compare.results(jobs)[1][1].label == "SemiSFL data.labeled=10 wire.models=int8"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["data.labeled"], "is not KEY=V1,V2"),
        (["data.labeled=,"], "is not KEY=V1,V2"),
        (["seed=1,2"], "by --methods and --seeds"),
        (["method=semisfl"], "by --methods and --seeds"),
        (["data.labeled=1", "data.labeled=2"], "all values of a key in one --sweep"),
        (["data.labeld=1,2"], "did you mean 'data.labeled'"),
        (["data.labeled=10,10.0"], "would be the same run"),
    ],
)
def test_settings_that_cannot_be_swept_are_refused(
    words: list[str], error: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=error):
        compare.list_jobs(VALUES, ["semisfl"], 1, tmp_path, [Sweep.parse(word) for word in words])


@pytest.mark.usefixtures("no_pictures")
def test_a_report_has_a_line_per_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = compare.list_jobs(VALUES, METHODS, 2, tmp_path / "runs", [LABELS])
    assert compare.run_in_turn(jobs[:-1], fake_training)  # semisfl at 100 labels has one seed
    assert main(["report", str(tmp_path / "runs")]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert any(line.startswith("SemiSFL data.labeled=20 2 2 70.5 ± 0.5") for line in lines)
    assert any(line.startswith("SemiSFL data.labeled=100 1 2 70.0") for line in lines)
