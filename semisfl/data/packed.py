"""Encoded images to one uint8 array, and the packed ``.npz`` files that hold them.

Decoding is shared by every source: formats are allow-listed, sizes are known from the headers
before anything is decoded, and images that cannot be read are left out, counted and named.
"""

import io
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from PIL import ExifTags, Image, ImageOps

# TIFF and the rarer formats are left out on purpose: their decoders are Pillow's weak spot.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "PPM")
MAX_PIXELS = 64 * 2**20  # in one image: a small file can claim to be enormous
MAX_DECODED = 32 * 2**30  # bytes of the whole set
MAX_UNREADABLE = 0.05
GREY_MODES = {"1", "L", "LA", "I;16", "I;16B", "I;16L"}
CHUNK = 256

T = TypeVar("T")


@dataclass(frozen=True)
class Rows:
    """Images as a source lists them before any is decoded: training ones first, then test."""

    names: Sequence[str]
    open: Callable[[int], Image.Image]  # reads the header only
    labels: np.ndarray  # int64; -1 unknown
    trains: int  # rows before this one are for training
    classes: tuple[str, ...]
    holders: tuple[str, ...] = ()  # client folders
    holder: np.ndarray | None = None  # int64 row -> holders; -1 nobody
    notes: tuple[str, ...] = ()
    pixels: np.ndarray | None = None  # uint8 [n, C, H, W] where nothing needs decoding


@dataclass(frozen=True)
class Decoded:
    """The rows that could be read, as they are cached."""

    images: np.ndarray  # uint8 [n, C, H, W]
    labels: np.ndarray
    trains: int
    classes: tuple[str, ...]
    holders: tuple[str, ...]
    holder: np.ndarray
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Source:
    """Where images are: the files that make a cached copy stale, and how to list them."""

    name: str
    files: tuple[Path, ...]  # none: reading them is as fast as reading a cache
    rows: Callable[[], Rows]


def open_image(data: bytes | Path) -> Image.Image:
    """The header, checked; pixels are decoded on use."""
    image = Image.open(io.BytesIO(data) if isinstance(data, bytes) else data, formats=FORMATS)
    # 32-bit pixels (modes I and F) have no defined range to bring to 0..255.
    if image.width * image.height > MAX_PIXELS or image.mode in ("I", "F"):
        image.close()
        raise ValueError(f"a {image.width}x{image.height} image of mode {image.mode} is not read")
    return image


def decode(rows: Rows, size: int | None, channels: int | None) -> Decoded:
    """All readable rows at one size: ``size`` squared, or the most common size of the set.

    ``channels`` is 1 or 3; None means 1 where every image is grey.
    """
    if not len(rows.labels):
        raise ValueError("there are no images")
    fits = rows.pixels is not None and (size is None or rows.pixels.shape[2:] == (size, size))
    if rows.pixels is not None and fits and channels in (None, rows.pixels.shape[1]):
        images, kept = rows.pixels, np.ones(len(rows.labels), bool)
        notes: tuple[str, ...] = ()
    else:
        images, kept, notes = _render(rows, size, channels)
    holder = rows.holder if rows.holder is not None else np.full(len(kept), -1, np.int64)
    return Decoded(
        images=images if kept.all() else images[kept],
        labels=rows.labels[kept],
        trains=int(kept[: rows.trains].sum()),
        classes=rows.classes,
        holders=rows.holders,
        holder=holder[kept],
        notes=(*rows.notes, *notes),
    )


def _render(
    rows: Rows, size: int | None, channels: int | None
) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """(images, which of them were readable, notes)."""
    count = len(rows.labels)
    headers = _parallel(lambda row: _header(rows, row), count)
    known = [header for header in headers if header]
    _check_readable(rows, np.array([header is not None for header in headers]))
    sizes = Counter(shape for shape, _ in known)
    # Ties go to the larger image, so that the outcome does not depend on the order of files.
    width, height = (size, size) if size else max(sizes, key=lambda s: (sizes[s], s))
    channels = channels or (1 if all(mode in GREY_MODES for _, mode in known) else 3)
    needed = count * channels * width * height
    if needed > MAX_DECODED:
        raise ValueError(
            f"{count} images of {width}x{height} take {needed / 2**30:.0f} GiB decoded, above the "
            f"limit of {MAX_DECODED >> 30} GiB; give a smaller size, e.g. size = 96"
        )
    images = np.empty((count, channels, height, width), np.uint8)

    def fill(row: int) -> bool:
        pixels = decoded(rows, row, (width, height), channels) if headers[row] else None
        if pixels is not None:
            images[row] = pixels
        return pixels is not None

    kept = np.array(_parallel(fill, count), bool)
    notes = _check_readable(rows, kept)
    other = len(known) - sizes[width, height]
    if other:
        notes += (
            f"{other} of {count} images had another size and were resized to {width}x{height}",
        )
    return images, kept, notes


