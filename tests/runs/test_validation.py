"""Test validation images: nobody trains on them, rounds are judged on them, and the test set is read once."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from semisfl import load
from semisfl.data.dataset import Dataset
from semisfl.data.partition import Partition
from semisfl.data.sources import join
from semisfl.runs.experiment import Experiment
from semisfl.runs.loop import run_rounds
from semisfl.runs.run_data import divide
from semisfl.runs.scores import Scores
from semisfl.runs.start import resume, train
from semisfl.settings.config import Config
from semisfl.use.model_card import card
from tests import toy
from tests.net.harness import Network, tiny, toy_data

SETTINGS = ("data.validation=0.2", "rounds=3", "clients.steps=2", "server.steps=2")


def config(*more: str) -> Config:
    return toy.values("semisfl", "data.partition.kind=iid", *SETTINGS, *more)


def everything(partition: Partition) -> np.ndarray:
    return np.concatenate([partition.validation, partition.labeled, *partition.clients])


# --- who holds what ------------------------------------------------------------------------------------


def test_every_image_has_one_holder_and_every_class_its_share() -> None:
    data = toy.dataset()
    partition = divide(config(), data)
    assert sorted(everything(partition)) == list(range(200))
    assert np.bincount(data.labels[partition.validation]).tolist() == [10, 10, 10, 10]


def test_runs_that_differ_in_labels_and_clients_are_judged_on_the_same() -> None:
    data = toy.dataset()
    chosen = divide(config(), data).validation
    other = config("data.labeled=40", "clients.total=7", "data.partition.kind=dirichlet")
    assert np.array_equal(divide(other, data).validation, chosen)
    assert not np.array_equal(divide(config("seed=1"), data).validation, chosen)


def test_without_validation_no_images_are_set_aside() -> None:
    assert divide(config("data.validation=none"), toy.dataset()).validation.size == 0


def test_what_clients_hold_by_folder_or_place_is_theirs() -> None:
    data = toy.dataset()
    held = {name: np.arange(start, start + 30) for name, start in (("a", 100), ("b", 130))}
    partition = divide(config("clients.total=2"), replace(data, clients=held))
    assert partition.validation.size == 28 and partition.validation.max() not in range(100, 160)
    assert [part.tolist() for part in partition.clients] == [list(v) for v in held.values()]
    assert not np.intersect1d(partition.validation, partition.labeled).size
    both = join(data, toy.dataset(seed=9))
    partition = divide(config(), both)
    assert partition.validation.max() < 200 == both.served
    assert sum(map(len, partition.clients)) == 200


def test_a_servers_images_over_a_network_are_its_own() -> None:
    partition = divide(config("fleet.kind=network"), toy.dataset())
    assert sorted(everything(partition)) == list(range(200))
    assert (len(partition.validation), partition.clients) == (40, ())


# --- what is judged ------------------------------------------------------------------------------------


JUDGED = ("accuracy", "macro_f1", "recall_by_class")


def numbers(rows: list[dict[str, Any]], *without: str) -> list[dict[str, Any]]:
    left_out = ("seconds", *without)
    return [{k: v for k, v in row.items() if not k.startswith(left_out)} for row in rows]


def run(out: Path, *more: str) -> Any:
    return train(config(*more), data=toy.dataset(), model=toy.network(), out=out, device="cpu")


def share_right(model: torch.nn.Module, data: Dataset, rows: np.ndarray | None) -> float:
    images, labels = (
        (data.test_images, data.test_labels)
        if rows is None
        else (data.images[rows], data.labels[rows])
    )
    mean, std = (torch.tensor(one).view(1, -1, 1, 1) for one in (data.mean, data.std))
    with torch.no_grad():
        chosen = model.eval()((images.float() / 255 - mean) / std).argmax(1)
    return 100 * float((chosen == labels).float().mean())


def test_rounds_are_judged_on_validation_images_and_the_test_set_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    scores = Experiment._scores

    def counted(self: Experiment, images: torch.Tensor, labels: torch.Tensor) -> dict[str, Scores]:
        read.append(len(images))
        return scores(self, images, labels)

    monkeypatch.setattr(Experiment, "_scores", counted)
    result = run(tmp_path / "r")
    assert read == [40, 40, 40, 120]
    data = toy.dataset()
    chosen = divide(config(), data).validation
    assert result.accuracy == pytest.approx(share_right(result.model, data, chosen))
    assert result.test_accuracy == pytest.approx(share_right(result.model, data, None))
    assert ["test_accuracy" in row for row in result.rounds] == [False, False, True]
    described = card(load(tmp_path / "r" / "latest.safetensors"))
    assert f"{result.accuracy:.1f} % of 40 validation images" in " ".join(described.split())
    assert f"{result.test_accuracy:.1f} % of the test images, which were read once" in described
    assert "the test images had no part in the choice" in described


def test_a_run_that_a_limit_ended_is_tested_and_goes_on_exactly(tmp_path: Path) -> None:
    straight = run(tmp_path / "straight")
    ended = run(tmp_path / "ended", "stop.hours=1e-9")
    assert len(ended.rounds) == 1 and ended.test_accuracy is not None
    beyond = resume(
        tmp_path / "ended",
        settings=["stop.hours=none"],
        data=toy.dataset(),
        model=toy.network(),
        device="cpu",
    )
    assert beyond.test_accuracy == straight.test_accuracy
    first = ("test_accuracy", "stopped_by")
    assert numbers(beyond.rounds[:1], *first) == numbers(straight.rounds[:1])
    assert numbers(beyond.rounds[1:]) == numbers(straight.rounds[1:])


def test_judging_changes_nothing_of_the_training() -> None:
    plain = run_rounds(toy.assemble("semisfl", "rounds=2")).rounds
    judged = toy.assemble("semisfl", "rounds=2")
    judged.validation = (judged.test_images[:9], judged.test_labels[:9])
    rounds = run_rounds(judged).rounds
    assert numbers(rounds, *JUDGED, "test_acc") == numbers(plain, *JUDGED)
    assert rounds[-1]["test_accuracy"] == plain[-1]["accuracy"]


def test_a_run_over_a_network_is_judged_on_the_servers_images() -> None:
    data, division = toy_data(2)
    partition = Partition(division.labeled[:6], division.clients, validation=division.labeled[6:])
    net = Network(tiny(2, data={"validation": 0.25}), data, partition)
    try:
        net.join_all()
        result = run_rounds(net.experiment)
    finally:
        net.close()
    assert result.accuracy == share_right(result.model, data, partition.validation)
    assert result.test_accuracy == share_right(result.model, data, None)
    assert ["test_accuracy" in row for row in result.rounds] == [False, True]
