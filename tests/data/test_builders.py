"""Data sets made of what people have: arrays, torch and Hugging Face data sets, CSV files, TIFF."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from semisfl import Dataset, train
from semisfl.data import decode
from semisfl.data.sources import load
from tests import toy


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


LABELS, TEST_LABELS = np.arange(6) % 2, np.arange(4) % 2
CHW, TEST_CHW = noise(6, 3, 8, 8), noise(4, 3, 8, 8, seed=1)


# --- arrays ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_arrays_with_channels_first_or_last(kind: str, channels_last: bool) -> None:
    arrays = [CHW, LABELS, TEST_CHW, TEST_LABELS]
    if channels_last:
        arrays[0], arrays[2] = (arrays[i].transpose(0, 2, 3, 1) for i in (0, 2))
    if kind == "torch":
        arrays = [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    data = Dataset.from_arrays(*arrays, classes=("a", "b"))
    assert torch.equal(data.images, torch.from_numpy(CHW))
    assert torch.equal(data.test_images, torch.from_numpy(TEST_CHW))
    assert data.labels.tolist() == LABELS.tolist() and data.classes == ("a", "b")
    assert data.mean == (0.5, 0.5, 0.5)


def test_grey_floats_names_and_unlabelled_images() -> None:
    grey, words = noise(6, 8, 8), np.array(["dog", "cat"] * 3)
    data = Dataset.from_arrays(
        grey / 255, words, noise(4, 8, 8), np.array(["cat"] * 4), unlabeled=noise(3, 8, 8)
    )
    assert torch.equal(data.images[:6, 0], torch.from_numpy(grey))
    assert data.classes == ("cat", "dog")
    assert data.labels.tolist() == [1, 0] * 3 + [-1] * 3
    assert data.test_labels.tolist() == [0] * 4


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({0: CHW.astype(np.float32)}, ValueError, "floats from .* to 255; give uint8"),
        ({0: noise(6, 4, 8, 8)}, ValueError, r"images is uint8 \[6, 4, 8, 8\]; it must be"),
        ({1: LABELS.astype(float)}, ValueError, "labels is float64 .* whole number or class name"),
        (
            {1: LABELS[:, None]},
            ValueError,
            r"labels is int64 \[6, 1\]; it must be \[n\], one whole",
        ),
        ({1: np.eye(2)[LABELS]}, ValueError, r"labels is float64 \[6, 2\]; it must be \[n\]"),
        ({1: [["a"]] * 6}, ValueError, r"labels is <U1 \[6, 1\]; it must be \[n\]"),
        ({1: LABELS[:3]}, ValueError, r"labels is torch.int64 \[3\]; it must be torch.int64 \[6\]"),
        ({3: np.array(["owl"] * 4), 1: np.array(["a", "b"] * 3)}, ValueError, "class 'owl'; known"),
    ],
)
def test_wrong_arrays_get_one_line(change: dict[int, Any], error: type, message: str) -> None:
    arrays: list[Any] = [CHW, LABELS, TEST_CHW, TEST_LABELS]
    for place, value in change.items():
        arrays[place] = value
    with pytest.raises(error, match=message) as raised:
        Dataset.from_arrays(*arrays)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("numbers, missing", [([1, 2, 3], 0), ([0, 3, 0], 1)])
def test_a_class_without_any_image_must_have_a_name(numbers: list[int], missing: int) -> None:
    labels, images = np.array(numbers), noise(3, 8, 8)
    pairs = [(Image.fromarray(image), label) for image, label in zip(images, numbers, strict=True)]
    error = f"no image has the label {missing}, and the highest is 3; number the classes from 0"
    with pytest.raises(ValueError, match=error):
        Dataset.from_arrays(images, labels, images, labels)
    with pytest.raises(ValueError, match=error):
        Dataset.from_torch(pairs, pairs)
    named = Dataset.from_arrays(images, labels, images, labels, classes=list("abcd"))
    assert len(named.classes) == 4


@pytest.mark.parametrize(
    "classes, names",
    [
        ([3, 8], ("3", "8")),
        (np.arange(2), ("0", "1")),
        ([b"cat", b"dog"], ("cat", "dog")),
        (np.array(["cat", "dog"]), ("cat", "dog")),
    ],
)
def test_names_of_classes_are_texts(classes: Any, names: tuple[str, ...]) -> None:
    """A checkpoint takes nothing else; so a run with other names ended in one that nobody could open."""
    pairs = Pairs([(picture(n), n % 2) for n in range(4)])
    for data in (
        Dataset.from_arrays(CHW, LABELS, TEST_CHW, TEST_LABELS, classes=classes),
        Dataset.from_torch(pairs, pairs, classes=classes),
        direct(classes=classes),
    ):
        assert data.classes == names and {type(name) for name in data.classes} == {str}


@pytest.mark.parametrize("of", [np.float32, np.float64, torch.tensor, list])
def test_mean_and_std_may_be_computed(of: Any) -> None:
    mean, std = of([0.25, 0.5, 0.75]), of([0.5, 0.25, 1])
    for data in (
        Dataset.from_arrays(CHW, LABELS, TEST_CHW, TEST_LABELS, mean=mean, std=std),
        direct(mean=mean, std=std),
    ):
        assert (data.mean, data.std) == ((0.25, 0.5, 0.75), (0.5, 0.25, 1.0))
        assert {type(value) for value in (*data.mean, *data.std)} == {float}


def direct(**changed: Any) -> Dataset:
    """Return a data set made by the constructor."""
    tensors = (torch.from_numpy(array) for array in (CHW, LABELS, TEST_CHW, TEST_LABELS))
    usual = {"classes": ("a", "b"), "mean": (0.5,) * 3, "std": (0.5,) * 3, **changed}
    return Dataset("x", usual["classes"], *tensors, mean=usual["mean"], std=usual["std"])


def test_arrays_can_be_trained_on() -> None:
    config = toy.values("semisfl", "rounds=1")
    images = noise(80, 16, 16)
    data = Dataset.from_arrays(images, np.arange(80) % 4, noise(8, 16, 16), np.arange(8) % 4)
    assert 0 <= train(config, data=data).accuracy <= 100


# --- torch and Hugging Face -----------------------------------------------------------------------


class Pairs(torch.utils.data.Dataset):
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, place: int) -> Any:
        return self.items[place]


def picture(number: int, side: int = 8) -> Image.Image:
    return Image.fromarray(noise(side, side, 3, seed=number))


def test_torch_data_sets_of_pictures_and_of_tensors() -> None:
    pictures = Pairs([(picture(n), n % 2) for n in range(4)])
    tensors = Pairs([(torch.from_numpy(TEST_CHW[n]) / 255, n % 2) for n in range(4)])
    data = Dataset.from_torch(pictures, tensors, unlabeled=Pairs([picture(9), picture(8)]))
    assert torch.equal(data.images[1], torch.from_numpy(np.array(picture(1)).transpose(2, 0, 1)))
    assert torch.equal(data.test_images, torch.from_numpy(TEST_CHW))
    assert data.labels.tolist() == [0, 1, 0, 1, -1, -1] and data.classes == ("0", "1")


def test_torch_pictures_are_resized() -> None:
    sides = Pairs([(picture(n, 8 + 4 * (n == 2)), n % 2) for n in range(4)])
    data = Dataset.from_torch(sides, sides, classes=("a", "b"))
    assert data.shape == (3, 8, 8) and "2 of 8 images had another size" in data.notes[0]
    assert Dataset.from_torch(sides, sides, size=16).shape == (3, 16, 16)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (
            Image.new("I", (8, 8)),
            "could not be read.* an image of mode I has",
        ),
        (Image.new("F", (8, 8)), "an image of mode F has 32-bit pixels, whose range is not known"),
        (
            torch.randn(3, 8, 8),
            "test holds floats from .*give uint8 values, or floats from",
        ),
        (torch.zeros(4, 8, 8), "test is uint8 .* must be"),
    ],
)
def test_torch_images_without_a_range_are_refused(image: Any, message: str) -> None:
    good = (picture(0), 0)
    with pytest.raises(ValueError, match=message):
        Dataset.from_torch(Pairs([good] * 4), Pairs([good, (image, 1)]))


def test_hugging_face_columns_by_name() -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {"scan": datasets.Image(), "kind": datasets.ClassLabel(names=["cat", "dog"])}
    )
    split = datasets.Dataset.from_dict(
        {"scan": [picture(n) for n in range(4)], "kind": [0, 1, 0, 1]}, features=features
    )
    both = datasets.DatasetDict({"train": split, "test": split})
    data = Dataset.from_hf(both, image="scan", label="kind")
    assert data.classes == ("cat", "dog") and data.test_labels.tolist() == [0, 1, 0, 1]
    assert torch.equal(data.images[2], torch.from_numpy(np.array(picture(2)).transpose(2, 0, 1)))
    with pytest.raises(ValueError, match="none of the columns photo is among scan, kind"):
        Dataset.from_hf(both, image="photo", label="kind")


# --- folders, CSV files, TIFF ---------------------------------------------------------------------


def save(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def listed(root: Path, *lines: str, header: str = "path,label,split,client") -> Path:
    for number in range(8):
        save(root / "all" / f"{number}.png", noise(8, 8, seed=number))
    file = root / "photos.csv"
    file.write_text("\n".join([header, *lines]) + "\n", encoding="utf-8")
    return file


def test_a_csv_file_lists_images(tmp_path) -> None:
    file = listed(
        tmp_path,
        *("all/4.png,dog,test,", "all/0.png,cat,train,", "all/1.png,dog,,", "all/5.png,cat,test,"),
        *("all/2.png,,,camera-b", "all/3.png,,,camera-a"),
    )
    data = Dataset.from_folder(file)
    assert data.classes == ("cat", "dog") and data.name == "photos"
    expected = [noise(8, 8, seed=number) for number in (0, 1, 2, 3)]
    assert torch.equal(data.images[:, 0], torch.from_numpy(np.stack(expected)))
    assert data.labels.tolist() == [0, 1, -1, -1] and data.test_labels.tolist() == [1, 0]
    assert data.clients is not None
    assert {name: held.tolist() for name, held in data.clients.items()} == {
        "camera-a": [3],
        "camera-b": [2],
    }


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("all/99.png,cat,,", "line 2: 'all/99.png' is no file; paths are relative to"),
        ("all/1.png,cat,later,", "line 2: split = 'later'; use train or test"),
        ("all/1.png,cat,,camera", "client = 'camera' holds an image without a label"),
        ("all/1.png,cat,,\nall/../all/1.png,cat,test,", "lists 'all/1.png' twice; list it once"),
    ],
)
def test_wrong_lines_of_a_csv_file_are_named(tmp_path, line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(str(listed(tmp_path, line)))


@pytest.mark.parametrize("suffix", ["tif", "tiff", "png", "pgm"])
def test_sixteen_bit_grey(tmp_path, suffix: str) -> None:
    deep = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    for split in ("train", "test"):
        for name in ("cat", "dog"):
            save(tmp_path / "set" / split / name / f"0.{suffix}", deep)
    data = Dataset.from_folder(tmp_path / "set")
    assert data.shape == (1, 8, 8) and data.notes == ()
    assert torch.equal(data.images[0, 0], torch.from_numpy((deep >> 8).astype(np.uint8)))


# --- sets that stay on disk -----------------------------------------------------------------------


def folder_of(root: Path, each: int = 30) -> Path:
    for split in ("train", "test"):
        for name in ("cat", "dog"):
            for number in range(each):
                save(root / split / name / f"{number:03}.png", noise(8, 8, 3, seed=number))
    return root


def test_a_set_is_decoded_once_and_mapped_from_disk(tmp_path, monkeypatch) -> None:
    root = folder_of(tmp_path / "set")
    (root / "train" / "cat" / "004.png").write_bytes(b"damaged")
    monkeypatch.setattr(decode, "CHUNK", 7)  # so that closing the gap takes several copies
    mapped = load(str(root))
    (pixels,) = (tmp_path / "cache").glob("*.npy")
    assert pixels.stat().st_size >= 120 * 3 * 8 * 8
    kept = [number for number in range(30) if number != 4]
    expected = torch.from_numpy(
        np.stack([noise(8, 8, 3, seed=n).transpose(2, 0, 1) for n in (*kept, *range(30))])
    )
    assert torch.equal(mapped.images, expected)
    assert "1 of 120 images could not be read" in mapped.notes[0]
    monkeypatch.setattr(decode, "decode", lambda *_: pytest.fail("decoded again"))
    again = load(str(root))
    assert torch.equal(again.images, expected) and again.notes == mapped.notes
    mapped_files = Path("/proc/self/maps").read_text(encoding="utf-8")
    assert pixels.name in mapped_files, "the images were read into memory"


def test_decoding_that_is_stopped_leaves_nothing(tmp_path, monkeypatch) -> None:
    root = folder_of(tmp_path / "set", each=2)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(decode, "pixels_of", stop)
    with pytest.raises(KeyboardInterrupt):
        load(str(root))
    assert not list((tmp_path / "cache").iterdir())
