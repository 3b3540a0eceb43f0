"""Read packed ``.npz`` files: encoded images or plain arrays, with labels and split, in shards."""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from semisfl.data.decode import Listing, Source, open_image
from semisfl.data.large import TooLarge
from semisfl.engine.hardware import free_memory
from semisfl.settings.counts import amount, counted

SHARD = re.compile(r"_(\d+)of(\d+)$")


def group(path: Path) -> tuple[str, int]:
    """Return the set a file belongs to and its number of shards: ``a_0of2.npz`` -> ``("a", 2)``."""
    match = SHARD.search(path.stem)
    return (path.stem[: match.start()], int(match[2])) if match else (path.stem, 0)


def is_called(path: Path, prefix: str) -> bool:
    """Return whether a file name starts with a prefix as a whole word: cifar10, not cifar100."""
    return re.match(re.escape(prefix) + r"(?![A-Za-z0-9])", path.name) is not None


def find(path: Path) -> list[Path]:
    """Return the ``.npz`` files meant by a file (with its other shards), a directory or a prefix."""
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
    """Return the set of encoded images (``bytes``, ``offsets``) or plain arrays (``x``) in files."""
    encoded = "bytes" in _arrays(files[0])
    return Source(
        name=group(files[0])[0],
        files=tuple(files) if encoded else (),
        listing=lambda: _read(files, ("bytes", "offsets") if encoded else ("x",)),
    )


def _arrays(file: Path, wanted: Sequence[str] = ()) -> dict[str, np.ndarray]:
    """Return the wanted arrays of a file; if none are wanted, an empty one for each that it has."""
    try:
        with np.load(file, allow_pickle=False) as arrays:
            if not wanted:
                return {name: np.empty(0) for name in arrays.files}
            _check_room(arrays, {*wanted, "index"})
            missing = [name for name in wanted if name not in arrays.files]
            present = {name: arrays[name] for name in wanted if name in arrays.files}
            if "index" in arrays.files:
                present["index"] = arrays["index"]
    except TooLarge as error:
        raise ValueError(f"{file} {error}") from None
    except Exception as error:  # damaged zip members raise from zlib, struct and numpy alike
        raise ValueError(f"{file} is not a readable .npz of plain arrays: {error}") from error
    if missing:
        raise ValueError(f"{file} lacks the arrays {', '.join(missing)}; add them")
    return present


def _check_room(arrays: np.lib.npyio.NpzFile, wanted: set[str]) -> None:
    """Raise `TooLarge` if arrays unpack to more than is free, by the sizes in the archive; no more is unpacked."""
    members = arrays.zip.infolist() if arrays.zip is not None else []
    size = sum(one.file_size for one in members if one.filename.removesuffix(".npy") in wanted)
    free = free_memory()
    if free is not None and size > free:
        raise TooLarge(
            f"unpacks to {amount(size)} and {amount(free)} of memory are free; split it, or use files of images"
        )


def _shard(file: Path, payload: Sequence[str]) -> dict[str, np.ndarray]:
    """Return one file's arrays, checked: every image has a label, a split and its bytes."""
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
    if "x" in shard:
        shard["x"] = with_channels(shard["x"], f"{file}: x")
    held = len(shard["offsets"]) - 1 if "offsets" in shard else len(shard["x"])
    if not count == held == len(shard["split"]) == len(shard["index"]):
        raise ValueError(
            f"{file} has {counted(count, 'label')} but {counted(held, 'image')}; they must pair up"
        )
    if not np.isin(shard["split"], (0, 1)).all():
        raise ValueError(f"{file} has split values other than 0 (train) and 1 (test); correct them")
    if "offsets" in shard:
        offsets = shard["offsets"].astype(np.int64)
        if (np.diff(offsets) < 0).any() or offsets[0] < 0 or offsets[-1] > len(shard["bytes"]):
            raise ValueError(f"{file} has offsets that leave its {len(shard['bytes'])} bytes")
    return shard


def _read(files: Sequence[Path], payload: Sequence[str]) -> Listing:
    """List all shards as one set, each split in the order of ``index``."""
    shards = [_shard(file, payload) for file in files]
    classes = tuple(str(name) for name in shards[0]["classes"])
    for file, shard in zip(files, shards, strict=True):
        if tuple(str(name) for name in shard["classes"]) != classes:
            raise ValueError(
                f"{file} and {files[0]} name different classes; give all shards one list"
            )
        if "x" in shard and shard["x"].shape[1:] != shards[0]["x"].shape[1:]:
            raise ValueError(
                f"{file} has images of {list(shard['x'].shape[1:])} and {files[0]} of "
                f"{list(shards[0]['x'].shape[1:])}; give all shards one size"
            )
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
        classes=classes,
        notes=(missing,) if len(files) < total else (),
        pixels=pixels,
    )


def with_channels(x: np.ndarray, name: str) -> np.ndarray:
    """Return uint8 images as [n, C, H, W], from [n, H, W] or with 1 or 3 channels first or last."""
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
