"""Unlabelled images from another place than the labelled ones, from folders to metrics."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from semisfl.data import sources
from semisfl.data.partition import split
from semisfl.runs import start
from semisfl.runs.run_data import load_data
from semisfl.settings import config as configs
from semisfl.settings.config import Config
from tests import toy

SMALL = [
    *("rounds=2", "data.labeled=12", "clients.total=3", "clients.active=2", "clients.batch=4"),
    *("clients.steps=2", "server.steps=2", "server.batch=4", "model.projection=8"),
    *("data.augment.cutout=2", "runtime.checkpoint_every=1"),
]


def paint(file: Path, size: tuple[int, int], colour: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (colour, 90, 255 - colour)).save(file)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Labelled images of 20 x 16 pixels; others of 33 x 40, loose, by client and packed."""
    root = tmp_path_factory.mktemp("images")
    for number in range(8):
        for label, name in enumerate(("cat", "dog", "fox")):
            paint(
                root / "labeled" / "train" / name / f"{number}.png", (20, 16), 60 * label + number
            )
            paint(root / "labeled" / "test" / name / f"{number}.png", (20, 16), 60 * label + 9)
        paint(root / "loose" / f"{number}.png", (33, 40), 20 * number)
        paint(root / "devices" / f"phone{number % 3}" / f"{number}.png", (33, 40), 20 * number)
    np.savez(
        root / "packed.npz",
        x=np.zeros((9, 40, 33), np.uint8),
        labels=np.arange(9) % 2,
        split=np.array([0] * 7 + [1] * 2),
        classes=np.array(["owl", "hen"]),
    )
    return root


def config_of(place: Path, unlabeled: str, *more: str) -> Config:
    name = f"data.name={place / 'labeled'}"
    return configs.parse(
        configs.override({}, [*SMALL, name, f"data.unlabeled={place / unlabeled}", *more])
    )


@pytest.mark.parametrize("unlabeled, images", [("loose", 8), ("packed.npz", 7)])
def test_clients_hold_all_of_the_other_place_at_the_labelled_ones_size(
    place: Path, unlabeled: str, images: int
) -> None:
    data, held = load_data(config_of(place, unlabeled, "data.partition.kind=iid"))
    assert data.shape == (3, 16, 20) and len(data.images) == 24 + images
    assert len(held.labeled) == 12 and held.labeled.max() < 24
    assert len(held.clients) == 3
    assert sorted(np.concatenate(held.clients)) == list(range(24, 24 + images))
    assert set(data.labels[24:].tolist()) == {-1}
    assert len(data.test_images) == 24


def test_folders_say_who_holds_what(place: Path) -> None:
    data, held = load_data(config_of(place, "devices"))
    assert [len(rows) for rows in held.clients] == [3, 3, 2]
    assert data.clients is not None and list(data.clients) == ["phone0", "phone1", "phone2"]
    dataset = sources.load(str(place / "devices"), like=data, tested=False)
    assert torch.equal(data.images[held.clients[1]], dataset.images[dataset.clients["phone1"]])  # type: ignore[index]


def test_labels_of_the_same_classes_are_kept_for_the_partition() -> None:
    data = sources.join(toy.dataset(40, seed=1), toy.dataset(200, seed=2))
    assert data.served == 40 and torch.equal(data.labels[40:], toy.dataset(200, seed=2).labels)
    held = split(
        data.labels.numpy(),
        labeled=16,
        clients=5,
        kind="dirichlet",
        alpha=0.05,
        seed=0,
        classes=4,
        served=40,
    )
    assert sorted(np.concatenate(held.clients)) == list(range(40, 240))
    # The server's labels are those it would have without the other place.
    alone = split(data.labels.numpy()[:40], labeled=16, clients=2, kind="iid", seed=0, classes=4)
    assert (held.labeled == alone.labeled).all()
    kinds = [len(set(data.labels.numpy()[rows])) for rows in held.clients]
    assert min(kinds) < 4, "skewed"


@pytest.mark.parametrize("method", ["semisfl", "fedmatch", "semifl", "fedswitch"])
def test_methods_train_where_no_label_is_known(place: Path, method: str) -> None:
    # Everything is confident enough to be used, and its label counted.
    all_used = f"{method}.confidence_threshold=0"
    config = config_of(place, "loose", "rounds=1", f"method={method}", all_used)
    (row,) = start.train(config).rounds
    assert 0 <= row["mask_rate"] <= 1
    assert "impurity" not in row and "coverage_by_class" not in row


def test_a_resumed_run_goes_on_with_the_same_images(place: Path, tmp_path: Path) -> None:
    config = config_of(place, "loose")
    uninterrupted = start.train(config, out=tmp_path / "whole").rounds
    with start.begin(config, out=tmp_path / "cut") as run:
        run.experiment.stop.request()
        run.go()
    start.resume(tmp_path / "cut")
    lines = (tmp_path / "cut" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rounds = [json.loads(line) for line in lines]
    for key in ("loss_supervised", "loss_semi", "accuracy", "mask_rate"):
        assert [row[key] for row in rounds] == [row[key] for row in uninterrupted]
