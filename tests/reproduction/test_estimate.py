"""Estimates of how long the missing runs take, from this machine's seconds per round."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from reproduction import make as estimate
from reproduction.paper.index import RunIndex, missing
from tests.reproduction.fakes import digits_cell, leave_run


def test_an_estimate_is_the_rounds_left_times_seconds_per_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = {"semisfl": 4.0, "supervised": 1.5}
    monkeypatch.setattr(
        estimate, "seconds_per_round", lambda preset, method, device: seconds[method]
    )
    cells = [digits_cell(), digits_cell("supervised")]
    leave_run(tmp_path / "begun", cells[0].config(), [10.0])
    left = missing(cells, RunIndex(tmp_path, studies=()), seeds=2)
    assert estimate.show_estimate(left, "cpu") == 3 * 4.0 + 4 * 1.5
    assert "supervised" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_an_estimate(number: signal.Signals, tmp_path: Path) -> None:
    """It times image100 on the CPU, which takes minutes."""
    command = [sys.executable, "-m", "reproduction", "estimate", "table1", "--only", "image100"]
    process = subprocess.Popen(
        [*command, "--out", str(tmp_path), "--device", "cpu"], stderr=subprocess.PIPE
    )
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(4)
        process.send_signal(number)
        assert process.wait(10) != 0
    finally:
        process.kill()
        process.communicate()
