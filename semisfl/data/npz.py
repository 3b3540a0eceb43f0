"""Read packed ``.npz`` files: encoded images or plain arrays, with labels and split, in shards.

docs/own-images.md lists the arrays of such a file. A set may be split into files ``NAME_0of2.npz``,
``NAME_1of2.npz``; any of them, or their common prefix, means the whole set.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image

from semisfl.data.decode import Listing, Source, open_image
from semisfl.settings.counts import plural

SHARD = re.compile(r"_(\d+)of(\d+)$")


def group(path: Path) -> tuple[str, int]:
    """Return the set a file belongs to and its number of shards: ``a_0of2.npz`` -> ``("a", 2)``."""
    match = SHARD.search(path.stem)
    return (path.stem[: match.start()], int(match[2])) if match else (path.stem, 0)


def is_called(path: Path, prefix: str) -> bool:
    """Return whether a file name starts with a prefix as a whole word: cifar10, not cifar100."""
    return re.match(re.escape(prefix) + r"(?![A-Za-z0-9])", path.name) is not None


def find(path: Path) -> list[Path]:
    """Return the ``.npz`` files meant by a file (with its other shards), a directory or a prefix.

    Raises ValueError if they are of several sets.
    """
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
    """Return the set of encoded images (``bytes``, ``offsets``) or plain arrays (``x``) in files.

    Raises ValueError for a file that cannot be read. No file may hold Python objects: to load them runs code.
    """
    with _open(files[0]) as arrays:
        encoded = "bytes" in arrays.files
    return Source(
        name=group(files[0])[0],
        files=tuple(files) if encoded else (),
        listing=lambda: _listing(files),
    )


@contextmanager
def _open(file: Path) -> Iterator[np.lib.npyio.NpzFile]:
    """Open a file of arrays; raise ValueError for one that is damaged, holds objects or lacks an array."""
    try:
        with np.load(file, allow_pickle=False) as arrays:
            yield arrays
    except Exception as error:  # damaged zip members raise from zlib, struct and numpy alike
        raise ValueError(f"{file} is not a readable .npz of plain arrays: {error}") from error


def _shard(file: Path) -> dict[str, np.ndarray]:
    """Return one file's arrays: every image has a label, a split and its bytes."""
    with _open(file) as arrays:
        payload = ("bytes", "offsets") if "bytes" in arrays.files else ("x",)
        shard = {name: arrays[name] for name in (*payload, "labels", "split", "classes")}
        count = len(shard["labels"])
        shard["index"] = arrays["index"] if "index" in arrays.files else np.arange(count)
    if "x" in shard:
        shard["x"] = with_channels(shard["x"], f"{file}: x")
    held = len(shard["x"]) if "x" in shard else len(shard["offsets"]) - 1
    if not count == held == len(shard["split"]) == len(shard["index"]):
        raise ValueError(
            f"{file} has {plural(count, 'label')} but {plural(held, 'image')}; they must pair up"
        )
    if not np.isin(shard["split"], (0, 1)).all():
        raise ValueError(f"{file} has split values other than 0 (train) and 1 (test); correct them")
    return shard


def _listing(files: Sequence[Path]) -> Listing:
    """List all shards as one set, each split in the order of ``index``."""
    shards = [_shard(file) for file in files]
    joined = {
        name: np.concatenate([shard[name] for shard in shards])
        for name in ("labels", "split", "index")
    }
    which = np.repeat(np.arange(len(shards)), [len(shard["labels"]) for shard in shards])
    within = np.concatenate([np.arange(len(shard["labels"])) for shard in shards])
    order = np.lexsort((joined["index"], joined["split"]))

    def encoded(place: int) -> Image.Image:
        shard, place = shards[which[order[place]]], within[order[place]]
        start, end = shard["offsets"][place : place + 2]
        return open_image(shard["bytes"][start:end].tobytes())

    pixels = None
    if "x" in shards[0]:
        pixels = np.concatenate([shard["x"] for shard in shards])[order]
    total = group(files[0])[1]
    missing = f"{len(files)} of {total} shards are here: {', '.join(f.name for f in files)}"
    return Listing(
        names=[
            f"{('train', 'test')[joined['split'][place]]} image {joined['index'][place]}"
            for place in order
        ],
        open=encoded if pixels is None else lambda place: picture(pixels[place]),
        labels=joined["labels"][order].astype(np.int64),
        trains=int((joined["split"] == 0).sum()),
        classes=tuple(map(str, shards[0]["classes"])),
        notes=(missing,) if len(files) < total else (),
        pixels=pixels,
    )


def with_channels(x: np.ndarray, name: str) -> np.ndarray:
    """Return uint8 images as [n, C, H, W], from [n, H, W] or with 1 or 3 channels first or last.

    ``name`` is what the array is called in the error for any other type or shape.
    """
    if x.dtype == np.uint8 and x.ndim == 3:
        return x[:, None]
    if x.dtype == np.uint8 and x.ndim == 4 and x.shape[1] in (1, 3):
        return x
    if x.dtype == np.uint8 and x.ndim == 4 and x.shape[3] in (1, 3):
        return np.ascontiguousarray(x.transpose(0, 3, 1, 2))
    raise ValueError(
        f"{name} is {x.dtype} {list(x.shape)}; it must be uint8 [n, H, W], or have 1 or 3 "
        "channels first or last"
    )


def picture(planes: np.ndarray) -> Image.Image:
    """Return uint8 [C, H, W] as a Pillow image."""
    return Image.fromarray(planes[0] if len(planes) == 1 else planes.transpose(1, 2, 0))
