"""Estimates of how long the missing runs take, from this machine's seconds per round."""

import json
from pathlib import Path
from typing import Any

import pytest

from semisfl.costs.bench import extrapolated
from semisfl.paper import estimate
from semisfl.paper.missing import missing
from semisfl.paper.run_index import RunIndex
from semisfl.runs.environment import environment
from semisfl.settings.config import ConfigError
from tests.paper.fakes import digits_cell, leave_run


def bench_file(folder: Path, *timings: dict[str, Any], **machine: Any) -> Path:
    file = folder / "bench.json"
    file.write_text(json.dumps({"environment": environment() | machine, "rounds": timings}))
    return file


def timed(method: str, seconds: float, **more: Any) -> dict[str, Any]:
    return {"preset": "digits", "method": method, "seconds_a_round": seconds, "steps": 10, **more}


def test_an_estimate_is_the_rounds_left_times_seconds_per_round(tmp_path: Path) -> None:
    cells = [digits_cell(), digits_cell("supervised")]
    leave_run(tmp_path / "out" / "begun", cells[0].config(), [10.0])
    left = missing(cells, RunIndex(tmp_path / "out"), seeds=2)
    # A round of the preset has 10 steps; the second was timed with 5.
    file = bench_file(tmp_path, timed("semisfl", 4.0), timed("supervised", 1.5, steps=5))
    lines = estimate.estimate(left, file, measure=False)
    assert [(line.method, line.runs, line.rounds, line.seconds) for line in lines] == [
        ("semisfl", 2, 3, 12.0),
        ("supervised", 2, 4, 12.0),
    ]


def test_a_measured_time_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(estimate, "_measured", lambda *key: asked.append(key) or 2.0)
    file = tmp_path / "out" / "bench.json"
    for cells in ([digits_cell()], [digits_cell(), digits_cell("supervised")]):
        left = missing(cells, RunIndex(tmp_path / "none"))
        lines = estimate.estimate(left, file, measure=True, device="cpu")
        assert {line.seconds for line in lines} == {4.0}
    assert asked == [("digits", "semisfl", "cpu"), ("digits", "supervised", "cpu")]


def test_a_file_without_the_needed_timing_is_refused(tmp_path: Path) -> None:
    left = missing([digits_cell()], RunIndex(tmp_path / "none"))

    def refused(file: Path) -> str:
        with pytest.raises(ConfigError) as error:
            estimate.estimate(left, file, measure=False)
        return str(error.value)

    assert "does not time digits semisfl" in refused(bench_file(tmp_path, timed("fedmatch", 1.0)))
    assert "measured on NVIDIA H200, this machine has" in refused(
        bench_file(tmp_path, timed("semisfl", 1.0), gpu="NVIDIA H200")
    )
    assert "cannot read" in refused(tmp_path / "nothing.json")
    (tmp_path / "bench.json").write_text("{}")
    assert "it lacks 'environment'); run it again" in refused(tmp_path / "bench.json")


def test_a_whole_round_is_extrapolated_from_two_short_ones() -> None:
    assert extrapolated((1, 3.0), (4, 6.0), 50) == 6.0 + 46
    assert extrapolated((1, 3.0), (4, 2.0), 50) == 2.0, "noise must not give a negative slope"
