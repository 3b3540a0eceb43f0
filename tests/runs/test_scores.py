"""Accuracy, recall and F1: by hand, in the metrics of a run, and as the measure of the best round."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from semisfl.metrics import MethodMetrics
from semisfl.runs.directory import RunDirectory
from semisfl.runs.experiment import Experiment
from semisfl.runs.scores import Scores
from semisfl.runs.start import begin, resume, train
from semisfl.use.classifier import load
from tests import toy


def test_scores_by_hand() -> None:
    labels = torch.tensor([0, 0, 0, 0, 1, 1, 2, -1])
    predicted = torch.tensor([0, 0, 0, 1, 1, 0, 0, 3])
    scores = Scores.of(predicted, labels, 4)
    assert scores.confusion.tolist() == [[3, 1, 0, 0], [1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert scores.accuracy == 100 * 4 / 8, "an unknown label counts as wrong"
    assert scores.recall == [75.0, 50.0, 0.0, None]
    assert scores.precision == [60.0, 50.0, None, None]
    # F1 is 2 * 3 / (4 + 5), 2 * 1 / (2 + 2) and 0; class 3 has no image.
    assert scores.macro_f1 == pytest.approx(100 * (2 / 3 + 1 / 2 + 0) / 3)


def test_a_round_records_the_scores_of_the_tested_model(tmp_path: Path) -> None:
    data = toy.dataset()
    settings = toy.values("semisfl", "rounds=2", "runtime.evaluate_every=2")
    result = train(settings, data=data, model=toy.network(), out=tmp_path / "run", device="cpu")
    first, last = result.rounds
    assert not {"macro_f1", "recall_by_class"} & first.keys(), "it was not tested"
    predicted = load(tmp_path / "run").predict(data.test_images).probabilities.argmax(1)
    for label, recall in enumerate(last["recall_by_class"]):
        mine = data.test_labels == label
        assert recall == pytest.approx(100 * float((predicted[mine] == label).float().mean()))
    f1 = []
    for label in range(toy.CLASSES):
        right = int(((predicted == label) & (data.test_labels == label)).sum())
        f1.append(2 * right / int((predicted == label).sum() + (data.test_labels == label).sum()))
    assert last["macro_f1"] == pytest.approx(100 * np.mean(f1))
    described = load(tmp_path / "run").description
    assert described.macro_f1 == last["macro_f1"]
    assert described.recall_by_class == last["recall_by_class"]


@pytest.mark.parametrize(("measure", "best"), [("accuracy", 1), ("macro_f1", 3)])
def test_the_best_round_is_chosen_by_the_measure(
    measure: str, best: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Round 1 has the highest accuracy, round 3 the highest macro-F1, and later rounds are only as good."""
    confusions = [[[8, 0], [2, 0]], [[9, 0], [1, 0]], [[4, 0], [4, 2]], [[5, 1], [1, 3]]]
    confusions += [confusions[1], confusions[3]]
    scores = iter([Scores(np.array(one), 10) for one in confusions])
    monkeypatch.setattr(Experiment, "_scores", lambda *_: {"student": next(scores)})
    own: dict[str, Any] = {"data": toy.dataset(), "model": toy.network(), "device": "cpu"}
    settings = toy.values("supervised", "rounds=6", f"runtime.best_by={measure}", "stop.hours=1e-9")
    ended = train(settings, out=tmp_path / "run", **own)
    assert len(ended.rounds) == 1
    result = resume(tmp_path / "run", settings=["stop.hours=none"], **own)
    assert RunDirectory.open(tmp_path / "run").load("best")["round"] == best + 1
    assert result.best == 90.0, "the highest accuracy, whatever the model is chosen by"


@pytest.mark.parametrize("measure", ["accuracy", "macro_f1"])
def test_a_bad_round_is_not_the_best(
    measure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Round 1 has the highest accuracy and macro-F1, and a loss that is NaN; the run ends, and is resumed."""
    confusions = [[[3, 2], [2, 3]], [[5, 0], [0, 5]], [[4, 1], [1, 4]], [[4, 1], [0, 5]]]
    scores = iter([Scores(np.array(one), 10) for one in confusions])
    monkeypatch.setattr(Experiment, "_scores", lambda *_: {"student": next(scores)})
    settings = toy.values("supervised", "rounds=3", f"runtime.best_by={measure}")
    own: dict[str, Any] = {"data": toy.dataset(), "model": toy.network(), "device": "cpu"}
    with begin(settings, out=tmp_path / "run", **own) as run:
        original = run.experiment.method.round

        def bad_once(index: int) -> MethodMetrics:
            reported = original(index)
            return replace(reported, loss_supervised=math.nan) if index == 1 else reported

        monkeypatch.setattr(run.experiment.method, "round", bad_once)
        result = run.go()
    assert RunDirectory.open(tmp_path / "run").load("best")["round"] == 1
    assert result.diverged and result.best == 60.0
    result = resume(tmp_path / "run", **own)
    assert RunDirectory.open(tmp_path / "run").load("best")["round"] == 3
    assert result.best == 90.0
