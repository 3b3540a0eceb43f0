"""The rows of a run's ``metrics.jsonl``: one line per round, read whole."""

import json
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
