"""``serve`` and ``join`` as a shell sees them: mistakes, full disks, and a run's end."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest

from semisfl.cli.main import main
from semisfl.runs import checkpoint
from semisfl.runs.directory import RunDirectory
from tests.cli.test_cli import write_images
from tests.net.harness import accept_all, tiny
from tests.processes import Forked

TINY = ["--set", "rounds=2", "clients.total=1", "clients.active=1", "clients.batch=4"]
TINY += ["clients.steps=2", "server.batch=4", "server.steps=2", "model.projection=8"]


@pytest.fixture
def labeled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for folder in ("train/a", "train/b", "test/a", "test/b"):
        write_images(tmp_path / "labeled" / folder, 8, rng)
    return tmp_path / "labeled"


def serve_words(labeled: Path, *more: str) -> list[str]:
    words = ["serve", "--labeled", str(labeled), "--insecure-loopback", "--listen", "127.0.0.1:0"]
    return [*words, *more]


def refused(capsys: pytest.CaptureFixture[str], words: list[str], pattern: str) -> None:
    capsys.readouterr()
    assert main(words) == 2
    *earlier, line = capsys.readouterr().err.strip().splitlines()
    assert all(one.startswith(("info: ", "warning: ", "devices ", "listening ")) for one in earlier)
    assert re.match(rf"error: .*{pattern}", line), line


def test_mistakes_leave_no_directory(labeled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*serve_words(labeled, "digits"), "--out", "out", *TINY]
    for change, error in (
        (["--labeled", "nowhere"], "nowhere"),
        (["--labeled", str(labeled / "train" / "a")], "a holds no labelled images"),
        (
            ["--listen", "127.0.0.1:99999"],
            r"'127.0.0.1:99999' is not HOST:PORT.*ports end at 65535",
        ),
        (["--listen", "127.0.0.1"], "is not HOST:PORT"),
        (["--listen", "local host:8443"], "'local host:8443' is not HOST:PORT"),
        (["--listen", "https://server:8443"], "'https://server:8443' is not HOST:PORT"),
        (["--listen", "192.0.2.1:1"], "not a loopback address"),
        (
            ["--listen", "::1:0"],
            r"'::1:0' is not HOST:PORT; IPv6 is written as \[2001:db8::7\]:8443",
        ),
        (["--metrics", "nowhere"], "--metrics 'nowhere' is not HOST:PORT"),
        (["--watch", "0.0.0.0:0"], "--watch 0.0.0.0:0 is not a loopback address, so a token"),
    ):
        refused(capsys, [*words, *change], error)
        assert not Path("out").exists(), change


def test_a_name_beside_a_certificate_is_refused(
    labeled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two devices with one certificate would replace each other's connection, whatever their names."""
    words = ["join", "127.0.0.1:1", "--data", str(labeled), "--certs", "certs", "--name", "two"]
    refused(capsys, words, "--name two is for --insecure-loopback alone: .* two certificates")


