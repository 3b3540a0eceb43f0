"""Runs are found again by their configuration; what is missing is what is left to do."""

from pathlib import Path

import pytest

from semisfl.paper.grid import Cell
from semisfl.paper.missing import chosen, missing
from semisfl.paper.records import Records
from semisfl.runs.compare import Job
from semisfl.runs.reading import name_of
from semisfl.settings.config import ConfigError
from tests.paper.fakes import digits_cell, leave_run

RESULTS = Path(__file__).parents[2] / "results"


def test_a_run_is_found_whatever_its_folder_is_called(tmp_path: Path) -> None:
    cell = digits_cell()
    config = cell.config(more=["runtime.checkpoint_every=3", "stop.target=99"])
    leave_run(tmp_path / "record" / "a" / "anything", config, [10.0, 20.0])
    records = Records(tmp_path / "out", [tmp_path / "record"])
    assert records.result(cell).rounds == 2
    assert missing([cell], records) == []
    assert [one.config.seed for one in missing([cell], records, seeds=2)] == [1]
    assert len(missing([digits_cell("supervised")], records)) == 1


def test_an_unfinished_run_is_continued_where_it_may_be(tmp_path: Path) -> None:
    cell = digits_cell()
    out, other = tmp_path / "out", tmp_path / "record"
    begun = leave_run(out / "mine", cell.config(more=["stop.target=99"]), [10.0])
    (left,) = missing([cell], Records(out))
    assert left.path == begun and left.config.stop.target is None
    assert Job.of(left.config, left.path).status == "unfinished"
    begun.rename(other)
    (left,) = missing([cell], Records(out, [other]))
    assert left.path.parent == out  # another's record is only read
    assert Records(out, [other]).result(cell).unfinished


def test_more_rounds_count_and_rounds_asked_for_are_kept_to(tmp_path: Path) -> None:
    cell = digits_cell()
    for rounds in (1, 2, 3):
        leave_run(tmp_path / f"r{rounds}", cell.config(rounds), [50.0 + rounds] * rounds)
    records = Records(tmp_path)
    assert records.result(cell).rounds == 2  # the cell's own, not the longest
    assert records.result(cell, 1).rounds == 1
    assert records.result(cell, 5).rounds is None


def test_equal_runs_count_once(tmp_path: Path) -> None:
    cell = digits_cell()
    for name, accuracy in (("a", 10.0), ("b", 30.0)):
        leave_run(tmp_path / name, cell.config(), [accuracy] * 2)
    (record,) = Records(tmp_path).result(cell).records
    assert record.path.name == "a"


def test_runs_that_are_only_linked_to_are_found_once(tmp_path: Path) -> None:
    cell = digits_cell()
    there = leave_run(tmp_path / "elsewhere" / "run", cell.config(), [10.0, 20.0])
    folder = tmp_path / "links"
    folder.mkdir()
    (folder / "a").symlink_to(there)
    (folder / "round-and-round").symlink_to(folder)
    (record,) = Records(folder).result(cell).records
    assert record.path.resolve() == there.resolve()


def test_a_stand_in_counts_where_the_papers_set_has_no_run_and_is_named(tmp_path: Path) -> None:
    cell = Cell(row="SemiSFL", column="IMAGE-100", preset="image100", rounds=1)
    changes = ["data.name=miniimagenet", "data.labeled=5000"]
    leave_run(tmp_path / "stand-in", cell.config(more=changes), [10.0])
    assert "mini-ImageNet" in Records(tmp_path).result(cell).data
    assert missing([cell], Records(tmp_path), stand_ins=True) == []
    assert len(missing([cell], Records(tmp_path))) == 1
    leave_run(tmp_path / "real", cell.config(), [20.0])
    result = Records(tmp_path).result(cell)
    assert result.data == "" and result.records[0].path.name == "real"


def test_a_note_says_what_a_sets_name_stood_for(tmp_path: Path) -> None:
    cell = digits_cell()
    leave_run(tmp_path / "deep" / "run", cell.config(), [10.0, 20.0])
    (tmp_path / "stand-ins.toml").write_text('digits = "hand-drawn"\n', encoding="utf-8")
    assert Records(tmp_path).result(cell).data == "hand-drawn"
    (tmp_path / "stand-ins.toml").write_text("digits = \n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"stand-ins.toml is not TOML"):
        Records(tmp_path)


def test_a_configuration_that_no_longer_parses_is_named(tmp_path: Path) -> None:
    run = leave_run(tmp_path / "old", digits_cell().config(), [10.0, 20.0])
    file = run / "config.toml"
    file.write_text("gone = 1\n" + file.read_text(encoding="utf-8"), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"old cannot be read .*unknown key 'gone'.*move"):
        Records(tmp_path)


def test_a_folder_that_holds_another_run_is_refused(tmp_path: Path) -> None:
    (left,) = missing([digits_cell()], Records(tmp_path))
    leave_run(left.path, digits_cell().config(more=["clients.steps=3"]), [10.0, 20.0])
    with pytest.raises(ConfigError, match=r"other settings \(clients.steps = 3 there, 10 here\)"):
        Job.of(left.config, left.path)


def test_only_some_cells() -> None:
    cells = [digits_cell(method) for method in ("semisfl", "supervised", "fedswitch-sl")]
    assert chosen(cells, []) == cells
    assert chosen(cells, ["supervised, SemiSFL"]) == cells[:2]
    assert chosen(cells, ["digits", "supervised"]) == cells[1:2]
    with pytest.raises(ConfigError, match=r"'fedswitch' fits no cell.*fedswitch-sl"):
        chosen(cells, ["fedswitch"])  # no part of a name
    with pytest.raises(ConfigError, match="fits no cell"):
        chosen(cells, [","])


def test_the_committed_records_fill_their_cells() -> None:
    """Every run on the H200 at the preset's own settings is a cell of some table."""
    from semisfl.paper.exhibits import EXHIBITS

    records = Records(RESULTS / "none", [RESULTS])
    table = {
        (cell.row, cell.column): records.result(cell, 1000).records
        for name in ("table1", "table2")
        for cell in EXHIBITS[name].cells
    }
    found = {key: [name_of(record.path) for record in runs] for key, runs in table.items() if runs}
    assert found[("SemiSFL", "CIFAR-10")] == ["cifar10-dir0.1-semisfl"]
    assert found[("Supervised-only", "SVHN")] == [
        "svhn-supervised",
        "svhn-supervised-seed1",
        "svhn-supervised-seed2",
    ]
    assert found[("FedMatch", "SVHN")] == ["svhn-dir0.1-fedmatch"]
