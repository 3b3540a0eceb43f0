"""Sinks: what they are given and when, and that one which fails is nobody's ruin but its own."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from semisfl.metrics import RoundMetrics
from semisfl.runs.directory import RunDirectory
from semisfl.runs.reading import read_rounds
from semisfl.runs.sinks import MetricsFile, RunInfo
from semisfl.runs.start import resume, train
from semisfl.settings.config import Config
from semisfl.stopping import StopFlag
from tests import toy
from tests.disk import largest_file

OWN = toy.own()


def settings(*assignments: str) -> Config:
    return toy.values("supervised", "server.steps=1", *assignments)


class Recorder:
    """A sink that keeps what it gets, and fails where the test wants."""

    def __init__(self, failing: str = "") -> None:
        self.calls: list[str] = []
        self.written: list[RoundMetrics] = []
        self.run: RunInfo | None = None
        self._failing = failing

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if call == self._failing:
            raise ConnectionError("nobody listens")

    def start(self, run: RunInfo) -> None:
        self.run = run
        self._note("start")

    def write(self, metrics: RoundMetrics) -> None:
        self.written.append(metrics)
        self._note(f"write {metrics.round}")

    def close(self) -> None:
        self._note("close")


def test_a_sink_is_started_given_every_row_and_closed(tmp_path: Path) -> None:
    sink = Recorder()
    config = settings("runtime.evaluate_every=2")
    result = train(config, out=tmp_path / "run", sinks=[sink], **OWN)
    assert sink.calls == ["start", "write 0", "write 1", "write 2", "close"]
    assert sink.run == RunInfo(sink.run.config, 0, tmp_path / "run")
    assert sink.run.config.rounds == 3
    assert [row.as_dict() for row in sink.written] == result.rounds
    assert result.rounds == read_rounds(tmp_path / "run", dict)
    assert [row.accuracy is None for row in sink.written] == [True, False, False]


def test_a_resumed_run_tells_where_it_begins_and_a_stopped_one_closes(tmp_path: Path) -> None:
    stop, first = StopFlag(), Recorder()
    observe = {"observe": lambda row: stop.request(), "stop": stop}
    assert train(settings(), out=tmp_path / "run", sinks=[first], **observe, **OWN).stopped
    assert first.calls == ["start", "write 0", "close"]
    second = Recorder()
    resume(tmp_path / "run", sinks=[second], **OWN)
    assert second.run is not None and second.run.first == 1
    assert second.calls == ["start", "write 1", "write 2", "close"]


def test_a_sink_is_closed_when_the_run_fails() -> None:
    sink = Recorder()

    def fail(row: dict[str, Any]) -> None:
        raise RuntimeError("power failure")

    with pytest.raises(RuntimeError, match="power failure"):
        train(settings(), observe=fail, sinks=[sink], **OWN)
    assert sink.calls[-1] == "close"


@pytest.mark.parametrize("failing", ["start", "write 1", "close"])
def test_a_failing_sink_is_reported_once_and_the_run_continues(
    failing: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("semisfl"), "propagate", True)
    broken, sound = Recorder(failing), Recorder()
    result = train(settings(), sinks=[broken, sound], **OWN)
    assert len(result.rounds) == 3 and not result.stopped
    assert broken.calls[-1] == failing, "it is told nothing afterwards"
    assert sound.calls == ["start", "write 0", "write 1", "write 2", "close"]
    warnings = [record.getMessage() for record in caplog.records if "sink" in record.getMessage()]
    assert warnings == [
        "sink Recorder failed and gets no more rounds: ConnectionError('nobody listens')"
    ]


# --- metrics.jsonl -------------------------------------------------------------------------------------


def test_metrics_that_did_not_fit_are_written_later_and_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    rows = [RoundMetrics(round=index, loss_semi=index / 3) for index in range(4)]
    file.write(rows[0])
    # The limit holds for every file of this process: no warning may go to a file meanwhile.
    monkeypatch.setattr(logging.getLogger("semisfl"), "handlers", [logging.NullHandler()])
    with largest_file(file.path.stat().st_size + 10):
        file.write(rows[1])
        file.write(rows[2])
    assert [json.loads(line)["round"] for line in file.path.read_text().splitlines()] == [0]
    assert len(file.unwritten) == 2
    file.write(rows[3])
    assert not file.unwritten
    lines = file.path.read_text().splitlines()
    assert [RoundMetrics.from_dict(json.loads(line)) for line in lines] == rows


def test_a_checkpoint_comes_after_the_metrics_that_did_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that stops after the checkpoint would never write them."""
    directory = RunDirectory(tmp_path)
    monkeypatch.setattr(logging.getLogger("semisfl"), "handlers", [logging.NullHandler()])
    with largest_file(0):
        directory.record.write(RoundMetrics(round=0, loss_semi=0.5))
    assert directory.unsaved == ["metrics.jsonl"]
    assert directory.save_latest({"round": 1})
    assert [line["round"] for line in read_rounds(directory.path, dict)] == [0]


# --- the progress line ----------------------------------------------------------------------------------
