"""The good checkpoint before the latest outlasts whatever a disk refuses."""

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from semisfl.runs.directory import RunDirectory
from semisfl.runs.experiment import Experiment
from semisfl.runs.sinks import Callback
from semisfl.runs.start import train
from semisfl.settings import presets
from tests import toy
from tests.disk import largest_file


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("semisfl"), "handlers", [logging.NullHandler()])


def state(round_index: int, size: int = 10) -> dict[str, object]:
    return {"round": round_index, "weights": torch.full((size,), float(round_index))}


def rounds(directory: RunDirectory) -> list[int]:
    return [directory.load(name)["round"] for name in ("latest", "previous")]


def test_refused_checkpoints_leave_the_two_before_them(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path / "run", presets.preset("digits"))
    for number in (1, 2):
        assert directory.save_latest(state(number))
    assert rounds(directory) == [2, 1]
    with largest_file(600):
        for number in (3, 4):
            assert not directory.save_latest(state(number, 1000))
    assert rounds(directory) == [2, 1]
    assert directory.save_latest(state(5)) and rounds(directory) == [5, 2]
    assert directory.save_latest(state(5)) and rounds(directory) == [5, 2], "the same round again"
    assert not [path for path in directory.path.iterdir() if path.suffix == ".tmp"]


def test_a_damaged_latest_does_not_take_the_place_of_the_one_before(tmp_path: Path) -> None:
    first = RunDirectory.create(tmp_path / "run", presets.preset("digits"))
    for number in (1, 2):
        first.save_latest(state(number))
    os.truncate(first.path / "latest.safetensors", 0)
    resumed = RunDirectory.open(first.path / "previous.safetensors")
    with largest_file(600):
        assert not resumed.save_latest(state(2, 1000))
    assert resumed.load("previous")["round"] == 1
    assert resumed.save_latest(state(2)) and rounds(resumed) == [2, 1]
    assert resumed.save_latest(state(3)) and rounds(resumed) == [3, 2]


def test_a_best_model_that_the_disk_refused_is_written_with_the_next_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, refused = RunDirectory.save, iter([True])

    def save_but_first_best(self: RunDirectory, name: str, state: dict[str, object]) -> bool:
        return not (name == "best" and next(refused, False)) and save(self, name, state)

    monkeypatch.setattr(RunDirectory, "save", save_but_first_best)
    written: list[list[str]] = []

    class Notes(Callback):
        def on_checkpoint(self, path: Path) -> None:
            written.append([path.stem])

    settings = toy.values("supervised", "rounds=3", "runtime.checkpoint_every=1")
    train(settings, out=tmp_path / "run", callbacks=[Notes()], **toy.own())
    assert written[:3] == [["latest"], ["latest"], ["best"]]


def test_a_state_with_nan_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A NaN outside of weights and losses, as in a queue of keys, does not end the run."""
    state_dict = Experiment.state_dict

    def with_nan(self: Experiment) -> dict[str, Any]:
        state = state_dict(self)
        return {**state, "method": {**state["method"], "keys": torch.tensor([torch.nan])}}

    monkeypatch.setattr(Experiment, "state_dict", with_nan)
    result = train(toy.values("supervised", "rounds=2"), out=tmp_path / "run", **toy.own())
    assert len(result.rounds) == 2 and not (tmp_path / "run" / "latest.safetensors").exists()
