"""The index finds runs by their settings; the missing runs are the rest."""

from pathlib import Path

from reproduction import records
from reproduction.paper.exhibits import EXHIBITS
from reproduction.paper.grid import Cell
from reproduction.paper.index import RunIndex, missing
from semisfl.runs.compare import Job
from tests.reproduction.fakes import digits_cell, leave_run


def test_a_recorded_run_is_found_by_its_settings(no_records: Path, tmp_path: Path) -> None:
    cell = digits_cell()
    config = cell.config(more=["runtime.checkpoint_every=3", "stop.target=99"])
    records.record(leave_run(tmp_path / "run", config, [10.0, 20.0]), "mine/anything", "hand-drawn")
    index = RunIndex(tmp_path / "out")
    assert index.result(cell).rounds == 2 and index.result(cell).data == "hand-drawn"
    assert missing([cell], index) == []
    assert [one.config.seed for one in missing([cell], index, seeds=2)] == [1]
    assert len(missing([digits_cell("supervised")], index)) == 1


def test_an_unfinished_run_is_continued_only_in_the_output_folder(
    no_records: Path, tmp_path: Path
) -> None:
    cell, out = digits_cell(), tmp_path / "out"
    begun = leave_run(out / "mine", cell.config(more=["stop.target=99"]), [10.0])
    (left,) = missing([cell], RunIndex(out))
    assert left.path == begun and left.config.stop.target is None
    assert Job(left.config, left.path).status == "unfinished"
    records.record(begun, "mine/begun")
    (left,) = missing([cell], RunIndex(tmp_path / "other"))
    assert left.path.parent == tmp_path / "other"


def test_a_result_has_the_cells_own_rounds_or_those_asked_for(tmp_path: Path) -> None:
    cell = digits_cell()
    for rounds in (1, 2, 3):
        leave_run(tmp_path / f"r{rounds}", cell.config(rounds), [50.0 + rounds] * rounds)
    index = RunIndex(tmp_path, studies=())
    assert index.result(cell).rounds == 2  # the cell's own, not the longest
    assert index.result(cell, 1).rounds == 1
    assert index.result(cell, 5).rounds is None


def test_a_stand_in_is_used_and_named_if_the_papers_set_has_no_run(tmp_path: Path) -> None:
    def index() -> RunIndex:
        return RunIndex(tmp_path, studies=())

    cell = Cell(row="SemiSFL", column="IMAGE-100", preset="image100", rounds=1)
    changes = ["data.name=miniimagenet", "data.labeled=5000"]
    leave_run(tmp_path / "stand-in", cell.config(more=changes), [10.0])
    assert "mini-ImageNet" in index().result(cell).data
    assert missing([cell], index(), stand_ins=True) == []
    assert len(missing([cell], index())) == 1
    leave_run(tmp_path / "real", cell.config(), [20.0])
    result = index().result(cell)
    assert result.data == "" and result.runs[0].path.name == "real"


def test_the_committed_runs_fill_their_cells(index: RunIndex) -> None:
    """Check some cells of Tables I and II against the names of the committed runs."""
    table = {
        (cell.row, cell.column): [run.path.name for run in index.result(cell, 1000).runs]
        for name in ("table1", "table2")
        for cell in EXHIBITS[name].cells
    }
    seeds = ("", "-seed1", "-seed2")
    assert table["SemiSFL", "CIFAR-10"] == [f"cifar10-dir0.1-semisfl{seed}" for seed in seeds]
    assert table["Supervised-only", "SVHN"] == [f"svhn-supervised{seed}" for seed in seeds]
    assert table["FedMatch", "SVHN"] == ["svhn-dir0.1-fedmatch"]
