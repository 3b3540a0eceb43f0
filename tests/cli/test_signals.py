"""Ctrl-C, SIGTERM and SIGHUP at any moment: exit status 0, nobody left behind, soon, and nothing half begun."""

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from semisfl.cli import signals
from semisfl.cli.main import main
from semisfl.cli.signals import StopSignals
from semisfl.runs import checkpoint
from semisfl.stopping import Stopped
from tests import processes
from tests.cli.test_cli import write_images
from tests.net.harness import until
from tests.processes import Forked
from tests.toy import assemble

STOP_SECONDS = 10
SETTINGS = ["--set", "rounds=1000000", "clients.total=3", "clients.active=2", "clients.batch=4"]
SETTINGS += ["clients.steps=2", "server.batch=4", "server.steps=2", "data.labeled=8"]


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for part, count in (("train", 30), ("test", 20)):
        for name in ("a", "b"):
            write_images(tmp_path / "images" / part / name, count, rng)
    return tmp_path / "images"


def start(*words: str, program: type[subprocess.Popen[str]] = Forked) -> subprocess.Popen[str]:
    """Start a command in a session of its own, so that processes it leaves behind can be found."""
    return program(
        [sys.executable, "-m", "semisfl", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def catches(process: subprocess.Popen[str]) -> bool:
    """Return whether the process runs our code: Python's own start cannot be interrupted well."""
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) & (1 << (signal.SIGTERM - 1)))
    return False


def members(session: int) -> list[int]:
    """Return the processes of a session that are alive."""
    processes = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            processes.append(int(stat.parent.name))
    return processes


def stopped_by(process: subprocess.Popen[str], number: signal.Signals) -> str:
    process.send_signal(number)
    try:
        printed, _ = process.communicate(timeout=STOP_SECONDS + 20)
        assert process.returncode == 0, printed
        until(lambda: not members(process.pid), STOP_SECONDS)
        return printed
    finally:
        for left in members(process.pid):
            os.kill(left, signal.SIGKILL)


def wait_for(process: subprocess.Popen[str], condition: Any) -> None:
    until(lambda: condition() or process.poll() is not None, 120)
    assert process.poll() is None, process.communicate()[0]


COMMANDS = {
    "run": lambda images: ["run", "--out", "out", *SETTINGS, f"data.name={images}"],
    "serve": lambda images: [
        *("serve", "--labeled", str(images), "--out", "out", "--listen", "127.0.0.1:0"),
        *("--insecure-loopback", *SETTINGS),
    ],
    "join": lambda images: [
        *("join", "127.0.0.1:9", "--data", str(images / "train" / "a"), "--insecure-loopback"),
        *("--name", "one"),
    ],
    "compare": lambda images: ["compare", "--out", "out", *SETTINGS, f"data.name={images}"],
}
USUAL = (("run", 0), ("join", 0), ("compare", 0))


@pytest.mark.parametrize(
    ("command", "seed"),
    [
        # Below: `serve` while it loads and while it waits, and a server with its devices.
        pytest.param(command, seed, marks=[] if case in USUAL else pytest.mark.slow)
        for case in itertools.product(COMMANDS, range(4))
        for command, seed in [case]
    ],
)
def test_a_signal_at_any_moment_of_the_start_ends_the_command_cleanly(
    command: str, seed: int, images: Path
) -> None:
    """The signal may come during loading, starting, waiting for clients or training."""
    rng = random.Random(f"{command}{seed}")
    process = start(*COMMANDS[command](images))
    try:
        wait_for(process, lambda: catches(process))
        time.sleep(rng.uniform(0, 3))
        stopped_by(process, rng.choice(signals.SIGNALS))
    finally:
        process.kill()
    runs = [Path("out")] if command != "compare" else list(Path("out").glob("*"))
    for run in runs:
        # Either nothing was begun, or it can be gone on with after its last round.
        if run.exists():
            metrics = run / "metrics.jsonl"
            rounds = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
            assert checkpoint.read(run / "latest.safetensors")["round"] == rounds


