"""Images from every kind of source, and what happens to bad ones."""

import io
import os
import shutil
import struct
import sys
import unicodedata
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from semisfl.data import decode, places
from semisfl.data.dataset import Dataset
from semisfl.data.sources import load


def noise(seed: int, shape: tuple[int, ...] = (8, 8, 3)) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def save(path: Path, pixels: np.ndarray, **options) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, **options)


def class_folder(root: Path, each: int = 3, shape: tuple[int, ...] = (8, 8, 3)) -> Path:
    for place, part in enumerate(("train", "test")):
        for label, name in enumerate(("cat", "dog")):
            for number in range(each):
                seed = 100 * place + 10 * label + number
                save(root / part / name / f"{number}.png", noise(seed, shape))
    return root


def write_packed(path: Path, rows: list[int], *, train: int = 8, **change: np.ndarray) -> Path:
    """Images ``noise(row)`` of a set whose first rows are for training, label row % 2."""
    encoded = []
    for row in rows:
        out = io.BytesIO()
        Image.fromarray(noise(row)).save(out, "WEBP", lossless=True)
        encoded.append(out.getvalue())
    arrays: dict[str, Any] = {
        "bytes": np.frombuffer(b"".join(encoded), np.uint8),
        "offsets": np.cumsum([0, *map(len, encoded)]).astype(np.int64),
        "labels": np.array([row % 2 for row in rows], np.int16),
        "split": np.array([row >= train for row in rows], np.uint8),
        "classes": np.array(["even", "odd"]),
        "index": np.array([row if row < train else row - train for row in rows], np.int32),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **(arrays | change))
    return path


def planes(*seeds: int, shape: tuple[int, ...] = (8, 8, 3)) -> torch.Tensor:
    return torch.from_numpy(np.stack([noise(s, shape).transpose(2, 0, 1) for s in seeds]))


def refuses(match: str, name: str | Path, **options) -> None:
    with pytest.raises(ValueError, match=match) as caught:
        load(str(name), **options)
    assert "\n" not in str(caught.value)


# The embedded digits


def test_digits():
    digits = load("digits")
    assert digits.images.shape == (5000, 1, 28, 28)
    assert digits.test_images.shape == (2000, 1, 28, 28)
    assert digits.classes == tuple("0123456789")
    assert (digits.mean, digits.std) == ((0.1307,), (0.3081,))
    assert (digits.notes, digits.clients) == ((), None)
    # Stratified: shares of MNIST, of which 1 is the most and 5 the least frequent digit.
    assert torch.bincount(digits.labels).tolist()[:2] == [494, 562]
    assert int(torch.bincount(digits.labels).argmin()) == 5
    # Whole images, not noise: the statistics are near those of all of MNIST.
    assert (digits.images / 255).mean().item() == pytest.approx(0.1307, abs=0.003)
    seen = {image.numpy().tobytes() for image in digits.images}
    assert not any(image.numpy().tobytes() in seen for image in digits.test_images)


def test_digits_can_be_resized():
    digits = load("digits", size=32)
    assert digits.images.shape == (5000, 1, 32, 32)
    assert digits.notes == (), "they have the size that was asked for"


# Packed files


def test_shards_are_joined_in_the_order_of_index(tmp_path):
    write_packed(tmp_path / "set_0of2.npz", [9, 0, 2, 4, 6])
    write_packed(tmp_path / "set_1of2.npz", [7, 1, 8, 3, 5])
    for path in ("set_0of2.npz", "set_1of2.npz", "set", ""):
        dataset = load(str(tmp_path / path))
        assert torch.equal(dataset.images, planes(*range(8)))
        assert torch.equal(dataset.test_images, planes(8, 9))
        assert dataset.labels.tolist() == [0, 1] * 4
        assert dataset.test_labels.tolist() == [0, 1]
        assert (dataset.name, dataset.classes, dataset.notes) == ("set", ("even", "odd"), ())


