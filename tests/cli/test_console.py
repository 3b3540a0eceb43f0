"""Nobody may be left to read how far a command is, and the disk under it may be full."""

import errno
import io
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from semisfl.__main__ import run
from semisfl.cli import console, output, progress, signals, use_model
from semisfl.cli.main import main
from semisfl.metrics import RoundMetrics
from semisfl.runs.directory import RunDirectory, Taken
from semisfl.runs.sinks import RunInfo
from semisfl.settings import presets
from semisfl.use.classifier import Predictions
from semisfl.use.evaluation import judge
from semisfl.use.pictures import Skipped
from tests.disk import largest_file


class Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_names_of_files_and_classes_do_not_steer_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = ["a\x1b[2Jb.png", "c\nd.png", "e\udcffé.png"]
    classes = ("cat [bold]", "dog [/x]", "e\x1b[31m")
    shares = torch.tensor([[0.5, 0.3, 0.2]])
    skipped = [Skipped(name, "no") for name in names]
    predictions = Predictions(names[:1], shares, classes, skipped)
    use_model.print_predictions(predictions, 3, as_json=False, as_csv=False)
    out, err = capsys.readouterr()
    assert out == "a?[2Jb.png: cat [bold] 50.0 %, dog [/x] 30.0 %, e?[31m 20.0 %\n"
    assert err.splitlines() == [
        f"warning: skipped {name}: no" for name in ("a?[2Jb.png", "c?d.png", "e?é.png")
    ]
    use_model._print(judge(classes, torch.eye(3), torch.arange(3)))
    out = capsys.readouterr().out
    for name in ("cat [bold]", "dog [/x]", "e?[31m"):
        assert out.count(f" {name} ") == 3, "a line of each table, and a column"


def test_a_path_in_a_suggested_command_can_be_pasted(tmp_path: Path) -> None:
    run = tmp_path / "my run"
    run.mkdir()
    (run / "config.toml").touch()
    with pytest.raises(Taken, match=rf"continue it with --resume '{run}'"):
        RunDirectory.check_free(run)


def speak() -> None:
    console.say("a line")
    console._Warnings().emit(logging.LogRecord("semisfl", 30, "", 0, "a warning", (), None))
    lines = progress.RunProgress("semisfl")
    lines.start(RunInfo(presets.preset("digits"), 0, None))
    lines.write(RoundMetrics(round=0, seconds=1.0))


def test_a_full_disk_for_stderr_loses_only_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stderr", Full())
    speak()


@pytest.mark.parametrize("words", ["list", "show digits --json", "run --help"])
def test_results_that_nobody_reads_are_no_failure(words: str) -> None:
    command = [sys.executable, "-m", "semisfl", *words.split()]
    read, write = os.pipe()
    os.close(read)
    with open(write, "wb") as nobody:
        done = subprocess.run(command, stdout=nobody, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("encoding", "errors", "expected"),
    [
        ("ascii", "surrogateescape", b"\\u65e5 \\xe9\\udcff"),  # as Python does in the locale C
        ("latin-1", "strict", b"\\u65e5 \xe9\\udcff"),
        ("utf-8", "strict", b"\xe6\x97\xa5 \xc3\xa9\\udcff"),
    ],
)
def test_stdout_takes_all_letters(
    encoding: str, errors: str, expected: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.BytesIO()
    stdout = io.TextIOWrapper(written, encoding=encoding, errors=errors)
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setattr("semisfl.__main__.main", lambda: print("日 é\udcff", end="", flush=True))
    monkeypatch.setattr(signals, "ignore", lambda: None)
    run()
    assert written.getvalue() == expected


def test_a_run_continues_if_nobody_reads_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    with open(write, "w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        os.close(read)
        speak()
        speak()
        assert os.path.samestat(os.fstat(write), os.stat(os.devnull))


@pytest.mark.parametrize("width", [70, 80, 120])
def test_a_wide_table_has_its_names_and_numbers_whole(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table of a sweep over eight values is wide; one that fits is no wider than the terminal."""
    monkeypatch.setattr(console.out, "_width", width)
    for values in (3, 8):
        table = output.table("accuracy", ("method", *map(str, range(values))))
        table.add_row("FedSwitch-SL*", *["93.6 ± 10.4"] * values)
        output.show(table)
        printed = capsys.readouterr().out
        assert "method" in printed and printed.count("93.6 ± 10.4") == values
        row = next(line for line in printed.splitlines() if "93.6" in line)
        assert row.startswith(" FedSwitch-SL*") and (values == 8 or len(row) <= width)
    assert console.out.width == width


def test_lines_may_be_json(capsys: pytest.CaptureFixture[str]) -> None:
    """The option may stand anywhere, and the last line of a failed command is JSON too."""
    for words in (
        ["--log-format", "json", "show", "nothing"],
        ["show", "nothing", "--log-format=json"],
    ):
        assert main(words) == 2
        line = json.loads(capsys.readouterr().err)
        assert line["level"] == "error" and "nothing" in line["message"]
    assert main(["show", "nothing", "--log-format", "xml"]) == 2
    assert (
        "error: Invalid value for '--log-format': 'xml' is not one of 'text', 'json'"
        in capsys.readouterr().err
    )


def test_no_bar_is_drawn_among_lines_of_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(console.err), "is_terminal", True)
    monkeypatch.setattr(console, "_as_json", True)
    with progress.many_runs(quiet=False) as tell:
        tell(1, 2, 3, 4)
    assert json.loads(capsys.readouterr().err)["message"] == "1 of 2 runs, 3 of 4 rounds"


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_full_disk_leaves_the_old_picture_and_a_warning_names_it(
    suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / f"who.{suffix}"
    picture.write_bytes(b"old")
    with largest_file(100):
        assert main(["show", "digits", "--partition", str(picture)]) == 0
    assert f"warning: no picture: {picture}: File too large" in capsys.readouterr().err
    assert picture.read_bytes() == b"old" and list(tmp_path.iterdir()) == [picture]
