"""Comparisons: which runs they consist of, what is reused, what is refused."""

from pathlib import Path
from typing import Any

import pytest

from semisfl.cli.main import main
from semisfl.metrics import RoundMetrics
from semisfl.runs import compare
from semisfl.runs.advice import DIVERGED
from semisfl.runs.directory import RunDirectory
from semisfl.settings import config, presets

VALUES: dict[str, Any] = {"rounds": 2, "seed": 5}


def fake_training(job: compare.Job) -> bool:
    directory = RunDirectory.create(job.path, job.config)
    for number in range(job.config.rounds):
        accuracy = (
            50.0 + job.config.seed + 10 * number + (5 if job.config.method == "semisfl" else 0)
        )
        directory.record.write(
            RoundMetrics(round=number, accuracy=accuracy, bytes_total=9, seconds=1.0)
        )
    return True


def test_every_method_has_every_seed(tmp_path: Path) -> None:
    jobs = compare.list_jobs(VALUES, ["supervised", "semisfl"], 2, tmp_path)
    assert [(job.config.method, job.config.seed) for job in jobs] == [
        ("supervised", 5),
        ("semisfl", 5),
        ("supervised", 6),
        ("semisfl", 6),
    ]
    assert len({job.path for job in jobs}) == 4
    assert {job.status for job in jobs} == {"new"}


def test_results_are_means_over_seeds_in_the_order_asked_for(tmp_path: Path) -> None:
    jobs = compare.list_jobs(VALUES, ["supervised", "semisfl"], 2, tmp_path)
    assert compare.run_in_turn(jobs, fake_training)
    summaries = [summary for _, summary in compare.results(jobs)]
    assert [(s.label, s.accuracy.mean) for s in summaries] == [
        ("Supervised-only", 65.5),
        ("SemiSFL", 70.5),
    ]
    assert summaries[0].accuracy.stderr == pytest.approx(0.5)


def test_finished_runs_are_reused_and_unfinished_ones_continued(tmp_path: Path) -> None:
    jobs = compare.list_jobs(VALUES, ["supervised", "semisfl"], 1, tmp_path)
    fake_training(jobs[0])
    RunDirectory.create(jobs[1].path, jobs[1].config)
    again = compare.list_jobs(VALUES, ["supervised", "semisfl"], 2, tmp_path)
    assert [job.status for job in again] == ["finished", "unfinished", "new", "new"]
    done: list[Path] = []
    compare.run_in_turn(again, lambda job: not done.append(job.path))
    assert done == [job.path for job in again[1:]]


def test_a_run_that_its_limit_ended_goes_on_with_another_limit(tmp_path: Path) -> None:
    limits = [{"target": 60}, {"target": 60}, {"target": 90}, {}]
    values = [VALUES | {"rounds": 3, "stop": limit} for limit in limits]
    (job,) = compare.list_jobs(values[0], ["supervised"], 1, tmp_path)
    directory = RunDirectory.create(job.path, job.config)
    directory.record.write(RoundMetrics(round=0, accuracy=70.0))
    jobs = [compare.list_jobs(one, ["supervised"], 1, tmp_path)[0] for one in values[1:]]
    assert [job.status for job in jobs] == ["finished", "unfinished", "unfinished"]


def test_a_stop_ends_the_comparison(tmp_path: Path) -> None:
    jobs = compare.list_jobs(VALUES, ["supervised"], 3, tmp_path)
    asked: list[int] = []
    assert not compare.run_in_turn(jobs, lambda job: bool(asked.append(job.config.seed)))
    assert asked == [5]


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("bad", [False, True])
def test_a_diverged_run_is_named_below_the_table_each_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bad: bool
) -> None:
    values = presets.digits()
    values["rounds"] = 1
    jobs = compare.list_jobs(values, ["supervised"], 2, tmp_path)
    for job, diverged in zip(jobs, (None, bad or None), strict=True):
        RunDirectory.create(job.path, job.config).record.write(
            RoundMetrics(round=0, accuracy=9.8, bytes_total=0, seconds=1.0, diverged=diverged)
        )
    words = ["compare", "digits", "--methods", "supervised", "--seeds", "2", "--out", str(tmp_path)]
    for _ in range(2):
        assert main([*words, "--set", "rounds=1"]) == (DIVERGED if bad else 0)
        remark = f"! Supervised-only: 1 of 2 runs diverged: {jobs[1].path}\n"
        assert (remark in capsys.readouterr().out) == bad


def test_a_run_with_other_settings_is_refused_and_named(tmp_path: Path) -> None:
    fake_training(compare.list_jobs(VALUES, ["semisfl"], 1, tmp_path)[0])
    (job,) = compare.list_jobs({**VALUES, "rounds": 3}, ["semisfl"], 1, tmp_path)
    with pytest.raises(config.ConfigError, match=r"rounds = 2 there, 3 here.*another --out"):
        assert job.status
