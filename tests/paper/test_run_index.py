"""The index finds runs by their configuration; the missing runs are the rest."""

from pathlib import Path

import pytest

from semisfl.paper.grid import Cell
from semisfl.paper.missing import chosen, missing
from semisfl.paper.run_index import RunIndex
from semisfl.runs.compare import Job
from semisfl.runs.reading import name_of
from semisfl.settings.config import ConfigError
from tests.paper.fakes import digits_cell, leave_run


def test_a_run_is_found_under_any_folder_name(tmp_path: Path) -> None:
    cell = digits_cell()
    config = cell.config(more=["runtime.checkpoint_every=3", "stop.target=99"])
    leave_run(tmp_path / "record" / "a" / "anything", config, [10.0, 20.0])
    index = RunIndex(tmp_path / "out", [tmp_path / "record"])
    assert index.result(cell).rounds == 2
    assert missing([cell], index) == []
    assert [one.config.seed for one in missing([cell], index, seeds=2)] == [1]
    assert len(missing([digits_cell("supervised")], index)) == 1


def test_an_unfinished_run_is_continued_only_in_the_output_folder(tmp_path: Path) -> None:
    cell = digits_cell()
    out, other = tmp_path / "out", tmp_path / "record"
    begun = leave_run(out / "mine", cell.config(more=["stop.target=99"]), [10.0])
    (left,) = missing([cell], RunIndex(out))
    assert left.path == begun and left.config.stop.target is None
    assert Job.of(left.config, left.path).status == "unfinished"
    begun.rename(other)
    (left,) = missing([cell], RunIndex(out, [other]))
    assert left.path.parent == out  # runs elsewhere are only read
    assert RunIndex(out, [other]).result(cell).unfinished


def test_a_result_has_the_cells_own_rounds_or_those_asked_for(tmp_path: Path) -> None:
    cell = digits_cell()
    for rounds in (1, 2, 3):
        leave_run(tmp_path / f"r{rounds}", cell.config(rounds), [50.0 + rounds] * rounds)
    index = RunIndex(tmp_path)
    assert index.result(cell).rounds == 2  # the cell's own, not the longest
    assert index.result(cell, 1).rounds == 1
    assert index.result(cell, 5).rounds is None


def test_equal_runs_count_once(tmp_path: Path) -> None:
    cell = digits_cell()
    for name, accuracy in (("a", 10.0), ("b", 30.0)):
        leave_run(tmp_path / name, cell.config(), [accuracy] * 2)
    (indexed,) = RunIndex(tmp_path).result(cell).runs
    assert indexed.path.name == "a"


def test_runs_behind_symbolic_links_are_found_once(tmp_path: Path) -> None:
    cell = digits_cell()
    there = leave_run(tmp_path / "elsewhere" / "run", cell.config(), [10.0, 20.0])
    folder = tmp_path / "links"
    folder.mkdir()
    (folder / "a").symlink_to(there)
    (folder / "round-and-round").symlink_to(folder)
    (indexed,) = RunIndex(folder).result(cell).runs
    assert indexed.path.resolve() == there.resolve()


def test_a_stand_in_is_used_and_named_if_the_papers_set_has_no_run(tmp_path: Path) -> None:
    cell = Cell(row="SemiSFL", column="IMAGE-100", preset="image100", rounds=1)
    changes = ["data.name=miniimagenet", "data.labeled=5000"]
    leave_run(tmp_path / "stand-in", cell.config(more=changes), [10.0])
    assert "mini-ImageNet" in RunIndex(tmp_path).result(cell).data
    assert missing([cell], RunIndex(tmp_path), stand_ins=True) == []
    assert len(missing([cell], RunIndex(tmp_path))) == 1
    leave_run(tmp_path / "real", cell.config(), [20.0])
    result = RunIndex(tmp_path).result(cell)
    assert result.data == "" and result.runs[0].path.name == "real"


def test_a_stand_ins_file_names_the_data_that_was_used(tmp_path: Path) -> None:
    cell = digits_cell()
    leave_run(tmp_path / "deep" / "run", cell.config(), [10.0, 20.0])
    (tmp_path / "stand-ins.toml").write_text('digits = "hand-drawn"\n', encoding="utf-8")
    assert RunIndex(tmp_path).result(cell).data == "hand-drawn"
    (tmp_path / "stand-ins.toml").write_text("digits = \n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"stand-ins.toml is not TOML"):
        RunIndex(tmp_path)


def test_an_error_names_the_configuration_that_does_not_parse(tmp_path: Path) -> None:
    run = leave_run(tmp_path / "old", digits_cell().config(), [10.0, 20.0])
    file = run / "config.toml"
    file.write_text("gone = 1\n" + file.read_text(encoding="utf-8"), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"old cannot be read .*unknown key 'gone'.*move"):
        RunIndex(tmp_path)


def test_a_folder_that_holds_another_run_is_refused(tmp_path: Path) -> None:
    (left,) = missing([digits_cell()], RunIndex(tmp_path))
    leave_run(left.path, digits_cell().config(more=["clients.steps=3"]), [10.0, 20.0])
    with pytest.raises(ConfigError, match=r"other settings \(clients.steps = 3 there, 10 here\)"):
        Job.of(left.config, left.path)


def test_only_selects_cells_by_whole_words() -> None:
    cells = [digits_cell(method) for method in ("semisfl", "supervised", "fedswitch-sl")]
    assert chosen(cells, []) == cells
    assert chosen(cells, ["supervised, SemiSFL"]) == cells[:2]
    assert chosen(cells, ["digits", "supervised"]) == cells[1:2]
    with pytest.raises(ConfigError, match=r"'fedswitch' fits no cell.*fedswitch-sl"):
        chosen(cells, ["fedswitch"])  # a part of a name does not match
    with pytest.raises(ConfigError, match="fits no cell"):
        chosen(cells, [","])


def test_the_committed_runs_fill_their_cells(index: RunIndex) -> None:
    """Check some cells of Tables I and II against the names of the committed runs."""
    from semisfl.paper.exhibits import EXHIBITS

    table = {
        (cell.row, cell.column): index.result(cell, 1000).runs
        for name in ("table1", "table2")
        for cell in EXHIBITS[name].cells
    }
    names = {
        key: [name_of(indexed.path) for indexed in runs] for key, runs in table.items() if runs
    }
    assert names[("SemiSFL", "CIFAR-10")] == [
        "cifar10-dir0.1-semisfl",
        "cifar10-dir0.1-semisfl-seed1",
        "cifar10-dir0.1-semisfl-seed2",
    ]
    assert names[("Supervised-only", "SVHN")] == [
        "svhn-supervised",
        "svhn-supervised-seed1",
        "svhn-supervised-seed2",
    ]
    assert names[("FedMatch", "SVHN")] == ["svhn-dir0.1-fedmatch"]