@pytest.mark.parametrize("arrange", [(0, 1, 2, 3), (0, 3, 1, 2)])
def test_plain_arrays_in_colour(tmp_path, arrange):
    x = np.stack([noise(seed, (8, 6, 3)) for seed in range(6)]).transpose(arrange)
    split = np.array([0, 1, 0, 0, 1, 0], np.uint8)
    labels = np.array([0, 0, 1, -1, 1, 0], np.int16)
    np.savez(tmp_path / "own.npz", x=x, labels=labels, split=split, classes=["a", "b"])
    dataset = load(str(tmp_path / "own.npz"))
    assert torch.equal(dataset.images, planes(0, 2, 3, 5, shape=(8, 6, 3)))
    assert dataset.labels.tolist() == [0, 1, -1, 0]
    assert torch.equal(dataset.test_images, planes(1, 4, shape=(8, 6, 3)))
    assert (dataset.mean, dataset.std) == ((0.5,) * 3, (0.5,) * 3)


def test_bad_packed_files(tmp_path):
    def bad(name: str, match: str, **change) -> None:
        refuses(match, write_packed(tmp_path / name / "set.npz", list(range(10)), **change))

    bad("lacks", "set.npz has 3 labels but 10 images", labels=np.zeros(3, np.int16))
    bad("split", "split values other than 0", split=np.full(10, 2))
    bad("labels", "labels runs from 0 to 7; it must lie in -1..1", labels=np.arange(10))
    bad("classes", "one entry, 'all'", classes=np.array(["all"]), labels=np.zeros(10, np.int16))
    bad("untrained", "without training images: odd", labels=np.arange(10) // 8)
    bad("no_test", "no test images", split=np.zeros(10, np.uint8))
    zeros = [0] * 4
    np.savez(tmp_path / "x.npz", x=np.zeros((4, 4, 4)), labels=zeros, split=zeros, classes=["a"])
    refuses(r"x is float64 \[4, 4, 4\]; it must be uint8", tmp_path / "x.npz")
    (tmp_path / "z.npz").write_bytes(b"not a zip")
    refuses("z.npz is not a readable .npz", tmp_path / "z.npz")
    refuses("fits several data sets", tmp_path)


def test_pickled_objects_are_never_loaded(tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "exploded"),)

    labels = np.array([Bomb()], dtype=object)
    np.savez(tmp_path / "evil.npz", x=np.zeros((1, 4, 4), np.uint8), labels=labels, split=[0])
    refuses("not a readable .npz of plain arrays", tmp_path / "evil.npz")
    assert not (tmp_path / "exploded").exists()


# Folders


def test_class_folder(tmp_path):
    dataset = load(str(class_folder(tmp_path / "pets")))
    assert (dataset.name, dataset.classes, dataset.notes) == ("pets", ("cat", "dog"), ())
    assert torch.equal(dataset.images, planes(0, 1, 2, 10, 11, 12))
    assert dataset.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert torch.equal(dataset.test_images, planes(100, 101, 102, 110, 111, 112))
    assert dataset.test_labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert dataset.clients is None


def test_unlabeled_images_have_no_label_and_no_holder(tmp_path):
    class_folder(tmp_path)
    save(tmp_path / "unlabeled" / "a.png", noise(50))
    dataset = load(str(tmp_path))
    assert dataset.labels.tolist() == [0, 0, 0, 1, 1, 1, -1]
    assert torch.equal(dataset.images[6:], planes(50))
    assert dataset.clients is None


@pytest.mark.parametrize("parent", ["unlabeled", "clients"])
def test_client_folders_beside_classes(tmp_path, parent):
    class_folder(tmp_path)
    save(tmp_path / parent / "bob" / "deep" / "b.png", noise(51))
    save(tmp_path / parent / "ann" / "a.png", noise(50))
    save(tmp_path / parent / "ann" / "c.png", noise(52))
    dataset = load(str(tmp_path))
    assert torch.equal(dataset.images[6:], planes(50, 52, 51))
    assert dataset.clients is not None
    held = {name: rows.tolist() for name, rows in dataset.clients.items()}
    assert held == {"ann": [6, 7], "bob": [8]}


