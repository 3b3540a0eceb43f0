"""Write run directories as training does, without training."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reproduction.paper.grid import Cell
from semisfl.settings.config import Config
from semisfl.settings.toml import to_toml


def leave_run(
    path: Path, config: Config, accuracies: Sequence[float], **columns: Sequence[Any]
) -> Path:
    """Write a run that was tested in every round, and return its path; ``columns`` are further metrics."""
    path.mkdir(parents=True)
    (path / "config.toml").write_text(to_toml(config), encoding="utf-8")
    rounds = [
        {"round": number, "accuracy": accuracy, "bytes_total": 1_000_000_000 * (number + 1)}
        | {key: values[number] for key, values in columns.items()}
        for number, accuracy in enumerate(accuracies)
    ]
    text = "".join(json.dumps(metrics) + "\n" for metrics in rounds)
    (path / "metrics.jsonl").write_text(text, encoding="utf-8")
    return path


def digits_cell(method: str = "semisfl", **more: Any) -> Cell:
    return Cell(row=method, column="digits", preset="digits", method=method, rounds=2, **more)
