"""A model's file alone answers as the run did, for every method and for a run over the network."""

import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from torch import nn

from semisfl import load, predict
from semisfl.runs import checkpoint
from semisfl.runs.checkpoint import CheckpointError
from semisfl.runs.start import train
from semisfl.settings import catalog
from semisfl.use import pictures
from tests import toy
from tests.use.trained import Trained

DATA = toy.dataset()


@pytest.mark.parametrize("method", catalog.METHODS)
def test_a_model_file_gives_the_answers_of_its_run(
    method: str, trained: Trained, tmp_path: Path
) -> None:
    run, result = trained(method)
    alone = tmp_path / "model.safetensors"
    shutil.copy(run / "latest.safetensors", alone)
    model = load(alone)
    probabilities = model.probabilities(DATA.test_images)
    expected = predict(result.model, DATA.test_images, DATA)
    torch.testing.assert_close(probabilities, expected, rtol=1e-5, atol=1e-6)
    as_numpy = predict(result.model, DATA.test_images.numpy()[::-1], DATA)
    torch.testing.assert_close(as_numpy.flip(0), expected)
    right = (probabilities.argmax(1) == DATA.test_labels).float().mean()
    assert 100 * float(right) == pytest.approx(result.accuracy, abs=1e-4)
    about = model.description
    assert (about.method, about.data, about.classes) == (method, "toy", DATA.classes)
    assert (about.shape, about.mean, about.std) == ((3, 12, 12), DATA.mean, DATA.std)
    assert (about.labeled, about.tested_on) == (16, 120)
    assert (about.accuracy, about.tested_after) == (result.accuracy, 2)


def test_the_network_is_the_one_the_run_is_judged_by(trained: Trained) -> None:
    """It is the teacher where there is one, not the student."""
    run, _ = trained("semisfl")
    state = checkpoint.read(run / "latest.safetensors")
    model = load(run / "latest.safetensors")
    assert model.description.network == "teacher"
    ours = model.network.bottom.state_dict()["conv.weight"]
    assert torch.equal(ours, state["method"]["teacher"]["model.bottom.conv.weight"])
    assert not torch.equal(ours, state["method"]["student"]["bottom.conv.weight"])


def test_no_weight_is_written_twice(trained: Trained) -> None:
    for method in catalog.METHODS:
        with safe_open(trained(method)[0] / "latest.safetensors", framework="pt") as file:
            assert not [name for name in file.keys() if name.startswith("/model/")], method  # noqa: SIM118


def test_the_best_is_taken_before_the_latest(trained: Trained, tmp_path: Path) -> None:
    run = shutil.copytree(trained("supervised")[0], tmp_path / "run")
    for name in ("best", "latest"):
        assert load(run).path == run / f"{name}.safetensors"
        (run / f"{name}.safetensors").unlink()
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        load(run)
    with pytest.raises(ValueError, match="is neither a run"):
        load(tmp_path / "nowhere")


# --- images --------------------------------------------------------------------------------------


def test_files_folders_and_pixels_are_told_apart(trained: Trained, images: Path) -> None:
    model = load(trained("supervised")[0])
    expected = model.predict(DATA.test_images[:24])
    predictions = model.predict(images)
    by_name = dict(zip(predictions.names, predictions.labels, strict=True))
    assert len(by_name) == 24 and not predictions.skipped
    assert [by_name[str(file)] for file in sorted(images.rglob("*.png"), key=lambda f: f.name)] == (
        expected.labels
    )
    file = next(images.rglob("000.png"))
    for one in (str(file), [file], [Image.open(file)]):
        torch.testing.assert_close(model.predict(one).probabilities, expected.probabilities[:1])
    numpy = model.predict(DATA.test_images[:2].numpy())
    torch.testing.assert_close(numpy.probabilities, expected.probabilities[:2])
    backwards = model.predict(DATA.test_images[:2].numpy()[::-1])
    torch.testing.assert_close(backwards.probabilities, expected.probabilities[:2].flip(0))
    assert len(model.predict(DATA.test_images[:0]).names) == 0


def test_images_become_grey_or_colour_as_the_model_needs(tmp_path: Path) -> None:
    file = tmp_path / "colour.png"
    Image.new("RGB", (8, 8), (30, 60, 90)).save(file)
    (batch,) = pictures.batches([file], (1, 8, 8))
    assert batch.images.unique().tolist() == [54], "0.299 R + 0.587 G + 0.114 B"
    (batch,) = pictures.batches([Image.new("L", (4, 4), 7)], (3, 8, 8))
    assert batch.images.shape == (1, 3, 8, 8) and batch.images.unique().tolist() == [7]


@pytest.mark.parametrize("shape", [(1, 12, 12), (3, 12, 13)], ids=str)
def test_pixels_of_another_shape_are_refused(shape: tuple[int, ...], trained: Trained) -> None:
    model = load(trained("supervised")[0])
    with pytest.raises(ValueError, match=r"the model takes torch.uint8 \[n, 3, 12, 12\]"):
        model.predict(torch.zeros(2, *shape, dtype=torch.uint8))


# --- files that are no good ----------------------------------------------------------------------


def test_a_network_that_no_table_describes_is_asked_for_again(tmp_path: Path) -> None:
    def own() -> nn.Sequential:
        model = toy.network()
        model[1] = nn.LeakyReLU()
        return model

    split = toy.partition(DATA)
    result = train(
        toy.values("supervised", "rounds=1"),
        out=tmp_path / "run",
        data=DATA,
        partition=split,
        model=own(),
        device="cpu",
    )
    with pytest.raises(ValueError, match=r"give it again, load\(path, model=...\)"):
        load(tmp_path / "run")
    probabilities = load(tmp_path / "run", model=own()).probabilities(DATA.test_images)
    assert torch.equal(probabilities, predict(result.model, DATA.test_images, DATA))
    with pytest.raises(CheckpointError, match="the weights do not fit the network"):
        load(tmp_path / "run", model=toy.network(batchnorm=True))


def test_cut_elsewhere_it_answers_alike(trained: Trained) -> None:
    model = load(trained("semisfl")[0])
    pixels = DATA.test_images[:10]
    expected = model.probabilities(pixels)
    identities = {model.identity}
    for cut in ("conv", "bn", "relu", "fc1", "relu1", "drop"):
        again = model.recut(cut).recut(cut)
        identities.add(again.identity)
        features = again.features(pixels)
        assert features.shape == (10, again.network.features)
        torch.testing.assert_close(again.answer(features), expected, rtol=1e-5, atol=1e-6)
    assert len(identities) == 7


def test_an_altered_file_is_refused_by_its_hash(trained: Trained, tmp_path: Path) -> None:
    """A class renamed, so that a picture would silently be called something else; or a weight changed."""
    original = (trained("semifl")[0] / "best.safetensors").read_bytes()
    file = tmp_path / "altered.safetensors"
    renamed = original.replace(b"colour1", b"colour7", 1)
    weight = original[:-9] + bytes([original[-9] ^ 1]) + original[-8:]
    for content in (original[:-9], renamed, weight):
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match="is damaged"):
            load(file)
    file.write_bytes(original)
    load(file)