def _parallel(job: Callable[[int], T], count: int) -> list[T]:
    """``job`` of every row, in order; Pillow releases the GIL while it decodes."""

    def chunk(start: int) -> list[T]:
        return [job(row) for row in range(start, min(start + CHUNK, count))]

    with (
        warnings.catch_warnings(),
        ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1)) as pool,
    ):
        # Stricter limits and our own notes stand in for what Pillow warns of.
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        warnings.simplefilter("ignore", UserWarning)
        return [done for part in pool.map(chunk, range(0, count, CHUNK)) for done in part]


def _header(rows: Rows, row: int) -> tuple[tuple[int, int], str] | None:
    """(size as seen upright, mode), or None where the image cannot be opened."""
    try:
        with rows.open(row) as image:
            turned = image.getexif().get(ExifTags.Base.Orientation, 1) >= 5
            return (image.height, image.width) if turned else image.size, image.mode
    except Exception:  # a damaged file can raise nearly anything inside a decoder
        return None


def decoded(rows: Rows, row: int, size: tuple[int, int], channels: int) -> np.ndarray | None:
    """uint8 [C, H, W], or None where the image cannot be decoded."""
    try:
        with rows.open(row) as opened:
            image = ImageOps.exif_transpose(opened)
            if image.mode.startswith("I;16"):
                image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
            image = image.convert("L" if channels == 1 else "RGB")
            if image.size != size:
                image = image.resize(size, Image.Resampling.BILINEAR)
            pixels = np.asarray(image)
            return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)
    except Exception:  # as above
        return None


def _check_readable(rows: Rows, kept: np.ndarray) -> tuple[str, ...]:
    """A note that counts and names what could not be read; an error above the limit."""
    lost = np.flatnonzero(~kept)
    if not lost.size:
        return ()
    first = ", ".join(rows.names[row] for row in lost[:5]) + (", ..." if lost.size > 5 else "")
    found = f"{lost.size} of {kept.size} images could not be read"
    if lost.size > MAX_UNREADABLE * kept.size:
        raise ValueError(
            f"{found}, above the limit of {MAX_UNREADABLE:.0%}: {first}; remove or replace them "
            f"(formats read: {', '.join(FORMATS)})"
        )
    return (f"{found} and were left out: {first}",)


SHARD = re.compile(r"_(\d+)of(\d+)$")


def group(path: Path) -> tuple[str, int]:
    """The set a file belongs to and its number of shards: ``a_0of2.npz`` -> ``("a", 2)``."""
    match = SHARD.search(path.stem)
    return (path.stem[: match.start()], int(match[2])) if match else (path.stem, 0)


def is_called(path: Path, prefix: str) -> bool:
    """Whether a name begins with a prefix that ends where a word ends: cifar10, not cifar100."""
    return re.match(re.escape(prefix) + r"(?![A-Za-z0-9])", path.name) is not None


def find(path: Path) -> list[Path]:
    """The ``.npz`` files meant by a file (with its sister shards), a directory or a prefix."""
    if path.is_file() and path.suffix != ".npz":
        return []
    folder = path if path.is_dir() else path.parent
    files = sorted(file for file in folder.glob("*.npz") if file.is_file())
    if path.is_file():
        return [file for file in files if group(file) == group(path)]
    if not path.is_dir():
        files = [file for file in files if is_called(file, path.name)]
    if len({group(file) for file in files}) > 1:
        names = ", ".join(file.name for file in files)
        raise ValueError(f"{path} fits several data sets; give the path of one of {names}")
    return files


def source(files: Sequence[Path]) -> Source:
    """Encoded images (``bytes``, ``offsets``) or plain arrays (``x``), with labels and split."""
    encoded = "bytes" in _arrays(files[0])
    return Source(
        name=group(files[0])[0],
        files=tuple(files) if encoded else (),
        rows=lambda: _read(files, ("bytes", "offsets") if encoded else ("x",)),
    )


