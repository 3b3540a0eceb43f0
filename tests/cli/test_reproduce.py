"""``semisfl reproduce`` trains missing runs once, also beside another process, and continues unfinished ones."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from semisfl.cli.main import main
from semisfl.metrics import RoundMetrics
from semisfl.paper.exhibits import EXHIBITS
from semisfl.paper.grid import Part
from semisfl.paper.missing import chosen, missing
from semisfl.paper.run_index import RunIndex
from semisfl.runs import pools, start
from tests.cli.test_signals import images as images
from tests.processes import Forked

TWO_ROUNDS = ["--rounds", "2", "--only", "supervised", "--device", "cpu"]
SMALL = (
    "data.labeled=8",
    "server.batch=4",
    "server.steps=2",
    "clients.total=3",
    "clients.active=3",
)


def change_cells(monkeypatch: pytest.MonkeyPatch, *changes: str) -> None:
    """Change settings of the table that these tests make."""

    def changed(part: Part) -> Part:
        cells = [replace(cell, changes=(*cell.changes, *changes)) for cell in part.cells]
        return replace(part, cells=tuple(cells))

    table = EXHIBITS["digits"]
    parts = tuple(changed(part) for part in table.parts)
    monkeypatch.setitem(EXHIBITS, "digits", replace(table, parts=parts))


@pytest.fixture(autouse=True)
def small(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use small images and few steps in the table."""
    change_cells(monkeypatch, *SMALL, f"data.name={images}", "data.augment.cutout=4")


def rows_of(run: Path) -> list[dict[str, float]]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def without_places(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in cell.items() if key != "runs"} for cell in cells]


def test_processes_share_the_cells_and_finished_ones_are_not_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "Popen", Forked)
    out = tmp_path / "at once"
    words = ["reproduce", "digits", *TWO_ROUNDS, "--seeds", "2", "--out", str(out), "--json"]
    assert main([*words, "--jobs", "2"]) == 0
    (exhibit,) = json.loads(capsys.readouterr().out.splitlines()[-1])["exhibits"]
    (cell,) = (cell for cell in exhibit["cells"] if cell["row"] == "Supervised-only")
    assert cell["rounds"] == 2 and cell["here"]["stderr"] is not None
    runs = [Path(run) for run in cell["runs"]]
    assert len(runs) == 2 and sorted(path.name for path in out.glob("*-seed*")) == sorted(
        run.name for run in runs
    )
    before = {run: (run / "metrics.jsonl").stat().st_mtime_ns for run in runs}
    assert [[row["round"] for row in rows_of(run)] for run in runs] == [[0, 1], [0, 1]]
    assert main(words) == 0
    (same,) = json.loads(capsys.readouterr().out)["exhibits"]
    assert same["cells"] == exhibit["cells"]
    assert {run: (run / "metrics.jsonl").stat().st_mtime_ns for run in runs} == before
    for suffix in ("md", "png", "svg"):
        assert (out / f"digits.{suffix}").stat().st_size
    assert "**" in (out / "digits.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_ray_runs_the_cells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for name, where in (("ray", ["--engine", "ray"]), ("here", [])):
        words = ["reproduce", "digits", *TWO_ROUNDS, *where, "--out", str(tmp_path / name)]
        assert main([*words, "--json"]) == 0
        outputs.append(json.loads(capsys.readouterr().out)["exhibits"][0]["cells"])
    assert without_places(outputs[0]) == without_places(outputs[1])
    (run,) = (tmp_path / "ray").glob("*-seed0*")
    process = int((run / "run.lock").read_text(encoding="utf-8").split()[1])
    assert process != os.getpid(), "a worker of Ray held it"


def test_an_interrupted_cell_is_continued(tmp_path: Path) -> None:
    cells = chosen(EXHIBITS["digits"].cells, ["supervised"])
    (left,) = missing(cells, RunIndex(tmp_path), rounds=2)

    class StopAfterOne:
        def write(self, metrics: RoundMetrics) -> None:
            run.experiment.stop.request()

        def start(self, info: object) -> None: ...

        def close(self) -> None: ...

    with start.begin(left.config, out=left.path, device="cpu") as run:
        assert run.go([StopAfterOne()]).stopped
    first = rows_of(left.path)
    assert len(first) == 1
    assert main(["reproduce", "digits", *TWO_ROUNDS, "--out", str(tmp_path), "--quiet"]) == 0
    assert rows_of(left.path)[0] == first[0] and len(rows_of(left.path)) == 2


def test_a_diverged_cell_is_written_and_ends_with_exit_code_4(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    change_cells(monkeypatch, "optimizer.lr=1e30")
    words = ["reproduce", "digits", *TWO_ROUNDS, "--out", str(tmp_path), "--quiet"]
    assert main(words) == 4
    assert "the run diverged" in capsys.readouterr().err
    assert (tmp_path / "digits.md").exists()


def test_a_cell_that_another_process_trains_is_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pools of processes have their own tests of it."""
    cells = chosen(EXHIBITS["digits"].cells, ["supervised"])
    (left,) = missing(cells, RunIndex(tmp_path), rounds=2)
    with start.begin(left.config, out=left.path, device="cpu"):
        assert main(["reproduce", "digits", *TWO_ROUNDS, "--out", str(tmp_path)]) == 0
        printed = capsys.readouterr()
    assert "is skipped: another process is training it" in printed.err
    assert "unfinished (round 0 of 2)" in printed.out


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, reason in (
        (["table9"], "'table9' is no known table or figure"),
        ([], "name a table or figure, or use --list to see them all"),
        (["table1", "--only", "nobody"], "--only 'nobody' fits no cell"),
        (["table1", "--from", str(tmp_path / "none")], "is no folder"),
    ):
        assert main(["reproduce", *words, "--out", str(tmp_path)]) == 2
        error = capsys.readouterr().err
        assert reason in error and error.count("\n") == 1
