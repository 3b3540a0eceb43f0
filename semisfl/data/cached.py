"""Decode a source once, and keep the result under ``$SEMISFL_CACHE`` (else ``~/.cache/semisfl``).

A cached copy is keyed by the names, sizes and times of the files it came from, and may be deleted at
any time. Small sets are read into memory, with checksums. Sets of `MAPPED_FROM` bytes and more are
decoded straight to disk and mapped from there, so that they need not fit into memory.
"""

import contextlib
import hashlib
import json
import math
import os
import secrets
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Self

import numpy as np

from semisfl.data import decode
from semisfl.data.decode import Decoded, Size, Source
from semisfl.files import TEMPORARY, cache_folder, write_whole
from semisfl.settings.counts import amount

CACHE_FORMAT = 3  # raise it when decoding changes: older cached copies are then ignored
MAPPED_FROM = 2**30


def decoded(
    source: Source, size: Size | None, channels: int | None, cache: Path | None = None
) -> Decoded:
    """Decode a source, or read what an earlier call decoded."""
    if not source.files:
        return decode.decode(source.listing(), size, channels)
    cache = cache or cache_folder()
    file = cache / f"{source.name}-{_fingerprint(source, size, channels)}.npz"
    # Missing, truncated, damaged or foreign: decode again.
    with contextlib.suppress(Exception):
        return _read(file)
    with _ImageStore(file) as store:
        result = decode.decode(source.listing(), size, channels, store.allocate)
        try:
            store.keep()
            _write(file, result, mapped=store.on_disk)
        except OSError as error:
            if store.on_disk:
                raise ValueError(f"{cache}: {error.strerror or error}; {store.needs}") from error
            note = f"decoded images could not be cached in {cache} ({error.strerror or error})"
            return replace(result, notes=(*result.notes, note))
    return _read(file) if store.on_disk else result


class _ImageStore:
    """Memory for decoded images: an array if they are few, else a file that is mapped into memory.

    The file is temporary until `keep`; leaving the context removes it if it was not kept.
    """

    def __init__(self, file: Path) -> None:
        self._file = _images_file(file)
        self._temporary = self._file.with_name(
            f".{self._file.name}.{secrets.token_hex(4)}{TEMPORARY}"
        )
        self.on_disk = False
        self.needs = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.on_disk:
            self._temporary.unlink(missing_ok=True)

    def allocate(self, shape: tuple[int, int, int, int]) -> np.ndarray:
        """Return an array for images of this shape; `ValueError` if the disk has no space for it."""
        size = math.prod(shape)
        if size < MAPPED_FROM:
            return np.empty(shape, np.uint8)
        count, _, height, width = shape
        self.needs = (
            f"{count} images of {width}x{height} take {amount(size)} decoded, which are kept on "
            "disk; free some, set SEMISFL_CACHE to another disk, or give a smaller data.size"
        )
        folder = self._file.parent
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            free = shutil.disk_usage(folder).free
            if free < size:
                raise ValueError(f"{folder} has {amount(free)} free; {self.needs}")
            self.on_disk = True
            self._temporary.touch(0o600)  # nobody else may look at the images
            return np.lib.format.open_memmap(
                self._temporary, mode="w+", dtype=np.uint8, shape=shape
            )
        except OSError as error:
            raise ValueError(f"{folder}: {error.strerror or error}; {self.needs}") from error

    def keep(self) -> None:
        """Give the file its final name."""
        if self.on_disk:
            os.replace(self._temporary, self._file)


def _images_file(file: Path) -> Path:
    return file.with_suffix(".npy")


def _fingerprint(source: Source, *options: Size | int | None) -> str:
    digest = hashlib.sha256(repr((CACHE_FORMAT, options)).encode())
    for file in source.files:
        stat = file.stat()
        digest.update(
            f"{file.absolute()}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode(
                errors="surrogateescape"
            )
        )
    return digest.hexdigest()[:24]


def _read(file: Path) -> Decoded:
    with np.load(file, allow_pickle=False) as arrays:
        about = json.loads(str(arrays["about"]))
        if about["mapped"]:
            # Copy on write: torch takes no tensor that it could not write to.
            images = np.load(_images_file(file), mmap_mode="c", allow_pickle=False)
            images = images[: len(arrays["labels"])]
        else:
            images = arrays["images"]
        return Decoded(
            images=images,
            labels=arrays["labels"],
            holder=arrays["holder"],
            trains=about["trains"],
            **{field: tuple(about[field]) for field in ("classes", "holders", "notes")},
        )


def _write(file: Path, result: Decoded, mapped: bool) -> None:
    """Write all or nothing: a run that is killed here leaves no half-written cache behind."""
    about = {field: getattr(result, field) for field in ("trains", "classes", "holders", "notes")}
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    about["mapped"] = mapped
    images = np.empty(0, np.uint8) if mapped else result.images
    write_whole(
        file,
        lambda out: np.savez(
            out,
            about=np.array(json.dumps(about)),
            images=images,
            labels=result.labels,
            holder=result.holder,
        ),
        private=True,
    )
