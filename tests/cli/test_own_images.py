"""Commands with one's own images: which preset they take, what it chooses, and how mistakes read."""

import importlib.util
import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from semisfl import load_data
from semisfl.cli.main import main
from semisfl.data import sources
from semisfl.settings import catalog, presets
from semisfl.settings.config import parse
from tests.cli.test_cli import (
    TINY,
    images as images,
    inside_tmp as inside_tmp,
    refused,
    write_images,
)


@pytest.mark.usefixtures("no_pictures")
def test_a_path_without_a_preset_gets_the_preset_for_own_images(
    images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*TINY, f"data.name={images}", "clients.active=3", "data.augment.cutout=4"]
    assert main(["run", "--out", "r", *words]) == 0
    printed = capsys.readouterr()
    line = f"preset images, for your own images in {images}; semisfl show images explains it"
    assert printed.err.splitlines()[0] == line
    assert "validation accuracy" in printed.out and "test accuracy" in printed.out
    config = tomllib.loads(Path("r/config.toml").read_text())
    assert config["data"]["validation"] == 0.1
    assert config["semisfl"]["align"] == "client" and config["semisfl"]["client_teacher"] == "ema"
    assert config["robust"]["aggregate"] == "clipped_mean"
    assert main(["run", "images", "--out", "named", "--quiet", *words]) == 0
    assert capsys.readouterr().err == ""
    assert Path("named/config.toml").read_text() == Path("r/config.toml").read_text()


@pytest.mark.parametrize("command", ["show", "plan"])
def test_commands_that_only_look_choose_the_same_preset(
    command: str, images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = []
    for preset in ([], ["images"]):
        words = [command, *preset, "--json", *TINY, f"data.name={images}"]
        assert main(words) == 0
        printed = capsys.readouterr()
        assert printed.err.startswith("preset images") is not bool(preset)
        both.append(printed.out)
    assert both[0] == both[1]


def test_limits_on_a_clients_influence_need_a_majority(capsys: pytest.CaptureFixture[str]) -> None:
    for active, expected in ((2, "mean"), (3, "clipped_mean")):
        assert main(["show", "images", "--json", "--set", f"clients.active={active}"]) == 0
        assert json.loads(capsys.readouterr().out)["robust"]["aggregate"] == expected
    words = ["show", "images", "--json", "--set", "robust.aggregate=median"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["robust"]["aggregate"] == "median"


def test_every_method_sees_labelled_images_alike() -> None:
    values = presets.values_of("images")
    for method in catalog.METHODS:
        assert parse({**values, "method": method}).labeled_view == "mixed", method


def test_mistakes_with_own_images_say_what_to_change(
    images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = ["run", *TINY, f"data.name={images}"]
    for words, pattern in (
        (["run", "images", "--set", "data.name=nowhere"], "'nowhere' is neither .* nor a path"),
        ([*own, "data.labeled=60"], "exceeds the 54 .* besides 6 for validation; .*labeled=54 or"),
        ([*own, "data.labeled=54"], "clients.total = 3 exceeds the 0 images left"),
        (
            [*own, "data.validation=0.999"],
            "0.999 leaves no image of class .* smaller share, or none",
        ),
        ([*own, "clients.total=1"], "clients.active = 2 exceeds clients.total = 1"),
        (["run", "--set", "data=3"], "data = 3"),
    ):
        refused(capsys, words, pattern)


def test_class_folders_without_train_and_test_are_divided(
    images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last fifth of each class, by name, is for testing; a folder `unlabeled` is for the clients."""
    flat = images / "train"
    write_images(flat / "unlabeled", 7, np.random.default_rng(1))
    assert main(["run", *TINY, "--data", str(flat), "--out", "r"]) == 0
    assert "its folders are the classes (dark, light)" in capsys.readouterr().err
    data = load_data(str(flat))
    assert data.classes == ("dark", "light") and data.clients is None
    assert data.labels.tolist() == [0] * 24 + [1] * 24 + [-1] * 7
    assert data.test_labels.tolist() == [0] * 6 + [1] * 6
    last = sorted((flat / "light").iterdir())[-1]
    assert (data.test_images[-1, 0].numpy() == np.asarray(Image.open(last))).all()
    one = ["--labeled", str(flat / "dark"), "--insecure-loopback", "--listen", "127.0.0.1:0"]
    error = "dark holds no labelled images; a folder needs <class>/., or train/<class>/. and test"
    refused(capsys, ["serve", *one, "--set", "clients.total=2", "clients.active=2"], error)
    refused(capsys, ["run", "--data", str(flat / "dark")], error)


@pytest.mark.parametrize(("mode", "side", "hint"), [("RGB", 65, 1), ("RGB", 64, 0), ("L", 65, 0)])
def test_a_line_for_those_who_have_photographs(
    mode: str, side: int, hint: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "pets" / name).mkdir(parents=True)
        Image.new(mode, (side, 80)).save(tmp_path / "pets" / name / "1.jpg")
    assert main(["show", "--data", str(tmp_path / "pets")]) == 0
    assert capsys.readouterr().err.count("the preset photos starts from ImageNet's") == hint
    assert main(["show", "photos", "--data", str(tmp_path / "pets")]) == 0
    assert capsys.readouterr().err == ""


def test_photos_without_its_weights_says_what_to_install_before_it_reads_images(
    images: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sources, "load", lambda *_, **__: pytest.fail("images were read"))
    words = ["run", "photos", "--data", str(images)]
    refused(capsys, words, r"needs the package .*: pip install 'semisfl\[pretrained\]'")