def test_a_signal_during_loading_ends_the_command_cleanly(images: Path) -> None:
    """In ``python`` itself: the signal comes while torch is imported."""
    process = start(*COMMANDS["serve"](images), program=subprocess.Popen)
    wait_for(process, lambda: catches(process))
    assert "nothing was written" in stopped_by(process, signal.SIGTERM)
    assert not Path("out").exists()


def test_a_signal_while_waiting_for_clients_ends_the_server(images: Path) -> None:
    process = start(*COMMANDS["serve"](images))
    assert process.stdout is not None
    while "waiting for devices (0 here, 1 needed" not in (line := process.stdout.readline()):
        assert line, "the server ended"
    assert "continue with: semisfl serve --resume out" in stopped_by(process, signal.SIGTERM)
    assert checkpoint.read(Path("out/latest.safetensors"))["round"] == 0


# --- in one process ------------------------------------------------------------------------------


def test_a_signal_during_evaluation_is_noticed_between_two_batches() -> None:
    """The model keeps its mode."""
    experiment = assemble("supervised", "rounds=1")
    experiment.test_images = experiment.test_images.repeat(20, 1, 1, 1)
    experiment.test_labels = experiment.test_labels.repeat(20)
    model = experiment.method.tested()["student"]
    model.train()
    seen: list[int] = []

    def count(*_: Any) -> None:
        seen.append(1)
        if len(seen) == 2:
            experiment.stop.request()

    model.register_forward_hook(count)
    with pytest.raises(Stopped):
        experiment.evaluate()
    assert len(seen) == 2 and model.training
    assert len(experiment.test_images) > 2 * 500


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_at_once(
    second: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("semisfl.cli.signals.SAME_SECONDS", 0)
    before = signal.getsignal(signal.SIGINT)
    with StopSignals() as signals:
        with signals.running():
            os.kill(os.getpid(), signal.SIGINT)
            assert signals.flag.requested
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), second)
        with pytest.raises(Stopped), signals.running():
            pytest.fail("a comparison does not start its next run")
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("running", [False, True])
def test_a_signal_that_a_wrapper_sends_twice_is_one(
    running: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`timeout` sends it to the process and then to its group."""
    monkeypatch.setattr("semisfl.cli.signals.SAME_SECONDS", 100)
    with StopSignals() as signals, signals.running() if running else nullcontext():
        with nullcontext() if running else pytest.raises(Stopped):
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.flag.requested


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGHUP])
def test_a_lost_terminal_stops_cleanly_though_it_sends_its_signal_twice(
    first: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shell sends SIGHUP, and the kernel when the shell has ended; also after Ctrl-C."""
    monkeypatch.setattr(
        signals, "SIGNALS", [signal.SIGINT, signal.SIGHUP]
    )  # these tests may run under nohup
    monkeypatch.setattr(signals, "SAME_SECONDS", 0)
    with StopSignals() as stopping, stopping.running():
        os.kill(os.getpid(), first)
        assert stopping.flag.requested
        try:
            os.kill(os.getpid(), signal.SIGHUP)
        except KeyboardInterrupt:
            pytest.fail("it was taken for a second signal")


def test_under_nohup_a_lost_terminal_stops_nothing() -> None:
    code = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); from semisfl.cli import signals; "
    code += "signals.StopSignals().__enter__(); "
    code += "signal.raise_signal(signal.SIGHUP); print(signals.SIGNALS)"
    ended = processes.run([sys.executable, "-c", code])
    assert ended.returncode == 0 and "SIGHUP" not in ended.stdout, ended.stderr


def test_a_signal_after_the_last_round_loses_nothing() -> None:
    with StopSignals() as signals:
        with signals.running():
            pass
        os.kill(os.getpid(), signal.SIGTERM)


def test_before_the_first_round_a_signal_ends_the_command() -> None:
    with StopSignals() as signals:
        with pytest.raises(Stopped):
            os.kill(os.getpid(), signal.SIGTERM)
        assert signals.flag.requested, "also if somebody swallowed the exception"


def test_a_command_that_trains_nothing_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("semisfl.runs.report.find_runs", work)
    assert main(["report", "runs"]) == 130
    assert capsys.readouterr().err == "error: interrupted\n"
