"""Exported files, run by other programs' engines, give what the original gives; what does not is refused."""

import json
import re
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
import yaml
from torch import Tensor, nn

from semisfl import load
from semisfl.cli.main import main
from semisfl.data.dataset import Dataset
from semisfl.runs.portable import describe
from semisfl.runs.start import train
from semisfl.use import export as exports, onnx_file
from semisfl.use.classifier import Classifier
from semisfl.use.export import check, export
from tests import toy
from tests.disk import largest_file
from tests.use.trained import Trained, untrained_model

PIXELS = toy.dataset().test_images[:40]
HALVES: tuple[exports.Part, ...] = ("bottom", "top")


def run_onnx(path: Path, inputs: Tensor) -> Tensor:
    """Run a file as another program would, knowing only what onnxruntime says of it."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (entry,) = session.get_inputs()
    return torch.from_numpy(session.run(None, {entry.name: inputs.numpy()})[0])


def test_onnx_halves_and_whole(tmp_path: Path) -> None:
    """The model has residual blocks and an unusual cut."""
    model = untrained_model(tmp_path, toy.RESIDUAL, 4).recut("residual2")
    made = {part: export(model, PIXELS, tmp_path, part=part) for part in exports.INPUTS}
    expected = model.probabilities(PIXELS)
    for size in (1, 7, 40):
        pixels = PIXELS[:size]
        features = run_onnx(made["bottom"].path, pixels)
        torch.testing.assert_close(features, model.features(pixels), rtol=1e-4, atol=1e-5)
        for answer in (
            run_onnx(made["whole"].path, pixels),
            run_onnx(made["top"].path, features),
        ):
            torch.testing.assert_close(answer, expected[:size], rtol=1e-4, atol=1e-6)
    session = onnxruntime.InferenceSession(str(made["whole"].path))
    (entry,), (answer,) = session.get_inputs(), session.get_outputs()
    assert (entry.name, entry.type, entry.shape[1:]) == ("images", "tensor(uint8)", [3, 12, 12])
    assert isinstance(entry.shape[0], str), "the batch size is free"
    assert (answer.name, answer.shape[1:]) == ("probabilities", [toy.CLASSES])
    metadata = json.loads(session.get_modelmeta().custom_metadata_map["semisfl"])
    assert metadata["description"]["classes"] == list(model.classes)
    assert {one.images for one in made.values()} == {40}
    assert max(one.difference for one in made.values()) < 1e-4


def test_torch_export_needs_nothing_of_this_package(model: Classifier, tmp_path: Path) -> None:
    made = export(model, PIXELS, tmp_path, to="torch")
    program = torch.export.load(made.path)
    assert "semisfl" not in program.graph_module.code
    for size in (1, 9):
        answer = program.module()(PIXELS[:size])
        torch.testing.assert_close(answer, model.probabilities(PIXELS[:size]), rtol=1e-4, atol=1e-6)


def test_safetensors_hold_a_half_and_know_the_whole(model: Classifier, tmp_path: Path) -> None:
    made = {p: export(model, PIXELS, tmp_path, to="safetensors", part=p) for p in exports.INPUTS}
    loaded = {part: load(one.path) for part, one in made.items()}
    assert {one.identity for one in loaded.values()} == {model.identity}
    answer = loaded["top"].answer(loaded["bottom"].features(PIXELS))
    assert torch.equal(answer, loaded["whole"].answer(model.features(PIXELS)))
    for part, use in (("bottom", loaded["bottom"].probabilities), ("top", loaded["top"].features)):
        with pytest.raises(ValueError, match=rf"holds the {part} alone and this needs the"):
            use(PIXELS)
    sizes = {part: one.path.stat().st_size for part, one in made.items()}
    assert sizes["bottom"] < sizes["top"] < sizes["whole"]


def test_int8_agrees(trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, pixels = load(trained("supervised")[0]), toy.dataset().test_images
    # A run of two rounds is sure of little: what int8 changes may decide between two classes.
    monkeypatch.setattr(exports, "AGREEMENT", 0.8)
    small = export(model, pixels, tmp_path, int8=True)
    assert small.path.name == "whole-int8.onnx"
    assert small.images == 60, "those that showed it its values are not those it is checked on"
    outputs = run_onnx(small.path, pixels)
    assert 0 < float((outputs - model.probabilities(pixels)).abs().max()) < 0.1
    kinds = {entry.data_type for entry in onnx.load(small.path).graph.initializer}
    assert onnx.TensorProto.INT8 in kinds
    assert onnx_file.File(small.path).identity == model.identity


@pytest.mark.parametrize("to", exports.SUFFIXES)
def test_a_full_disk_is_an_error_and_nothing_is_kept(
    to: Any, model: Classifier, tmp_path: Path
) -> None:
    with largest_file(1000), pytest.raises(OSError, match="File too large"):
        export(model, PIXELS, tmp_path, to=to)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", [1e-2, float("nan")])
def test_a_mismatch_is_an_error_and_nothing_is_kept(
    wrong: float, model: Classifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "whole.pt2").write_text("an older one")

    def damaged(*arguments: Any) -> nn.Module:
        module = honest(*arguments)
        buffer = module.get_buffer("normalize.offset")
        buffer += wrong
        return module

    honest = exports.module_of
    monkeypatch.setattr(exports, "module_of", damaged)
    with pytest.raises(ValueError, match=r"differs from the original by up to .* it is not kept"):
        export(model, PIXELS, tmp_path, to="torch")
    assert [file.name for file in tmp_path.iterdir()] == ["whole.pt2"]
    assert (tmp_path / "whole.pt2").read_text() == "an older one"


def test_int8_that_answers_otherwise_is_refused(model: Classifier) -> None:
    def rolled(pixels: Tensor) -> Tensor:
        return model.probabilities(pixels).roll(1, 1)

    with pytest.raises(ValueError, match=r"gives another class for 100\.0% of 40 images"):
        check(model, "whole", rolled, PIXELS, int8=True)
    difference, agreement = check(model, "whole", model.probabilities, PIXELS, int8=True)
    # Not 0: the check's batches of 1 and 39 images may be summed in another order than one of 40.
    assert difference < 1e-6 and agreement == 1


def test_the_card_says_what_it_is(trained: Trained, tmp_path: Path) -> None:
    run, result = trained("semisfl")
    card = export(load(run), PIXELS, tmp_path, to="safetensors").card.read_text()
    best = load(run).description
    _, front, body = card.split("---\n", 2)
    assert body.startswith("\n# SemiSFL on toy\n")
    about = yaml.safe_load(front)
    assert about["pipeline_tag"] == "image-classification" and "semisfl" in about["tags"]
    (judged,) = about["model-index"][0]["results"]
    assert judged["dataset"] == {"name": "toy", "type": "toy", "split": "test"}
    assert judged["metrics"][0]["value"] == pytest.approx(best.accuracy, abs=0.005)
    for expected in (
        "colour0, colour1, colour2, colour3",
        "uint8 images [n, 3, 12, 12]",
        "16 labelled images on the server",
        f"{best.accuracy:.1f} % of 120 test images",
        f"{best.sent['features_up']:,} bytes",
        "Sent between the server and all clients together, up to this model:",
        "`rounds = 2` (preset: 30)",
        "membership inference",
        "Every image gets one of these classes",
        "highest accuracy on these same test images: they chose it",
        f"SHA-256 of the labelled images with labels: `{best.digests['labeled']}`",
        f"`clients.total = {best.settings['clients']['total']}` (preset: 10)",
        "converted to RGB, and resized to 12 x 12 pixels by bilinear interpolation",
        "a JPEG of more than 4.2 million pixels is decoded at a fraction of its size first",
        f"Macro-F1 {best.macro_f1:.1f} %. Recall of each class:",
        f"- colour3: {best.recall_by_class[3]:.1f} %",
    ):
        assert expected in card, expected
    assert "fedmatch" not in card, "settings of other methods say nothing of this model"
    assert "optimizer.momentum" not in card, "it is the preset's"
    assert result.rounds[-1]["bytes"]["features_up"] >= best.sent["features_up"] > 0
    assert "data.labeled" in card
    alone = export(load(trained("supervised")[0]), PIXELS, tmp_path, to="safetensors").card
    assert "Nothing was sent" in alone.read_text()


def test_the_digest_of_the_data_follows_pixels_and_labels(trained: Trained) -> None:
    one, again, other = (toy.dataset(), toy.dataset(), toy.dataset())
    other.test_labels[0] = (other.test_labels[0] + 1) % 4

    def digests(data: Dataset) -> dict[str, str]:
        config = toy.values("semisfl")
        return describe(config, data, toy.partition(data), "teacher", None).digests

    assert digests(one) == digests(again) == load(trained("semisfl")[0]).description.digests
    assert digests(other)["labeled"] == digests(one)["labeled"]
    assert digests(other)["judged"] != digests(one)["judged"]


# --- the command ---------------------------------------------------------------------------------


def test_the_command_prints_the_difference(
    trained: Trained, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(trained("fedmatch")[0])
    words = ["export", run, "--to", "safetensors", "--check", str(images)]
    assert main([*words, "--out", str(tmp_path / "to")]) == 0
    printed = capsys.readouterr().out
    match = re.search(r"on 24 images it differs from the original by at most (\S+) and", printed)
    assert match and float(match[1]) < 1e-6, printed
    assert main([*words, "--part", "bottom", "--cut", "1", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert Path(answer["file"]) == Path(run, "export", "bottom.safetensors")
    assert answer["agreement"] == 1 and Path(answer["card"]).is_file()
    assert load(answer["file"]).description.cut == 1


MODERN = """[
    {kind = "conv", channels = 6, stride = 2},
    {kind = "groupnorm", groups = 3},
    {kind = "gelu"},
    {kind = "conv", channels = 12, groups = 6, padding = 1},
    {kind = "layernorm"},
    {kind = "gelu"},
    {kind = "avgpool"},
    {kind = "flatten"},
    {kind = "linear"},
]"""


class OwnModel(nn.Module):
    """A user's module with the layers of `MODERN`; calling its children in order gives the same result."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, stride=2), nn.GroupNorm(3, 6), nn.GELU())
        self.depthwise = nn.Conv2d(6, 12, 3, padding=1, groups=6)
        self.norm = nn.LayerNorm([12, 5, 5])
        self.act = nn.GELU()
        self.pool = nn.AvgPool2d(5)
        self.fc = nn.Linear(12, toy.CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        shown = self.act(self.norm(self.depthwise(self.stem(images))))
        return self.fc(self.pool(shown).flatten(1))


TRANSFORMER = """[
    {kind = "conv", channels = 8, kernel = 4, stride = 4},
    {kind = "tokens"},
    {kind = "classtoken", name = "class"},
    {kind = "positions"},
    {kind = "residual", body = [{kind = "layernorm"}, {kind = "attention", heads = 2}]},
    {kind = "firsttoken"},
    {kind = "linear"},
]"""


@pytest.mark.parametrize(("layers", "cut"), [(MODERN, 4), (TRANSFORMER, 5)])
def test_onnx_of_newer_layers(layers: str, cut: int, tmp_path: Path) -> None:
    """Each file has operators that a device takes from anybody. No Python code can have a layer ``class``."""
    model = untrained_model(tmp_path, layers, cut)
    file = onnx_file.File(export(model, PIXELS, tmp_path).path, foreign=True)
    torch.testing.assert_close(file(PIXELS), model.probabilities(PIXELS), rtol=1e-4, atol=1e-6)


def test_onnx_of_a_users_module(tmp_path: Path) -> None:
    """No layer table describes the module's nested stem."""
    data, own = toy.dataset(), OwnModel()
    means = {"data": data, "partition": toy.partition(data), "device": "cpu", "model": own}
    train(toy.values("semisfl", "rounds=1"), **means, out=tmp_path / "run")  # type: ignore[arg-type]
    model = load(tmp_path / "run", model=own)
    bottom, top = (export(model, PIXELS, tmp_path, part=part).path for part in HALVES)
    answer = run_onnx(top, run_onnx(bottom, PIXELS))
    torch.testing.assert_close(answer, model.probabilities(PIXELS), rtol=1e-4, atol=1e-6)
