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

from semisfl.__main__ import run
from semisfl.cli import console, progress, signals
from semisfl.cli.main import main
from semisfl.metrics import RoundMetrics
from semisfl.runs.sinks import RunInfo
from semisfl.settings import presets
from tests.disk import largest_file


class Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


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


def test_results_that_nobody_reads_are_no_failure() -> None:
    command = [sys.executable, "-m", "semisfl", "show", "digits", "--json"]
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


def test_lines_may_be_json(capsys: pytest.CaptureFixture[str]) -> None:
    """The option may stand anywhere, and the last line of a failed command is JSON too."""
    for words in (
        ["--log-format", "json", "show", "nothing"],
        ["show", "nothing", "--log-format=json"],
    ):
        assert main(words) == 2
        line = json.loads(capsys.readouterr().err)
        assert line["level"] == "error" and "nothing" in line["message"]


def test_a_full_disk_leaves_the_old_picture_and_a_warning_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "who.png"
    picture.write_bytes(b"old")
    with largest_file(100):
        assert main(["show", "digits", "--partition", str(picture)]) == 0
    assert f"warning: no picture: {picture}: File too large" in capsys.readouterr().err
    assert picture.read_bytes() == b"old" and list(tmp_path.iterdir()) == [picture]
