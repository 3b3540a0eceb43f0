"""Callbacks: when they are called, how they end a run, and what is kept if one fails."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from semisfl import Callback, resume, train
from semisfl.metrics import RoundMetrics
from semisfl.runs import checkpoint
from semisfl.runs.reading import read_rounds
from semisfl.settings.config import Config
from tests import toy
from tests.toy import own

EVENTS = ["on_round", "on_evaluation", "on_checkpoint"]


def settings(*assignments: str) -> Config:
    return toy.values("semisfl", "rounds=4", "server.steps=1", "clients.steps=1", *assignments)


class Notes(Callback):
    """Note every call; answer or fail at the ``number``-th call of ``event``."""

    def __init__(self, event: str = "", number: int = 1, answer: Any = True) -> None:
        self.calls: list[tuple[str, Any]] = []
        self._event, self._number, self._answer = event, number, answer

    def _note(self, event: str, about: Any) -> bool | None:
        self.calls.append((event, about))
        if event != self._event or self.times(event) != self._number:
            return None
        if isinstance(self._answer, BaseException):
            raise self._answer
        return bool(self._answer)

    def times(self, event: str) -> int:
        return sum(1 for name, _ in self.calls if name == event)

    def on_round(self, metrics: RoundMetrics) -> bool | None:
        return self._note("on_round", metrics.round)

    def on_evaluation(self, metrics: RoundMetrics, model: nn.Module) -> bool | None:
        assert isinstance(model, nn.Module) and metrics.accuracy is not None
        return self._note("on_evaluation", metrics.round)

    def on_checkpoint(self, path: Path) -> bool | None:
        assert path.is_file()
        return self._note("on_checkpoint", path.name)


def test_callbacks_are_called_for_rounds_tests_and_checkpoints(tmp_path: Path) -> None:
    notes = Notes()
    config = settings("runtime.evaluate_every=2", "runtime.checkpoint_every=2")
    result = train(config, out=tmp_path / "run", callbacks=[notes], **own())
    assert not result.stopped
    rounds = [about for event, about in notes.calls if event == "on_round"]
    tests = [about for event, about in notes.calls if event == "on_evaluation"]
    files = [about for event, about in notes.calls if event == "on_checkpoint"]
    assert rounds == [0, 1, 2, 3] and tests == [1, 3]
    assert files.count("latest.safetensors") == 2 and "best.safetensors" in files
    order = [event for event, _ in notes.calls]
    assert order[:4] == ["on_round", "on_round", "on_evaluation", "on_checkpoint"]


@pytest.mark.parametrize("event", EVENTS)
def test_a_callback_ends_the_run_and_it_can_be_continued(event: str, tmp_path: Path) -> None:
    path, every = tmp_path / "run", "runtime.checkpoint_every=2"
    uninterrupted = train(settings(every), **own())
    notes = Notes(event)
    result = train(settings(every), out=path, callbacks=[Callback(), notes], **own())
    done = 2 if event == "on_checkpoint" else 1
    assert result.stopped and len(result.rounds) == done == notes.times("on_round")
    assert isinstance(result.accuracy, float) and result.stopped_by is None
    assert checkpoint.read(path / "latest.safetensors")["round"] == done
    assert "best.safetensors" in [about for name, about in notes.calls if name == "on_checkpoint"]
    again = resume(path, **own())
    for key in ("loss_semi", "accuracy"):
        assert again.history[key] == uninterrupted.history[key]


@pytest.mark.parametrize("event", EVENTS)
def test_an_exception_in_a_callback_leaves_a_checkpoint(event: str, tmp_path: Path) -> None:
    path, every = tmp_path / "run", "runtime.checkpoint_every=2"
    uninterrupted = train(settings(every), **own())
    notes = Notes(event, answer=RuntimeError("no paper"))
    with pytest.raises(RuntimeError, match="no paper"):
        train(settings(every), out=path, callbacks=[notes], **own())
    done = 2 if event == "on_checkpoint" else 1
    assert checkpoint.read(path / "latest.safetensors")["round"] == done
    assert len(read_rounds(path, dict)) == done
    again = resume(path, **own())
    assert again.history["loss_semi"] == uninterrupted.history["loss_semi"]


def test_a_round_that_went_wrong_is_not_saved_by_a_callback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("semisfl.runs.loop.not_finite", lambda method, metrics: "NaN")
    result = train(settings(), out=tmp_path / "run", callbacks=[Notes("on_round")], **own())
    assert result.diverged and len(result.rounds) == 1
    assert checkpoint.read(tmp_path / "run" / "latest.safetensors")["round"] == 0


def test_the_evaluated_model_is_the_one_that_is_returned() -> None:
    seen: list[nn.Module] = []

    class Keep(Callback):
        def on_evaluation(self, metrics: RoundMetrics, model: nn.Module) -> None:
            seen.append(model)

    result = train(settings(), callbacks=[Keep()], **own())
    assert all(model is result.model for model in seen) and len(seen) == 4
    assert next(result.model.parameters()).device == torch.device("cpu")
