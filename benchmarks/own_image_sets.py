"""The images behind docs/own-images.md and docs/own-images-choice.md, at 32 x 32 pixels."""

import gzip
import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

SIDE = 32


def make_sets(folder: Path) -> None:
    """Write small sets of 32 x 32 pixels: parts of SVHN, CIFAR-10 and STL-10, and classes of two sets."""
    rng, other = np.random.default_rng(7), np.random.default_rng(7)
    folder.mkdir(parents=True, exist_ok=True)
    tenth = list(range(0, 100, 10))
    rest = [number for number in range(100) if number not in tenth]
    for name, source, drawn_by, train, test, classes in (
        ("svhn", "svhn_webp92", rng, 20_000, 2_000, None),
        ("cifar", "cifar10_lossless", rng, 12_000, 1_500, None),
        ("stl", "stl10_webp", rng, 4_900, 1_000, None),
        ("mini", "miniimagenet_webp", rng, 5_000, 700, tenth),
        ("mini90", "miniimagenet_webp", rng, 40_000, 6_300, rest),
        ("cats", "cifar10_lossless", other, 8_000, 1_000, [3, 5]),  # and dogs
        ("cars", "cifar10_lossless", other, 8_000, 1_000, [1, 9]),  # and trucks
    ):
        shards = sorted(Path(os.environ["SEMISFL_DATA"]).glob(f"{source}*.npz"))
        if not shards:
            raise SystemExit(f"SEMISFL_DATA has no {source}*.npz")
        np.savez(folder / f"{name}.npz", **_part(shards, drawn_by, train, test, classes))


def _part(
    shards: Sequence[Path],
    rng: np.random.Generator,
    train: int,
    test: int,
    classes: Sequence[int] | None,
) -> dict[str, Any]:
    read = [np.load(shard) for shard in shards]
    labels = np.concatenate([shard["labels"] for shard in read])
    split = np.concatenate([shard["split"] for shard in read])
    places = [(shard, row) for shard in read for row in range(len(shard["labels"]))]
    names = read[0]["classes"]
    kept = np.ones(len(labels), bool) if classes is None else np.isin(labels, classes)
    halves = [
        np.sort(rng.permutation(np.flatnonzero(kept & (split == half)))[:most])
        for half, most in ((0, train), (1, test))
    ]
    contents = {id(shard): (shard["bytes"], shard["offsets"]) for shard in read}
    encoded = []
    for row in np.concatenate(halves):
        shard, place = places[row]
        content, offsets = contents[id(shard)]
        encoded.append(_small(content[offsets[place] : offsets[place + 1]].tobytes()))
    chosen = labels[np.concatenate(halves)]
    if classes is not None:
        chosen, names = np.searchsorted(classes, chosen), names[list(classes)]
    return _packed(encoded, chosen, np.repeat([0, 1], [len(half) for half in halves]), names)


def make_untuned(source: Path, folder: Path) -> None:
    """Write the sets that had no part in the choice; ``source`` has a folder with the files of each."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, place, begins, test, most in (
        ("sign", 1, "", 412, 2_062),
        ("smile", 1, "", 1_500, 9_500),
        ("fruit", 1, ("Apple", "Pear", "Peach", "Tomato", "Plum"), 1_500, 10_000),
        ("deva", 2, "character", 1_500, 10_000),
    ):
        files = [
            (file, parts[place])
            for file in sorted((source / name).rglob("*.*"), key=lambda file: file.as_posix())
            if file.suffix.lower() in (".jpg", ".png")
            and len(parts := file.relative_to(source / name).parts) > place + 1
            and parts[place].startswith(begins)
        ]
        drawn = _drawn(files, lambda file: _small(file.read_bytes()), test, most)
        np.savez(folder / f"{name}.npz", **drawn)
    pixels, labels = (
        np.frombuffer(
            gzip.decompress((source / "letters" / file).read_bytes()), np.uint8, offset=skip
        )
        for file, skip in (("t10k-images-idx3-ubyte.gz", 16), ("t10k-labels-idx1-ubyte.gz", 8))
    )
    letters = [
        (image, "ABCDEFGHIJ"[label])
        for image, label in zip(pixels.reshape(-1, 28, 28), labels, strict=True)
    ]
    drawn = _drawn(letters, lambda image: _resized(Image.fromarray(image)), 1_500, 10_000)
    np.savez(folder / "letters.npz", **drawn)


def _drawn(
    images: Sequence[tuple[Any, str]], encoded: Callable[[Any], bytes], test: int, most: int
) -> dict[str, Any]:
    """Return ``most`` of the labelled images, drawn at random; the first ``test`` of them are for testing."""
    order = np.random.default_rng(11).permutation(len(images))[:most]
    names = sorted({label for _, label in images}, key=lambda label: f"{label}/")  # as folders are
    numbers = np.array([names.index(images[row][1]) for row in order])
    split = np.arange(len(order)) < test
    return _packed([encoded(images[row][0]) for row in order], numbers, split, np.array(names))


def _packed(
    encoded: Sequence[bytes], labels: np.ndarray, split: np.ndarray, names: np.ndarray
) -> dict[str, Any]:
    return {
        "bytes": np.frombuffer(b"".join(encoded), np.uint8),
        "offsets": np.cumsum([0, *map(len, encoded)]).astype(np.int64),
        "labels": labels.astype(np.int16),
        "split": split.astype(np.uint8),
        "classes": names,
    }


def _small(encoded: bytes) -> bytes:
    """Return the image at 32 x 32 pixels; one that is as small already stays as it is."""
    image = Image.open(io.BytesIO(encoded))
    return encoded if image.size == (SIDE, SIDE) else _resized(image)


def _resized(image: Image.Image) -> bytes:
    file = io.BytesIO()
    small = image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR)
    small.save(file, "WEBP", lossless=True)
    return file.getvalue()
