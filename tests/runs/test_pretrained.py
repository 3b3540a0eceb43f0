"""Starting from weights: whose names are known, what stays new, and that a file executes nothing."""

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from semisfl import load, train
from semisfl.models import split as models
from semisfl.models.build import build
from semisfl.settings.config import Config, ConfigError
from tests import toy
from tests.models.test_own import InOrder
from tests.toy import start_from

SHAPE = (3, 16, 16)
NORM = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def own(model: nn.Module | None = None) -> dict[str, Any]:
    return toy.own(model or toy.network(batchnorm=True))


def settings(*assignments: str) -> Config:
    few = ("rounds=1", "server.steps=1", "clients.steps=1")
    return toy.values("semisfl", *few, *assignments)


def torchvision_names(stem: int = 7, classes: int = 1000) -> dict[str, Tensor]:
    """Return a state with the names and shapes of torchvision's resnet18."""
    shapes: dict[str, tuple[int, ...]] = {"conv1.weight": (64, 3, stem, stem)}
    norms = {"bn1": 64}
    for group, width in enumerate((64, 128, 256, 512), start=1):
        for number in (0, 1):
            place, before = f"layer{group}.{number}", width // 2 if group > 1 else width
            first = before if number == 0 else width
            shapes[f"{place}.conv1.weight"] = (width, first, 3, 3)
            shapes[f"{place}.conv2.weight"] = (width, width, 3, 3)
            norms |= {f"{place}.bn1": width, f"{place}.bn2": width}
            if group > 1 and number == 0:
                shapes[f"{place}.downsample.0.weight"] = (width, before, 1, 1)
                norms[f"{place}.downsample.1"] = width
    shapes |= {"fc.weight": (classes, 512), "fc.bias": (classes,)}
    for name, width in norms.items():
        shapes |= {
            f"{name}.{key}": () if key == "num_batches_tracked" else (width,) for key in NORM
        }
    generator = torch.Generator().manual_seed(0)
    return {
        key: torch.tensor(7)
        if key.endswith("num_batches_tracked")
        else torch.rand(shape, generator=generator)
        for key, shape in shapes.items()
    }


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(logging.getLogger("semisfl"), "propagate", True)
    return caplog


def test_torchvisions_resnet_fits_but_for_its_stem_and_head(tmp_path: Path, warnings: Any) -> None:
    stored = torchvision_names()
    torch.save(
        {"state_dict": {f"module.{key}": value for key, value in stored.items()}},
        tmp_path / "a.pth",
    )
    model = build("resnet18", (3, 32, 32), 10)
    before = {key: value.clone() for key, value in model.whole().state_dict().items()}
    start_from(model, str(tmp_path / "a.pth"), "resnet18")
    after = {key.partition(".")[2]: value for key, value in model.whole().state_dict().items()}
    for name, theirs in {
        "bn1.running_var": "bn1.running_var",
        "block1_1.body.conv2.weight": "layer1.0.conv2.weight",
        "block2_1.shortcut.conv.weight": "layer2.0.downsample.0.weight",
        "block2_1.shortcut.bn.bias": "layer2.0.downsample.1.bias",
        "block4_2.body.bn2.num_batches_tracked": "layer4.1.bn2.num_batches_tracked",
    }.items():
        assert torch.equal(after[name], stored[theirs]), name
    new = {
        key.partition(".")[2]
        for key, value in before.items()
        if torch.equal(value, after[key.partition(".")[2]])
    }
    assert new == {"conv1.weight", "fc.weight", "fc.bias"}
    assert "fc (1000x512 in the file, 10x512 here)" in warnings.text
    assert "do not fit and are new: conv1 (64x3x7x7 in the file, 64x3x3x3 here)" in warnings.text


