"""The rows of a run's ``metrics.jsonl``: one line per round, read whole."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

Row = TypeVar("Row")


def read_metrics(path: Path, make: Callable[[dict[str, Any]], Row]) -> list[Row]:
    """``make`` of each row of a metrics file; a last line that a crash cut off is left out."""
    return rows_of(path.read_bytes().splitlines() if path.is_file() else [], path, make)


def rows_of(lines: Sequence[bytes], path: Path, make: Callable[[dict[str, Any]], Row]) -> list[Row]:
    """As `read_metrics`, of the lines of a file that was read already."""
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or not isinstance(row.get("round"), int):
                raise ValueError("it is not the row of a round")
            rows.append(make(row))
        except ValueError as error:
            if number < len(lines):
                raise ValueError(
                    f"{path}, line {number} is damaged: {error}; remove the line"
                ) from error
    return rows
