"""Commands with one's own images: which preset they take, what it chooses, and how mistakes read."""

import json
import tomllib
from pathlib import Path

import pytest

from semisfl.cli.main import main
from semisfl.settings import catalog, presets
from semisfl.settings.config import parse
from tests.cli.test_cli import TINY, refused
from tests.cli.test_cli import images as images
from tests.cli.test_cli import inside_tmp as inside_tmp


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


def test_class_folders_without_train_and_test_are_refused_alike(
    images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flat = images / "train"
    served = ["--labeled", str(flat), "--insecure-loopback", "--listen", "127.0.0.1:0"]
    for words in (
        ["run", "--set", f"data.name={flat}"],
        ["show", "--partition", "x.png", "--set", f"data.name={flat}"],
        ["serve", *served, "--set", "clients.total=2", "clients.active=2"],
        ["inspect", "images", "--labeled", str(flat)],
        ["inspect", "digits", "--labeled", str(flat)],
    ):
        error = "train holds no labelled images; a folder needs train/<class>/. and test/<class>/."
        refused(capsys, words, error)