def test_plain_client_folders_and_a_devices_own(tmp_path):
    save(tmp_path / "bob" / "b.png", noise(1))
    save(tmp_path / "ann" / "a.png", noise(0))
    dataset = load(str(tmp_path), tested=False)
    assert (dataset.classes, dataset.labels.tolist()) == ((), [-1, -1])
    assert dataset.test_images.shape == (0, 3, 8, 8)
    assert dataset.clients is not None
    assert {name: rows.tolist() for name, rows in dataset.clients.items()} == {
        "ann": [0],
        "bob": [1],
    }
    own = load(str(tmp_path / "bob"))
    assert own.clients is not None
    assert list(own.clients) == ["bob"]
    assert torch.equal(own.images, planes(1))


def test_grey_folders_stay_grey_and_mixed_ones_become_colour(tmp_path):
    class_folder(tmp_path / "grey", shape=(8, 8))
    assert load(str(tmp_path / "grey")).images.shape == (6, 1, 8, 8)
    save(tmp_path / "grey" / "train" / "cat" / "colour.png", noise(7))
    mixed = load(str(tmp_path / "grey"))
    assert mixed.images.shape == (7, 3, 8, 8)
    assert torch.equal(mixed.images[0, 0], mixed.images[0, 2])


def test_hidden_files_and_names_of_folders_are_no_images_beside_client_folders(tmp_path):
    for client in ("cam", "cam.png"):
        save(tmp_path / client / "0.png", noise(1))
    (tmp_path / "._cam.png").touch()  # as macOS leaves them on other disks
    assert set(load(str(tmp_path), tested=False).clients) == {"cam", "cam.png"}


def test_class_names_that_look_alike_are_one_class(tmp_path):
    """An archive made on a Mac has two code points for one accented letter."""
    one, two = (unicodedata.normalize(form, "\u00e9t\u00e9") for form in ("NFC", "NFD"))
    for part, names in (("train", (one, two, "z")), ("test", (two, "z"))):
        for number, name in enumerate(names):
            save(tmp_path / part / name / "0.png", noise(number + 10 * len(part)))
    dataset = load(str(tmp_path))
    assert dataset.classes == ("z", one)
    assert sorted(dataset.labels.tolist()) == [0, 1, 1]
    assert sorted(dataset.test_labels.tolist()) == [0, 1]


def test_folders_behind_links_are_read_once(tmp_path):
    root = class_folder(tmp_path / "images")
    save(tmp_path / "elsewhere" / "x.png", noise(99))
    before = len(load(str(root)).labels)
    first, second = sorted((root / "train").iterdir())[:2]
    (first / "more").symlink_to(tmp_path / "elsewhere")
    (first / "again").symlink_to(tmp_path / "elsewhere")
    (first / "up").symlink_to(root / "train")  # would give the images of other classes this label
    (second / "round").symlink_to(second)
    labels = load(str(root)).labels
    assert len(labels) == before + 1
    assert (labels == 0).sum() == (labels == 1).sum() + 1


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_photos_are_turned_upright(tmp_path, suffix):
    for name in ("a", "b"):
        exif = Image.Exif()
        exif[0x0112] = 6  # the camera was held upright
        save(tmp_path / "me" / f"{name}.{suffix}", noise(1, (6, 8, 3)), exif=exif)
    dataset = load(str(tmp_path))
    turned = np.rot90(noise(1, (6, 8, 3)), -1).transpose(2, 0, 1)
    assert torch.equal(dataset.images[0], torch.from_numpy(turned.copy()))
    assert dataset.notes == ()


def test_different_sizes_are_resized_to_the_most_common_and_said_so(tmp_path):
    class_folder(tmp_path)
    wide = noise(60, (20, 30, 3))
    save(tmp_path / "train" / "dog" / "wide.png", wide)
    dataset = load(str(tmp_path))
    assert dataset.notes == ("1 of 13 images had another size and were resized to 8x8",)
    expected = np.asarray(Image.fromarray(wide).resize((8, 8), Image.Resampling.BILINEAR))
    assert torch.equal(dataset.images[6], torch.from_numpy(expected.transpose(2, 0, 1).copy()))
    assert torch.equal(dataset.images[:3], planes(0, 1, 2))
    assert load(str(tmp_path), size=12).images.shape == (7, 3, 12, 12)
    refuses("size = 0 is below 1", tmp_path, size=0)


