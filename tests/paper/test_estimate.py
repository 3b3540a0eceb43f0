"""How long what is missing would take, from seconds per round of this machine."""

import json
from pathlib import Path
from typing import Any

import pytest

from semisfl.costs.bench import extrapolated
from semisfl.paper import estimate
from semisfl.paper.missing import missing
from semisfl.paper.records import Records
from semisfl.runs.directory import environment
from semisfl.settings.config import ConfigError
from tests.paper.fakes import digits_cell, leave_run


def bench_file(folder: Path, *rows: dict[str, Any], **machine: Any) -> Path:
    file = folder / "given.json"
    file.write_text(json.dumps({"environment": environment() | machine, "rounds": rows}))
    return file


def timed(method: str, seconds: float, **more: Any) -> dict[str, Any]:
    return {"preset": "digits", "method": method, "seconds_a_round": seconds, "steps": 10, **more}


def test_rounds_that_are_left_times_seconds(tmp_path: Path) -> None:
    cells = [digits_cell(), digits_cell("supervised")]
    leave_run(tmp_path / "out" / "begun", cells[0].config(), [10.0])
    left = missing(cells, Records(tmp_path / "out"), seeds=2)
    # A round of the preset has 10 steps; the second was timed with 5.
    file = bench_file(tmp_path, timed("semisfl", 4.0), timed("supervised", 1.5, steps=5))
    lines = estimate.estimate(left, file, measure=False)
    assert [(line.method, line.runs, line.rounds, line.seconds) for line in lines] == [
        ("semisfl", 2, 3, 12.0),
        ("supervised", 2, 4, 12.0),
    ]


def test_what_was_measured_once_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(estimate, "_measured", lambda *key: asked.append(key) or 2.0)
    file = tmp_path / "out" / "bench.json"
    for cells in ([digits_cell()], [digits_cell(), digits_cell("supervised")]):
        left = missing(cells, Records(tmp_path / "none"))
        lines = estimate.estimate(left, file, measure=True, device="cpu")
        assert {line.seconds for line in lines} == {4.0}
    assert asked == [("digits", "semisfl", "cpu"), ("digits", "supervised", "cpu")]


def test_a_file_that_does_not_say_it_is_refused_in_a_line(tmp_path: Path) -> None:
    left = missing([digits_cell()], Records(tmp_path / "none"))

    def refused(file: Path) -> str:
        with pytest.raises(ConfigError) as error:
            estimate.estimate(left, file, measure=False)
        return str(error.value)

    assert "does not time digits semisfl" in refused(bench_file(tmp_path, timed("fedmatch", 1.0)))
    assert "measured on NVIDIA H200, this machine has" in refused(
        bench_file(tmp_path, timed("semisfl", 1.0), gpu="NVIDIA H200")
    )
    assert "cannot read" in refused(tmp_path / "nothing.json")
    (tmp_path / "given.json").write_text("{}")
    assert "it lacks 'environment'" in refused(tmp_path / "given.json")


def test_a_whole_round_from_two_short_ones() -> None:
    assert extrapolated((1, 3.0), (4, 6.0), 50) == 6.0 + 46
    assert extrapolated((1, 3.0), (4, 2.0), 50) == 2.0, "a busy moment makes no negative time"
