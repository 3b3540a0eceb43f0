"""Find out what kind of data set lies at a path, and decode its images once.

Decoded images are kept in a cache folder and mapped into memory from there, so that a set need not fit in
memory. The name of a cached copy holds a digest of the names, sizes and times of the files it was made
from, and of the size and channels that were asked for. Cached copies may be deleted at any time.
"""

import contextlib
import errno
import hashlib
import json
import math
import os
import secrets
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np

from semisfl.data import decode, folder, hub, npz, table
from semisfl.data.decode import Decoded, Size, Source
from semisfl.files import TEMPORARY, cache_folder, write_whole

CACHE_FORMAT = 4  # raise it when decoding changes: older cached copies are then ignored


def source_at(path: Path, subset: str | None = None) -> Source | None:
    """Return the source at a path, or None if nothing is there.

    ``subset`` names one of the sets of a Hugging Face copy that has several. Raises ValueError for a file
    that is no data set.
    """
    if folder.has_classes(path):  # whatever else lies beside them
        return folder.source(path)
    if hub.is_copy(path):
        return hub.copy(path, subset)
    if files := npz.find(path):
        return npz.source(files)
    if path.is_dir():
        return folder.source(path)
    if path.suffix.lower() == ".csv" and path.is_file():
        return table.source(path)
    if path.exists():
        raise ValueError(f"{path} is no data set; give a folder of images, a .csv or a .npz file")
    return None


def decode_once(
    source: Source, size: Size | None, channels: int | None, cache: Path | None = None
) -> Decoded:
    """Return the images of a source (see `decode.decode`), decoded now or by an earlier call.

    ``cache``: the folder for decoded images; None: `cache_folder`. Images that cannot be kept there are
    decoded to memory, and a note says so.
    """
    if not source.files:
        return decode.decode(source.listing(), size, channels)
    cache = cache or cache_folder()
    file = cache / f"{source.name}-{_fingerprint(source, size, channels)}.npy"
    with contextlib.suppress(Exception):  # missing, cut off or of another kind: decode again
        return _read(file)
    try:
        _decode_to_disk(source, size, channels, file)
        return _read(file)
    except OSError as error:
        result = decode.decode(source.listing(), size, channels)
        note = f"decoded images could not be cached in {cache} ({error.strerror or error})"
        return replace(result, notes=(*result.notes, note))


def _decode_to_disk(source: Source, size: Size | None, channels: int | None, file: Path) -> None:
    """Write the decoded images to ``file``, and what else is known of them to a small file beside it."""
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(4)}{TEMPORARY}")

    def allocate(shape: tuple[int, int, int, int]) -> np.ndarray:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Without this check a full disk would end the process while it writes to the mapped file.
        if shutil.disk_usage(file.parent).free < math.prod(shape):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        temporary.touch(0o600)  # nobody else may look at the images
        return np.lib.format.open_memmap(temporary, mode="w+", dtype=np.uint8, shape=shape)

    try:
        result = decode.decode(source.listing(), size, channels, allocate)
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
    facts = {field: getattr(result, field) for field in ("trains", "classes", "holders", "notes")}
    about = np.array(json.dumps(facts))
    write_whole(
        file.with_suffix(".npz"),
        lambda out: np.savez(out, about=about, labels=result.labels, holder=result.holder),
        private=True,
    )


def _read(file: Path) -> Decoded:
    with np.load(file.with_suffix(".npz"), allow_pickle=False) as arrays:
        facts = json.loads(str(arrays["about"]))
        labels, holder = arrays["labels"], arrays["holder"]
    # Copy on write: torch takes no array that it could not write to.
    images = np.load(file, mmap_mode="c", allow_pickle=False)[: len(labels)]
    texts = {field: tuple(facts[field]) for field in ("classes", "holders", "notes")}
    return Decoded(images=images, labels=labels, holder=holder, trains=facts["trains"], **texts)


def _fingerprint(source: Source, *options: Size | int | None) -> str:
    digest = hashlib.sha256(repr((CACHE_FORMAT, options)).encode())
    for file in source.files:
        stat = file.stat()
        line = f"{file.absolute()}\0{stat.st_size}\0{stat.st_mtime_ns}\0"
        digest.update(line.encode(errors="surrogateescape"))
    return digest.hexdigest()[:24]
