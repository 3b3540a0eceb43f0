"""What is read of a run directory, also of a damaged one and of somebody else's."""

import re
from pathlib import Path

import pytest

from reproduction.paper.index import RunIndex
from semisfl.cli.main import main
from semisfl.settings import presets
from semisfl.settings.plain_values import flatten
from tests.reproduction.fakes import digits_cell, leave_run


@pytest.mark.parametrize("name", presets.PRESETS)
def test_a_preset_differs_in_nothing_from_itself(name: str) -> None:
    values = presets.preset(name).model_dump(mode="json", exclude_none=True)
    assert presets.changes(flatten(values, lists=False)) == (name, {})


@pytest.mark.usefixtures("no_pictures")
def test_a_run_of_somebody_else_imports_no_method(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The run names a module on Python's path; importing the module would run its code."""
    runs, planted = tmp_path / "runs", tmp_path / "planted_method.py"
    planted.write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'owned')!r}).touch()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    run = leave_run(runs / "run", digits_cell().config(), [10.0, 20.0])
    config = (run / "config.toml").read_text()
    method = 'method = "planted_method:Thing"'
    (run / "config.toml").write_text(re.sub("^method = .*", method, config))
    assert main(["replay", "runs/run"]) == 2
    assert "add --allow-method planted_method:Thing" in " ".join(capsys.readouterr().err.split())
    assert main(["report", "runs"]) == 0
    assert main(["report", "runs", "--html", "x.html"]) == 0
    assert not RunIndex(runs, studies=()).of(digits_cell().config())
    assert not (tmp_path / "owned").exists()
