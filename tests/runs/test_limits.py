"""Limits: when each is met, what a run does then, and that it goes on beyond as if there were none."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from semisfl.metrics import RoundMetrics
from semisfl.net.terms import Terms
from semisfl.runs import checkpoint
from semisfl.runs.directory import RunDirectory
from semisfl.runs.reading import Standing, met
from semisfl.runs.report import read_run
from semisfl.runs.start import resume, train
from semisfl.settings.run import StopConfig
from tests import toy
from tests.toy import own


def rows(*accuracies: float | None) -> list[RoundMetrics]:
    """Return rounds of half an hour and 2 GB each."""
    return [
        RoundMetrics(
            round=index, accuracy=value, seconds=1800.0, bytes_total=2 * 10**9 * (index + 1)
        )
        for index, value in enumerate(accuracies)
    ]


@pytest.mark.parametrize(
    ("stop", "accuracies", "expected"),
    [
        ({}, [99.0] * 9, None),
        ({"target": 60}, [50.0, 59.9], None),
        ({"target": 60}, [50.0, 60.0], "target"),
        ({"target": 60}, [50.0, 60.0, None], "target"),
        ({"target": 60}, [60.0, 59.0], None),  # it is the last test that counts
        ({"patience": 2}, [50.0, 49.0], None),
        ({"patience": 2}, [50.0, 49.0, 50.0], "patience"),  # as good is not better
        ({"patience": 2}, [50.0, None, 49.0, None], None),  # rounds without a test do not count
        ({"patience": 2}, [50.0, None, 49.0, None, 48.0], "patience"),
        ({"patience": 2}, [50.0, 49.0, 51.0, 50.0], None),
        ({"patience": 1}, [0.0], None),  # the first test has nothing to be better than
        ({"patience": 1}, [0.0, 0.0], "patience"),
        ({"hours": 1}, [None], None),
        ({"hours": 1}, [None, None], "hours"),
        ({"gigabytes": 5}, [None, None], None),
        ({"gigabytes": 5}, [None, None, None], "gigabytes"),
        ({"target": 60, "hours": 1, "gigabytes": 1}, [50.0, 61.0], "target"),
        ({"patience": 1, "hours": 1}, [50.0, 49.0], "patience"),
    ],
)
def test_a_limit_is_met_at_its_value(
    stop: dict[str, float], accuracies: list[float | None], expected: str | None
) -> None:
    assert met(StopConfig(**stop), Standing.after(rows(*accuracies))) == expected


def test_a_diverged_round_meets_no_target_and_is_no_best() -> None:
    first, second = rows(50.0, 90.0)
    standing = Standing.after([first, replace(second, diverged=True)])
    assert (standing.accuracy, standing.best, standing.without_better) == (90.0, 50.0, 1)
    assert met(StopConfig(target=60), standing) is None
    assert met(StopConfig(target=60), standing.then(second)) == "target"


def losses(result: Any) -> list[float]:
    return [row["loss_semi"] for row in result.rounds]


def test_a_run_ends_at_its_limit_and_goes_on_beyond_it_as_if_there_had_been_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("semisfl"), "propagate", True)
    caplog.set_level(logging.INFO, "semisfl")
    uninterrupted = train(toy.values("semisfl"), out=tmp_path / "whole", **own())
    path = tmp_path / "run"
    limited = toy.values("semisfl", "stop.gigabytes=1e-9", "runtime.evaluate_every=3")
    first = train(limited, out=path, **own())
    assert first.stopped_by == "gigabytes" and not first.stopped
    (row,) = first.rounds
    assert row["stopped_by"] == "gigabytes" and "accuracy" in row, "the last round is tested"
    assert "ended after round 1: stop.gigabytes = 1e-09 is met (" in caplog.text
    assert checkpoint.read(path / "latest.safetensors")["round"] == 1
    assert read_run(path).finished and not read_run(path).complete
    assert losses(resume(path, **own())) == losses(first), "the limit is still met"
    last = resume(path, settings=["stop.gigabytes=none"], **own())
    assert last.stopped_by is None and losses(last) == losses(uninterrupted)
    states = [checkpoint.read(tmp_path / name / "latest.safetensors") for name in ("whole", "run")]
    assert checkpoint.digest(states[0]["method"]) == checkpoint.digest(states[1]["method"])
    assert RunDirectory.open(path).config().stop == StopConfig()


@pytest.mark.parametrize("mine", ["stop.target=80", 'sinks=["nowhere.module:Sink"]'])
def test_devices_are_not_told_of_limits_and_sinks(mine: str) -> None:
    def terms(*settings: str) -> Terms:
        return Terms(toy.values("semisfl", *settings), (3, 12, 12), 4, (0.5,) * 3, (0.5,) * 3)

    assert terms(mine).run == terms().run
    assert terms("seed=1").run != terms().run
    assert terms(mine).to_json() == terms().to_json()
