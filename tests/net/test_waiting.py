"""Test what a server reports while it waits for devices, and that the wait does not count as training."""

import json
import logging
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from semisfl.net.frames import Frame
from semisfl.net.server import waiting
from semisfl.runs import loop
from semisfl.runs.directory import RunDirectory
from semisfl.runs.experiment import assemble
from semisfl.runs.loop import run_rounds
from tests.net.harness import Client, network, tiny, toy_data, until


@pytest.fixture(autouse=True)
def _logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(logging.getLogger("semisfl"), "propagate", True)
    caplog.set_level(logging.INFO, "semisfl")


def waits(path: Path) -> str | None:
    """Return what the run waits for by its status file."""
    file = path / "fleet.json"
    return json.loads(file.read_text()).get("waiting") if file.exists() else None


def test_the_start_waits_for_a_quorum_then_one_deadline_for_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny(3, rounds=1, network={"quorum": 2, "deadline": 1.5})
    directory = RunDirectory.create(tmp_path / "run", config)
    with network(config) as net:
        net.fleet.device_log.open(directory.path, net.fleet.status)
        trained = threading.Thread(target=run_rounds, args=(net.experiment, directory), daemon=True)
        trained.start()
        until(lambda: "(0 here, 2 needed); missing: plaintext:client-0, " in caplog.text)
        until(lambda: waits(directory.path) == "waiting for devices (0 here, 2 needed)")
        net.join(0)
        until(lambda: net.fleet.waiting.state == "waiting for devices (1 here, 2 needed)")
        time.sleep(2)
        net.join(1)
        trained.join(30)
        assert not trained.is_alive(), "the third is not needed"
        until(lambda: waits(directory.path) is None)
        assert net.fleet.waiting.state is None
    log = (directory.path / "run.log").read_text()
    assert "waiting for devices (2 here, 2 needed; 1.5 s for all 3 to come); missing" in log
    assert "s with 2 devices" in log, "the end of the wait is logged"
    assert log.splitlines()[-1].endswith("INFO finished: 1 round done")


def test_the_wait_is_not_in_the_seconds_of_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """stop.hours and estimates are about training alone."""
    clock = SimpleNamespace(now=0.0)

    def perf_counter() -> float:
        clock.now += 1
        return float(clock.now)

    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=perf_counter))
    config = tiny(2, rounds=2, stop={"hours": 1.0})
    experiment = assemble(config, *toy_data(2), device="cpu")

    def wait_ready() -> None:
        clock.now += 7200

    experiment.fleet.wait_ready = wait_ready  # type: ignore[method-assign]
    result = run_rounds(experiment)
    assert len(result.rounds) == 2 and result.stopped_by is None
    for metrics in result.rounds:
        assert metrics["seconds_training"] < metrics["seconds"] < 60


def test_a_round_that_always_has_too_few_answers_is_not_repeated_without_a_pause(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A device that stalls stays here, and is drawn again if nobody else is."""
    stalled = threading.Event()
    stalled.set()

    def stall(client: Client, frame: Frame) -> None:
        while frame.kind == "split" and stalled.is_set():
            time.sleep(0.02)

    monkeypatch.setattr(waiting, "FIRST_REPEAT", 0.01)
    with network(tiny(2, network={"quorum": 2, "deadline": 0.5})) as net:
        net.enrol(0)
        net.enrol(1, break_at=stall)
        trained = threading.Thread(target=run_rounds, args=(net.experiment,), daemon=True)
        trained.start()
        for rounds, seconds in ((2, "0.01"), (3, "0.02"), (4, "0.04")):
            until(
                lambda line=f"{rounds} rounds in a row had too few answers; the next begins in {seconds} s": (
                    line in caplog.text
                )
            )
        assert not net.strikes
        stalled.clear()
        trained.join(30)
        assert not trained.is_alive(), "it goes on once all answer"
        caplog.clear()
        net.fleet.waiting.until_ready()
        assert "in a row" not in caplog.text, "a round that is done is the end of them"