def _arrays(file: Path, wanted: Sequence[str] = ()) -> dict[str, np.ndarray]:
    """The wanted arrays of a file, or with none wanted an empty one for each that it has."""
    try:
        with np.load(file, allow_pickle=False) as arrays:
            if not wanted:
                return {name: np.empty(0) for name in arrays.files}
            missing = [name for name in wanted if name not in arrays.files]
            found = {name: arrays[name] for name in wanted if name in arrays.files}
            if "index" in arrays.files:
                found["index"] = arrays["index"]
    except Exception as error:  # damaged zip members raise from zlib, struct and numpy alike
        raise ValueError(f"{file} is not a readable .npz of plain arrays: {error}") from error
    if missing:
        raise ValueError(f"{file} lacks the arrays {', '.join(missing)}")
    return found


def _shard(file: Path, payload: Sequence[str]) -> dict[str, np.ndarray]:
    """One file's arrays, checked: images i of n have a label, a split and their bytes."""
    shard = _arrays(file, (*payload, "labels", "split", "classes"))
    shard.setdefault("index", np.arange(shard["labels"].size))
    for name in shard.keys() - {"x", "bytes"}:
        if shard[name].ndim != 1 or shard[name].dtype.kind not in ("iu", "UT")[name == "classes"]:
            kind = "names" if name == "classes" else "whole numbers"
            raise ValueError(
                f"{file} has {name} of {shard[name].dtype} {list(shard[name].shape)}; "
                f"it must be a list of {kind}"
            )
    count = len(shard["labels"])
    held = len(shard["offsets"]) - 1 if "offsets" in shard else len(shard["x"])
    if not count == held == len(shard["split"]) == len(shard["index"]):
        raise ValueError(f"{file} has {count} labels but {held} images; they must pair up")
    if not np.isin(shard["split"], (0, 1)).all():
        raise ValueError(f"{file} has split values other than 0 (train) and 1 (test)")
    if "offsets" in shard:
        offsets = shard["offsets"].astype(np.int64)
        if (np.diff(offsets) < 0).any() or offsets[0] < 0 or offsets[-1] > len(shard["bytes"]):
            raise ValueError(f"{file} has offsets that leave its {len(shard['bytes'])} bytes")
    return shard


def _read(files: Sequence[Path], payload: Sequence[str]) -> Rows:
    """All shards as one set, each split in the order of ``index``."""
    shards = [_shard(file, payload) for file in files]
    classes = tuple(str(name) for name in shards[0]["classes"])
    for file, shard in zip(files, shards, strict=True):
        if tuple(str(name) for name in shard["classes"]) != classes:
            raise ValueError(f"{file} and {files[0]} name different classes")
    joined = {
        name: np.concatenate([shard[name] for shard in shards])
        for name in ("labels", "split", "index")
    }
    which = np.repeat(np.arange(len(shards)), [len(shard["labels"]) for shard in shards])
    within = np.concatenate([np.arange(len(shard["labels"])) for shard in shards])
    order = np.lexsort((joined["index"], joined["split"]))

    def encoded(row: int) -> Image.Image:
        shard, place = shards[which[order[row]]], within[order[row]]
        start, end = shard["offsets"][place : place + 2]
        return open_image(shard["bytes"][start:end].tobytes())

    pixels = None
    if "x" in shards[0]:
        pixels = _planes(files[0], np.concatenate([shard["x"] for shard in shards])[order])
    total = group(files[0])[1]
    missing = f"{len(files)} of {total} shards are here: {', '.join(f.name for f in files)}"
    return Rows(
        names=[
            f"{('train', 'test')[joined['split'][row]]} image {joined['index'][row]}"
            for row in order
        ],
        open=encoded if pixels is None else lambda row: _picture(pixels[row]),
        labels=joined["labels"][order].astype(np.int64),
        trains=int((joined["split"] == 0).sum()),
        classes=classes,
        notes=(missing,) if len(files) < total else (),
        pixels=pixels,
    )


def _planes(file: Path, x: np.ndarray) -> np.ndarray:
    """Plain images as [n, C, H, W], from [n, H, W] or with 1 or 3 channels first or last."""
    if x.dtype == np.uint8 and x.ndim == 3:
        return x[:, None]
    if x.dtype == np.uint8 and x.ndim == 4 and x.shape[1] in (1, 3):
        return x
    if x.dtype == np.uint8 and x.ndim == 4 and x.shape[3] in (1, 3):
        return np.ascontiguousarray(x.transpose(0, 3, 1, 2))
    raise ValueError(
        f"{file} has x of {x.dtype} {list(x.shape)}; it must be uint8 [n, H, W], or have 1 or 3 "
        "channels first or last"
    )


def _picture(planes: np.ndarray) -> Image.Image:
    return Image.fromarray(planes[0] if len(planes) == 1 else planes.transpose(1, 2, 0))