def test_the_names_of_wide_resnets(tmp_path: Path) -> None:
    model = build("wrn-28-2", SHAPE, 10)
    own_names = {key.partition(".")[2]: value for key, value in model.whole().state_dict().items()}
    theirs = {}
    for key, value in own_names.items():
        layer, _, parameter = key.rpartition(".")
        for group in (1, 2, 3):
            if layer == f"bn{group}":
                layer = f"block{group}.layer.0.bn1"
            for number in (1, 2, 3, 4):
                place = f"block{group}.layer.{number - 1}"
                layer = layer.replace(f"block{group}_{number}.body", place)
                layer = layer.replace(
                    f"block{group}_{number}.shortcut.conv", f"{place}.convShortcut"
                )
        layer = "bn1" if layer == "bn4" else layer
        theirs[f"{layer}.{parameter}"] = torch.rand(value.shape) if value.dim() else value.clone()
    save_file(theirs, tmp_path / "wrn.safetensors")
    start_from(model, str(tmp_path / "wrn.safetensors"), "wrn-28-2")
    assert torch.equal(own_names["bn2.bias"], theirs["block2.layer.0.bn1.bias"])
    assert torch.equal(own_names["bn4.bias"], theirs["bn1.bias"])
    assert torch.equal(
        own_names["block3_1.shortcut.conv.weight"], theirs["block3.layer.0.convShortcut.weight"]
    )
    assert torch.equal(own_names["fc.weight"], theirs["fc.weight"])


@pytest.mark.parametrize("cut", ["conv", "fc1"])
def test_a_run_starts_from_another_runs_best(cut: str, tmp_path: Path) -> None:
    """The cut may differ, and every weight is taken."""
    train(settings(), out=tmp_path / "first", **own())
    best = load(tmp_path / "first").network
    model = models.split(toy.network(batchnorm=True), (3, 12, 12), cut)
    start_from(model, str(tmp_path / "first" / "best.safetensors"), "custom")
    images = torch.rand(2, 3, 12, 12)
    torch.testing.assert_close(model.eval()(images), best(images))
    again = train(settings(f"model.weights={tmp_path}/first/best.safetensors"), **own())
    assert again.rounds


def test_the_head_is_new_if_the_classes_have_other_names(tmp_path: Path, warnings: Any) -> None:
    train(settings(), out=tmp_path / "first", **own())
    best = load(tmp_path / "first")
    for classes, same in ((best.classes, True), (tuple("wxyz"), False)):
        model = models.split(toy.network(batchnorm=True), (3, 12, 12), "conv")
        file = tmp_path / "first" / "best.safetensors"
        warnings.clear()
        start_from(model, str(file), "custom", classes)
        old, new = best.network.state_dict(), model.whole().state_dict()
        (head,) = [key for key in new if key.endswith("fc2.weight")]
        assert torch.equal(old[head], new[head]) is same
        assert ("the head fc2 is new" in warnings.text) is not same


class Bomb:
    """An object that runs a command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_file_that_executes_code_is_refused_and_nothing_runs(
    wrapped: bool, tmp_path: Path
) -> None:
    bomb: Any = {"conv1.weight": torch.zeros(1), "bomb": Bomb(tmp_path / "owned")}
    torch.save({"state_dict": bomb} if wrapped else bomb, tmp_path / "evil.pth")
    with pytest.raises(ConfigError, match="would execute code from it; save its state_dict"):
        start_from(build("cnn", SHAPE, 10), str(tmp_path / "evil.pth"), "cnn")
    assert not (tmp_path / "owned").exists()


def _write(tmp_path: Path, kind: str) -> Path:
    file = tmp_path / ("a.safetensors" if kind in ("text", "strangers") else "a.pth")
    if kind == "text":
        file.write_text("no tensors at all")
    if kind == "strangers":
        save_file({"encoder.weight": torch.zeros(2)}, file)
    if kind == "nan":
        torch.save({"conv1.weight": torch.full((32, 3, 5, 5), torch.nan)}, file)
    return file


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("missing", "cannot be read as weights .* No such file"),
        ("text", r"cannot be read as weights \(.+\); give a .safetensors or .pth"),
        (
            "strangers",
            "no layer fits model.name = 'cnn'; the file has encoder.weight, the model conv1",
        ),
        ("nan", "conv1.weight holds NaN or infinity"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line(kind: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=reason) as error:
        start_from(build("cnn", (3, 32, 32), 10), str(_write(tmp_path, kind)), "cnn")
    assert "\n" not in str(error.value)


def test_a_module_that_is_not_a_sequence_trains_and_is_loaded_again(tmp_path: Path) -> None:
    result = train(settings(), out=tmp_path / "run", **own(InOrder()))
    assert result.rounds and load(tmp_path / "run", model=InOrder()).network is not None
