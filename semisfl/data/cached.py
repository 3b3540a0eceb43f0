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
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from semisfl.data import decode
from semisfl.data.decode import Decoded, Size, Source
from semisfl.files import TEMPORARY, write_whole

CACHE_FORMAT = 2  # raise it when decoding changes: older cached copies are then ignored
MAPPED_FROM = 2**30


def decoded(
    source: Source, size: Size | None, channels: int | None, cache: Path | None = None
) -> Decoded:
    """Decode a source, or read what an earlier call decoded."""
    if not source.files:
        return decode.decode(source.listing(), size, channels)
    if cache is None:
        cache = Path(os.environ.get("SEMISFL_CACHE") or Path.home() / ".cache" / "semisfl")
    file = cache / f"{source.name}-{_fingerprint(source, size, channels)}.npz"
    # Missing, truncated, damaged or foreign: decode again.
    with contextlib.suppress(Exception):
        return _read(file)
    with _room_on_disk(file) as room:
        result = decode.decode(source.listing(), size, channels, room.allocate)
        try:
            if room.used:
                room.keep()
            _write(file, result, mapped=room.used)
        except OSError as error:
            if room.used:
                raise ValueError(f"{cache}: {error.strerror or error}; {room.why}") from error
            note = f"decoded images could not be cached in {cache} ({error.strerror or error})"
            return replace(result, notes=(*result.notes, note))
    return _read(file) if room.used else result


class _Room:
    """A place for decoded images: memory if they are few, else a file beside the cached copy."""

    def __init__(self, file: Path) -> None:
        self._file = _images_file(file)
        self._temporary = self._file.with_name(
            f".{self._file.name}.{secrets.token_hex(4)}{TEMPORARY}"
        )
        self.used = False
        self.why = ""

    def allocate(self, shape: tuple[int, int, int, int]) -> np.ndarray:
        needed = math.prod(shape)
        if needed < MAPPED_FROM:
            return np.empty(shape, np.uint8)
        count, _, height, width = shape
        self.why = (
            f"{count} images of {width}x{height} take {needed / 2**30:.1f} GiB decoded, which are kept on "
            "disk; free some, set SEMISFL_CACHE to another disk, or give a smaller data.size"
        )
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self._file.parent).free
            if free < needed:
                raise ValueError(f"{self._file.parent} has {free / 2**30:.1f} GiB free; {self.why}")
            self.used = True
            return np.lib.format.open_memmap(
                self._temporary, mode="w+", dtype=np.uint8, shape=shape
            )
        except OSError as error:
            raise ValueError(
                f"{self._file.parent}: {error.strerror or error}; {self.why}"
            ) from error

    def keep(self) -> None:
        os.replace(self._temporary, self._file)

    def clear(self) -> None:
        if self.used:
            self._temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _room_on_disk(file: Path) -> Iterator[_Room]:
    room = _Room(file)
    try:
        yield room
    finally:
        room.clear()


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
    file.parent.mkdir(parents=True, exist_ok=True)
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
    )
