"""The rows of a run's ``metrics.jsonl``: one line per round, read and added whole."""

import contextlib
import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

Row = TypeVar("Row")


def read_metrics(path: Path, make: Callable[[dict[str, Any]], Row]) -> list[Row]:
    """``make`` of each row of a metrics file; a last line that a crash cut off is left out."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(make(json.loads(line)))
        except ValueError as error:
            if number < len(lines):
                raise ValueError(
                    f"{path}, line {number} is damaged: {error}; remove the line"
                ) from error
    return rows


def append_whole(path: Path, data: bytes) -> None:
    """All of ``data`` or nothing: half a line would spoil the next one too."""
    with open(path, "ab", buffering=0) as file:
        start = file.tell()
        try:
            if file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(start)
            raise
