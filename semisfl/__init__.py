"""Semi-supervised split federated learning: SemiSFL and its baselines."""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from semisfl.apply import evaluate as evaluate
    from semisfl.apply import predict as predict
    from semisfl.config import Config as Config
    from semisfl.config import ConfigError as ConfigError
    from semisfl.config import parse as parse
    from semisfl.data.partition import Partition as Partition
    from semisfl.data.sources import Dataset as Dataset
    from semisfl.data.sources import load as load
    from semisfl.presets import preset as preset
    from semisfl.run import Result as Result
    from semisfl.run import divide as divide
    from semisfl.run import resume as resume
    from semisfl.run import train as train

# Looked up on first use, so that reading a report or `--help` does not wait for torch.
_HOMES = {
    "Config": "semisfl.config",
    "ConfigError": "semisfl.config",
    "Dataset": "semisfl.data.sources",
    "Partition": "semisfl.data.partition",
    "Result": "semisfl.run",
    "divide": "semisfl.run",
    "evaluate": "semisfl.apply",
    "load": "semisfl.data.sources",
    "parse": "semisfl.config",
    "predict": "semisfl.apply",
    "preset": "semisfl.presets",
    "resume": "semisfl.run",
    "train": "semisfl.run",
}
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'semisfl' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
