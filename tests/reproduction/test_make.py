"""``python -m reproduction`` trains missing runs once and continues unfinished ones."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reproduction.__main__ import main
from reproduction.paper.exhibits import EXHIBITS
from reproduction.paper.grid import Part
from reproduction.paper.index import RunIndex, chosen, missing
from semisfl.metrics import RoundMetrics
from semisfl.runs import start
from tests.cli.test_signals import images as images

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


def rows_of(run: Path) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def run(*words: str) -> int:
    """Run the command line, and return its exit code."""
    try:
        return main(list(words))
    except SystemExit as end:
        return int(end.code or 0)


def test_missing_runs_are_trained_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["digits", *TWO_ROUNDS, "--seeds", "2", "--out", str(tmp_path), "--quiet"]
    assert run(*words) == 0
    text = capsys.readouterr().out
    assert "| Supervised-only | **" in text and " ± " in text
    files = sorted(tmp_path.glob("*-seed*/metrics.jsonl"))
    assert [[row["round"] for row in rows_of(file.parent)] for file in files] == [[0, 1], [0, 1]]
    before = [file.stat().st_mtime_ns for file in files]
    assert run(*words) == 0
    assert [file.stat().st_mtime_ns for file in files] == before
    assert capsys.readouterr().out == text
    for suffix in ("md", "png", "svg"):
        assert (tmp_path / f"digits.{suffix}").stat().st_size


def test_an_interrupted_cell_is_continued(tmp_path: Path) -> None:
    cells = chosen(EXHIBITS["digits"].cells, ["supervised"])
    (left,) = missing(cells, RunIndex(tmp_path), rounds=2)

    class StopAfterOne:
        def write(self, metrics: RoundMetrics) -> None:
            begun.experiment.stop.request()

        def start(self, info: object) -> None: ...

        def close(self) -> None: ...

    with start.begin(left.config, out=left.path, device="cpu") as begun:
        assert begun.go([StopAfterOne()]).stopped
    first = rows_of(left.path)
    assert len(first) == 1
    assert run("digits", *TWO_ROUNDS, "--out", str(tmp_path), "--quiet") == 0
    assert rows_of(left.path)[0] == first[0] and len(rows_of(left.path)) == 2


def test_a_diverged_cell_is_written_and_ends_with_exit_code_4(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_cells(monkeypatch, "optimizer.lr=1e30")
    assert run("digits", *TWO_ROUNDS, "--out", str(tmp_path), "--quiet") == 4
    assert (tmp_path / "digits.md").exists()
