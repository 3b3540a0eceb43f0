"""Run ``semisfl leakage`` from the command line."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from semisfl.cli import console
from semisfl.cli.main import main
from semisfl.data.sources import load_data
from semisfl.runs.start import train
from semisfl.settings import config as configs, presets
from semisfl.settings.policy import row_bits

NOISY = "noise=0.1,clip=20,update_clip=1,update_noise=0.1"
CONV = '{kind = "conv", channels = 8, kernel = 5}, {kind = "relu"}, {kind = "pool"}'
LAYERS = f'[{CONV}, {CONV}, {{kind = "flatten"}}, {{kind = "linear"}}]'
SMALL = ["clients.steps=1", "clients.active=1", "server.steps=2", "model.projector=linear"]
SMALL += [f"model.layers={LAYERS}", "model.cut=7"]


def test_a_preset_is_trained_attacked_and_its_leakage_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("semisfl.attacks.scene.PUBLIC", 100)
    monkeypatch.setattr("semisfl.attacks.scene.VICTIMS", 32)
    monkeypatch.setattr(console.out, "_width", 80)
    out = tmp_path / "leakage"
    words = ["leakage", "digits", "--rounds", "1", "--quick", "--device", "cpu"]
    defences = ["--defence", "none", "--defence", NOISY]
    assert main([*words, *defences, "--out", str(out), "-q", "--set", *SMALL]) == 0
    results = json.loads((out / "leakage.json").read_text())
    assert results["command"].startswith("semisfl")
    assert [row["defence"] for row in results["features"]] == ["none", NOISY]
    for row in results["features"]:
        assert row["cut"] == "flatten1" and row["bytes_per_image"] == 4 * 128
        assert 0 < row["mean_image"]["ssim"] < 1 and row["chance_identified"]["decoder"] == 1 / 32
        assert row["norm"] > 0
    bits = [row["bits_per_image"] for row in results["features"]]
    assert bits == [None, pytest.approx(row_bits(128, 0.1), abs=0.1)]
    kinds = [(row["defence"], row["server"], row["layer"]) for row in results["uploads"]]
    assert kinds == [(d, s, "3") for d in ("none", NOISY) for s in ("curious", "malicious")]
    assert all(row["rebuilt"] == 0 for row in results["uploads"][2:])
    assert len(results["updates"]) == 6
    with Image.open(out / "leakage.png") as sheet:
        assert sheet.height == 3 * (64 + 8)
    printed = " ".join(capsys.readouterr().out.split())
    assert results["judged_on"] == "test" and " test accuracy " in printed
    assert "…" not in printed  # on 80 columns every number is whole
    assert "Chance, without any features, is in brackets." in printed
    assert "(an image's pixels are 6,272)" in printed
    assert "upload, cut flatten1, none: a malicious server solves 8 of 8 inputs" in printed
    assert (
        "median norm of features" in printed and "norm of a bottom's change in a round" in printed
    )


def test_a_frozen_bottom_is_measured_at_every_cut_as_it_was_before_training_and_sends_no_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later cut than the run's freezes layers that the run trained, so it has the first weights."""
    monkeypatch.setattr("semisfl.attacks.scene.PUBLIC", 40)
    monkeypatch.setattr("semisfl.attacks.scene.VICTIMS", 16)
    settings = [*SMALL, "clients.bottom=frozen", "model.cut=3", "rounds=1"]
    config = configs.parse(configs.override(presets.values_of("digits"), settings))
    train(config, device="cpu", out=tmp_path / "run")
    out, cuts = tmp_path / "leakage", "pool1,linear1"
    words = ["--quick", "--device", "cpu", "--cuts", cuts, "--out", str(out), "-q"]
    words += ["--defence", str(Path(__file__).parents[2] / "policies" / "strict.toml")]
    measured = []
    for target in ([str(tmp_path / "run")], ["digits", "--set", *settings]):
        assert main(["leakage", *target, *words]) == 0
        results = json.loads((out / "leakage.json").read_text())
        assert results["uploads"] == results["updates"] == []
        measured.append(results["features"])
    assert measured[0] == measured[1]
    sent = [(row["cut"], row["features"], row["bytes_per_image"]) for row in measured[0]]
    assert sent == [("pool1", 8 * 12 * 12, 8 * 12 * 12 + 4), ("linear1", 10, 10 + 4)]
    with Image.open(out / "leakage.png") as sheet:
        assert sheet.height == (1 + 2) * (64 + 8)


@pytest.mark.parametrize("name", ["toy", "digits"])
def test_images_that_a_program_passed_are_not_replaced_by_others(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The images are refused even if they have the size, classes and name of a known set."""
    digits = load_data("digits")
    data = replace(digits, name=name, images=255 - digits.images)
    values = configs.override({}, [*SMALL, "rounds=1"])
    train(configs.parse(values), data=data, device="cpu", out=tmp_path / "run")
    words = ["leakage", str(tmp_path / "run"), "--quick", "--device", "cpu"]
    assert main([*words, "--out", str(tmp_path / "leakage")]) == 2
    error = (
        f"error: {tmp_path / 'run'} cannot be attacked without the images and the model it had: "
    )
    assert error in capsys.readouterr().err and not (tmp_path / "leakage").exists()