def claims(width: int, height: int) -> bytes:
    """A PNG of a few bytes whose header claims any size."""
    chunks = ((b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)), (b"IDAT", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


def test_unreadable_images_are_left_out_counted_and_named(tmp_path, recwarn):
    class_folder(tmp_path, each=60)
    cats, tests = tmp_path / "train" / "cat", tmp_path / "test" / "dog"
    (cats / "3.png").write_bytes(b"")
    content = (cats / "5.png").read_bytes()
    (cats / "5.png").write_bytes(content[: len(content) // 2])
    (cats / "7.png").write_bytes(claims(100_000, 100_000))
    (cats / "9.png").write_bytes(claims(10_000, 10_000))
    Image.fromarray(noise(1)).save(cats / "1.png", "TGA")  # a format that is not allowed
    (tests / "8.png").write_text("no image")
    dataset = load(str(tmp_path))
    assert dataset.notes == (
        "6 of 240 images could not be read and were left out: train/cat/1.png, train/cat/3.png, "
        "train/cat/5.png, train/cat/7.png, train/cat/9.png, ... (train/cat/1.png: it is no image of "
        "PNG, JPEG, WEBP, BMP, GIF, PPM, TIFF)",
    )
    assert (len(dataset.images), len(dataset.test_images)) == (115, 119)
    assert dataset.labels.tolist() == [0] * 55 + [1] * 60
    assert torch.equal(dataset.images[1:3], planes(10, 11))  # the rest keep their order, by name
    assert [str(warning.message) for warning in recwarn] == []


def test_too_many_unreadable_images_are_refused(tmp_path):
    class_folder(tmp_path, each=5)  # 20 images: one bad one is 5 %, two are 10 %
    (tmp_path / "train" / "cat" / "0.png").write_bytes(b"")
    assert len(load(str(tmp_path)).images) == 9
    (tmp_path / "test" / "dog" / "2.png").write_bytes(b"")
    refuses(
        r"2 of 20 images could not be read, above the limit of 5%: train/cat/0.png, test/dog/2.png \(.*\); "
        "remove or replace them",
        tmp_path,
    )


def test_bad_folders(tmp_path):
    def bad(match: str, *removed: str, **added: str) -> None:
        root = class_folder(tmp_path / str(len(list(tmp_path.iterdir()))))
        for name in removed:
            (root / name).rename(tmp_path / f"away-{len(list(tmp_path.iterdir()))}")
        for place in added.values():
            save(root / place, noise(1))
        refuses(match, root)

    bad("has no folder 'test'", "test")
    bad("has no folder 'train'", "train")
    bad("classes has one entry, 'dog'; at least 2", "train/cat", "test/cat")
    bad("test/fox is a class without training images; add train/fox", a="test/fox/1.png")
    empty = tmp_path / "empty"
    empty.mkdir()
    refuses("empty holds no images", empty)
    class_folder(tmp_path / "hole")
    (tmp_path / "hole" / "train" / "eel").mkdir()
    refuses("train/eel holds no images .* fill or remove it", tmp_path / "hole")
    refuses("neither a known set .*digits, cifar10.* nor a path to images", tmp_path / "nowhere")


def test_files_that_are_not_used_are_counted(tmp_path):
    """A folder ``unlabelled``, for one, would otherwise leave devices without images, unnoticed."""
    class_folder(tmp_path)
    for place in ("train/loose.png", "unlabelled/1.png", "train/.dog/1.png", "test/.hidden.png"):
        save(tmp_path / place, noise(1))
    (tmp_path / "train" / "cat" / "notes.txt").write_text("")
    dataset = load(str(tmp_path))
    assert dataset.notes == (
        "skipped 3 files (not an image, or in no folder of a class or client): train/loose.png, "
        "train/cat/notes.txt, unlabelled/1.png",
    )
    assert (len(dataset.images), dataset.classes) == (6, ("cat", "dog"))


# The cache


def decodes(monkeypatch) -> list[int]:
    """Return a list to which each call that really decodes is added."""
    calls: list[int] = []
    really = decode.decode

    def counted(listing: decode.Listing, *how: Any) -> decode.Decoded:
        calls.append(len(listing.labels))
        return really(listing, *how)

    monkeypatch.setattr(decode, "decode", counted)
    return calls


def same(one: Dataset, other: Dataset) -> bool:
    fields = ("images", "labels", "test_images", "test_labels")
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in fields) and (
        (one.name, one.classes, one.notes) == (other.name, other.classes, other.notes)
    )


def test_images_are_decoded_once_and_cached(tmp_path, monkeypatch):
    root = class_folder(tmp_path / "pets", each=20)
    (root / "train" / "cat" / "0.png").write_bytes(b"")
    save(root / "clients" / "ann" / "1.png", noise(1, (9, 9, 3)))
    calls = decodes(monkeypatch)
    first, second = load(str(root)), load(str(root))
    assert len(calls) == 1
    assert same(first, second)
    assert len(first.notes) == 2  # what was left out and resized is still said
    assert second.clients is not None
    assert second.clients["ann"].tolist() == [39]
    load(str(root), size=16)
    assert len(calls) == 2
    save(root / "test" / "dog" / "0.png", noise(500))
    assert not same(load(str(root)), first)
    assert len(calls) == 3


@pytest.mark.parametrize("suffix", ["npy", "npz"])
def test_a_cached_copy_that_is_cut_off_is_rebuilt(tmp_path, monkeypatch, suffix):
    root, cache = class_folder(tmp_path / "pets"), tmp_path / "own"
    load(str(root), cache=cache)
    (file,) = cache.glob(f"*.{suffix}")
    file.write_bytes(file.read_bytes()[:200])
    calls = decodes(monkeypatch)
    first = load(str(root), cache=cache)
    assert torch.equal(first.images, planes(0, 1, 2, 10, 11, 12))
    assert same(load(str(root), cache=cache), first)
    assert len(calls) == 1


def test_grey_and_colour_copies_of_the_same_files_are_two(tmp_path):
    """A grey model may read the images that a colour model has read, and the other way round."""
    root = class_folder(tmp_path / "pets")
    source = places.source_at(root)
    colour, grey = (places.decode_once(source, None, channels).images for channels in (3, 1))
    assert (colour.shape[1], grey.shape[1]) == (3, 1)
    assert np.array_equal(places.decode_once(source, None, 3).images, colour)


def test_a_full_disk_keeps_no_copy(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=500))
    dataset = load(str(class_folder(tmp_path / "set")))
    assert torch.equal(dataset.images, planes(0, 1, 2, 10, 11, 12))
    assert "could not be cached" in dataset.notes[0]
    assert not list((tmp_path / "cache").iterdir())


def test_cached_images_are_for_their_owner_alone(tmp_path):
    load(str(class_folder(tmp_path / "pets", each=20)), cache=tmp_path / "cache")
    paths = [tmp_path / "cache", *(tmp_path / "cache").rglob("*")]
    assert len(paths) > 1
    for place in paths:
        assert place.stat().st_mode & 0o077 == 0, place


# Named sets


def test_named_sets_are_found_in_the_environments_folder(tmp_path, monkeypatch):
    write_packed(tmp_path / "data" / "cifar10_small_0of1.npz", list(range(10)))
    write_packed(tmp_path / "data" / "cifar100.npz", list(range(10)), labels=np.zeros(10, np.int16))
    class_folder(tmp_path / "data" / "svhn", shape=(8, 8))
    class_folder(tmp_path / "data" / "image100")
    class_folder(tmp_path / "data" / "pets")
    monkeypatch.setenv("SEMISFL_DATA", str(tmp_path / "data"))
    cifar = load("cifar10")
    assert (cifar.name, len(cifar.images)) == ("cifar10", 8)
    assert (cifar.mean, cifar.std) == ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
    assert load("svhn").images.shape == (6, 3, 8, 8)  # grey files of a set known to be colour
    assert load("image100").images.shape == (6, 3, 144, 144)
    assert load("image100", size=10).images.shape == (6, 3, 10, 10)
    assert load("pets").mean == (0.5,) * 3
    assert len(load("digits").images) == 5000


def test_without_the_extra_one_line_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    refuses(r"pip install 'semisfl\[datasets\]', or point SEMISFL_DATA at", "stl10")


@pytest.mark.parametrize("form", ["save_to_disk", "parquet"])
def test_a_local_hugging_face_copy(tmp_path, monkeypatch, form):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    features = datasets.Features(
        {"img": datasets.Image(), "label": datasets.ClassLabel(names=["even", "odd"])}
    )

    def table(*seeds: int) -> object:
        images = [Image.fromarray(noise(seed)) for seed in seeds]
        rows = {"img": images, "label": [seed % 2 for seed in seeds]}
        return datasets.Dataset.from_dict(rows, features=features)

    parts = {"test": table(8, 9), "train": table(*range(6)), "unlabeled": table(6, 7)}
    copy = tmp_path / "data" / "stl10"
    if form == "save_to_disk":
        datasets.DatasetDict(parts).save_to_disk(str(copy))
    else:
        (copy / "data").mkdir(parents=True)
        for name, part in parts.items():
            part.to_parquet(str(copy / "data" / f"{name}-00000-of-00001.parquet"))
    monkeypatch.setenv("SEMISFL_DATA", str(tmp_path / "data"))
    for dataset in (load("stl10"), load(str(copy))):
        assert torch.equal(dataset.images, planes(*range(8)))
        assert dataset.labels.tolist() == [0, 1, 0, 1, 0, 1, -1, -1]
        assert torch.equal(dataset.test_images, planes(8, 9))
        assert (dataset.name, dataset.classes) == ("stl10", ("even", "odd"))


# A Dataset of one's own


def own(**change) -> Dataset:
    fields: dict[str, Any] = {
        "name": "own",
        "classes": ("a", "b"),
        "images": torch.zeros(4, 1, 8, 8, dtype=torch.uint8),
        "labels": torch.tensor([0, 1, -1, 0]),
        "test_images": torch.zeros(2, 1, 8, 8, dtype=torch.uint8),
        "test_labels": torch.tensor([0, 1]),
        "mean": (0.5,),
        "std": (0.5,),
    }
    return Dataset(**(fields | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": torch.zeros(4, 1, 8, 8)}, r"images is torch.float32 .* torch.uint8"),
        ({"images": torch.zeros(4, 8, 8, dtype=torch.uint8)}, r"images is .* \[4, 8, 8\]"),
        ({"images": torch.zeros(0, 1, 8, 8, dtype=torch.uint8)}, "images holds no image"),
        ({"test_images": torch.zeros(2, 3, 8, 8, dtype=torch.uint8)}, r"but test_images are \[3"),
        ({"labels": torch.tensor([0, 1, -1])}, r"labels is .*int64 \[3\]; .*int64 \[4\]"),
        ({"labels": torch.zeros(4)}, "labels is torch.float32"),
        ({"labels": torch.tensor([0, 1, 2, 0])}, "labels runs from 0 to 2; .* -1..1"),
        ({"labels": torch.tensor([0, 1, -2, 0])}, "labels runs from -2 to 1"),
        ({"test_labels": torch.tensor([0, -1])}, "test_labels runs from -1 to 0; .* 0..1"),
        ({"classes": ("a",), "labels": torch.zeros(4).long()}, "one entry, 'a'"),
        ({"classes": ("a", "a")}, "classes has 'a' twice"),
        ({"mean": (0.5,) * 3}, "need a finite number for each of the 1 channels"),
        ({"mean": (float("nan"),)}, "need a finite number"),
        ({"std": (float("inf"),)}, "need a finite number"),
        ({"std": (0.0,)}, "std above 0"),
    ],
)
def test_own_tensors_are_checked(change, message):
    with pytest.raises(ValueError, match=message):
        own(**change)