def test_settings_beside_resume_are_refused(
    labeled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    RunDirectory.create(Path("out"), tiny(1)).unlock()
    words = serve_words(labeled, "--resume", "out")
    for more in (["--out", "other"], ["digits"]):
        refused(capsys, [*words, *more], "leave out PRESET and --out")
    refused(capsys, [*words, "--set", "rounds=3"], "'rounds=3': .* what can be changed is stop.")


def test_a_simulated_run_is_not_continued_with_devices(
    labeled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    RunDirectory.create(Path("out"), tiny(1)).unlock()
    before = sorted(Path("out").iterdir())
    error = "out is a simulated run, .* model.weights=out/best.safetensors"
    refused(capsys, serve_words(labeled, "--resume", "out"), error)
    assert sorted(Path("out").iterdir()) == before


# --- processes -----------------------------------------------------------------------------------


def start(*words: str, largest_file: int | None = None) -> subprocess.Popen[str]:
    return Forked(
        [sys.executable, "-m", "semisfl", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        largest_file=largest_file,
    )


@contextmanager
def served(*words: str, **how: Any) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start a server, and return it with the port that it prints."""
    server = start(*words, **how)
    try:
        assert server.stderr is not None
        lines: list[str] = []
        while not (match := re.match(r"listening on port (\d+)", line := server.stderr.readline())):
            lines.append(line)
            assert line, (server.wait(), lines)
        used = r"info: labelled images: 16, .*; data.labeled is for simulations\n"
        assert any(re.fullmatch(used, one) for one in lines), lines
        yield server, int(match[1])
    finally:
        server.kill()
        server.wait()


def joined(port: int, labeled: Path) -> subprocess.CompletedProcess[str]:
    """Start a device that takes part to the end."""
    device = start(
        *("join", f"127.0.0.1:{port}", "--data", str(labeled / "train" / "a")),
        *("--insecure-loopback", "--name", "one", *accept_all(port)),
    )
    out, err = device.communicate(timeout=300)
    return subprocess.CompletedProcess(device.args, device.returncode, out, err)


def test_a_full_disk_is_not_success(labeled: Path) -> None:
    """A limit on file sizes refuses checkpoints as a full disk does, but not the small files."""
    words = [*serve_words(labeled), "--out", "out", *TINY]
    with served(*words, largest_file=30_000) as (server, port):
        device = joined(port, labeled)
        out, err = server.communicate(timeout=300)
    assert (device.returncode, server.returncode) == (0, 1), (device.stderr, err)
    assert "saved in" not in out
    last = err.strip().splitlines()[-1]
    assert re.match(r"error: the run's end could not be saved: .*latest.safetensors", last), err
    assert not list(Path("out").glob("*.safetensors")) and not list(Path("out").glob(".*"))
    assert len(Path("out/metrics.jsonl").read_text().splitlines()) == 2


def test_a_served_run_ends_at_a_limit_and_goes_on_beyond_it(
    labeled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second server of the same run is refused meanwhile."""
    words = [*serve_words(labeled, "digits"), "--out", "out", *TINY, "stop.gigabytes=1e-9"]
    with served(*words) as (server, port):
        assert main(serve_words(labeled, "--resume", "out")) == 3
        assert f"out is in use by process {server.pid} on " in capsys.readouterr().err
        device = joined(port, labeled)
        out, err = server.communicate(timeout=300)
    assert (device.returncode, server.returncode) == (0, 0), (device.stderr, err)
    assert (
        "ended as stop.gigabytes = 1e-09 is met" in out
        and "% after the last round (1 of 2; best " in out
    )
    assert "ended after round 1: stop.gigabytes = 1e-09 is met" in err
    words = serve_words(labeled, "--resume", "out", "--set", "stop.gigabytes=none")
    more = ["--watch", "127.0.0.1:0", "--metrics", "127.0.0.1:0"]
    with served(*words, *more) as (server, port):
        assert server.stderr is not None
        match = re.fullmatch(r"watch on (http://127.0.0.1:\d+/)\n", server.stderr.readline())
        assert match is not None
        with urlopen(match[1] + "api/runs", timeout=60) as answer:
            (run,) = json.load(answer)["runs"]
        assert (run["name"], run["done"]) == ("out", 1)
        match = re.fullmatch(
            r"metrics on (http://127.0.0.1:\d+/metrics)\n", server.stderr.readline()
        )
        assert match is not None
        with urlopen(match[1], timeout=60) as answer:
            metrics = answer.read().decode()
        assert "semisfl_clients_enrolled 1.0" in metrics and "semisfl_refusals_total 0.0" in metrics
        assert joined(port, labeled).returncode == 0
        out, err = server.communicate(timeout=300)
    assert "% after the last round (2 of 2; best " in out and "is met" not in out, err
    rows = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    assert [row.get("stopped_by") for row in rows] == ["gigabytes", None]
    assert checkpoint.read(Path("out/latest.safetensors"))["round"] == 2
    assert json.loads(Path("out/roster.json").read_text())["index"] == {"plaintext:one": 0}


def test_a_disk_that_is_full_from_the_start_leaves_nothing(labeled: Path) -> None:
    words = [*serve_words(labeled), "--out", "runs/out", *TINY]
    server = start(*words, largest_file=100)
    _, err = server.communicate(timeout=300)
    assert server.returncode == 2 and "cannot write to runs/out: File too large" in err
    assert not Path("runs/out").exists()
