"""Numbers read from runs, and how they are shown beside the paper's."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from reproduction import records
from reproduction.paper import drawn, written
from reproduction.paper.exhibits import EXHIBITS
from reproduction.paper.grid import Cell, Exhibit, Part, Value
from reproduction.paper.index import RunIndex
from reproduction.paper.measures import CURVES, MEASURES, NEVER, replayed
from semisfl.metrics import RoundMetrics
from semisfl.runs.report import Run
from tests.pictures import cut_off
from tests.reproduction.fakes import digits_cell, leave_run


def exhibit(*cells: Cell, **part: object) -> Exhibit:
    parts = (Part(title="Accuracy", cells=cells, **part),)  # type: ignore[arg-type]
    return Exhibit(name="mine", label="Table X", title="mine", parts=parts, notes=("assumed",))


def text_of(one: Exhibit, folder: Path, rounds: int | None = None) -> str:
    parts = written.measured(one, RunIndex(folder, studies=()), rounds)
    return written.text_of(one, parts)


def run_with(**columns: Sequence[float]) -> Run:
    count = len(next(iter(columns.values())))
    rounds = [
        RoundMetrics.from_dict({"round": number, **{key: columns[key][number] for key in columns}})
        for number in range(count)
    ]
    return Run(Path("run"), {"rounds": count}, rounds)


# --- text ------------------------------------------------------------------------------------------


def test_a_cell_has_our_number_the_papers_and_the_difference(tmp_path: Path) -> None:
    cell = digits_cell(paper=Value(80.0, 0.5))
    for seed, accuracy in ((0, 82.0), (1, 84.0)):
        leave_run(tmp_path / f"s{seed}", cell.config(seed=seed), [10.0, accuracy])
    text = text_of(exhibit(cell), tmp_path)
    assert "| semisfl | **83.0 ± 1.0** / 80.0 ± 0.5 / +3.0 |" in text
    assert f"| semisfl, digits | 2 | 2 | digits | `{tmp_path}/s0`, `{tmp_path}/s1` |" in text
    assert "- assumed" in text and "fewer rounds" not in text


def test_an_empty_cell_says_why(tmp_path: Path) -> None:
    cells = [digits_cell(paper=Value(80.0)), digits_cell("supervised"), digits_cell("fedswitch")]
    text = text_of(exhibit(*cells), tmp_path)
    assert "| semisfl | not run / 80.0 |" in text
    assert "| supervised | not run |" in text
    assert "| fedswitch\\* | not run |" in text and "\\* FedSwitch: a reconstruction" in text
    assert "behind these numbers" not in text


def test_a_table_names_fewer_rounds_and_stand_ins(tmp_path: Path, no_records: Path) -> None:
    cell = digits_cell(paper=Value(80.0))
    run = leave_run(tmp_path / "short", cell.config(1), [60.0])
    records.record(run, "mine/short", "hand-drawn ones")
    # The next row has no run, so it has no note about its data.
    one = exhibit(cell, digits_cell("supervised"))
    text = written.text_of(one, written.measured(one, RunIndex()))
    assert "| semisfl | **60.0**† (1 rounds) / 80.0 / -20.0 |" in text
    assert "| 1 of 2 | 1 | hand-drawn ones |" in text
    assert "† digits here: hand-drawn ones." in text and written.FEWER in text
    assert "not run / 80.0" in text_of(exhibit(cell), tmp_path, rounds=2)


# --- numbers by hand ----------------------------------------------------------------------------------


def test_bytes_are_counted_up_to_the_first_test_at_the_target() -> None:
    run = run_with(accuracy=[10.0, 50.0, 40.0, 60.0], bytes_total=[1e9, 2e9, 3e9, 4e9])
    of = MEASURES["gigabytes"].of
    assert of(run, digits_cell(target=50.0)) == 2.0
    assert of(run, digits_cell(target=50.1)) == 4.0
    assert of(run, digits_cell(target=60.1)) == NEVER


def test_hours_are_those_of_the_virtual_clock_up_to_the_target() -> None:
    """Compare with `replay` of a committed run over the paper's connections."""
    run = records.run("compare/semisfl")
    cell = Cell(row="SemiSFL", column="75 %", preset="cifar10", target=75.0)
    first = next(metrics.round for metrics in run.tested if (metrics.accuracy or 0) >= 75)
    expected = sum(replayed(run).seconds[: first + 1]) / 3600
    assert MEASURES["hours"].of(run, cell) == pytest.approx(expected)
    assert MEASURES["hours"].of(run, replace(cell, target=99.0)) == NEVER
    unpriced = replace(run, rounds=[replace(metrics, bytes_total=None) for metrics in run.rounds])
    assert MEASURES["hours"].of(unpriced, cell) == "not timed"


def test_equilibrium_is_fifty_rounds_of_small_variance() -> None:
    falling = [100.0 - number for number in range(30)]
    run = run_with(loss_supervised=[*falling, *[1.0] * 50], loss_semi=[0.0] * 80)
    assert MEASURES["equilibrium"].of(run, digits_cell()) == 80
    still = run_with(loss_supervised=falling, loss_semi=falling)
    assert MEASURES["equilibrium"].of(still, digits_cell()) == NEVER


def test_falls_are_between_means_of_ten_rounds() -> None:
    run = run_with(loss_semi=[3.0] * 10 + [1.0] * 10 + [2.0] * 10)
    assert CURVES["fall_semi"][1](run.rounds) == [(20, 2.0), (30, -1.0)]


def test_the_share_of_falls_in_which_the_semi_supervised_loss_fell_more() -> None:
    """In ten falls, one loss falls by 1 six times and then stays; the other falls by 0.5 every time."""
    levels = [10.0, 9, 8, 7, 6, 5, 4, 4, 4, 4, 4]
    run = run_with(
        loss_semi=[level for level in levels for _ in range(10)],
        loss_supervised=[9.0 - 0.5 * (number // 10) for number in range(110)],
    )
    assert CURVES["semi_faster_share"][1](run.rounds) == [(110, 0.6)]
    assert MEASURES["semi_faster_share"].of(run, digits_cell()) == 0.6


# --- pictures -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["table1", "fig5", "fig9", "vgg"])
def test_the_picture_shows_all_its_text(name: str, index: RunIndex) -> None:
    one = EXHIBITS[name]
    parts = written.measured(one, index)
    assert cut_off(drawn.picture(one, parts)) == 0
