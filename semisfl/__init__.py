"""Semi-supervised split federated learning: SemiSFL and its baselines."""

import importlib
from typing import TYPE_CHECKING, Any

from semisfl.settings.version import VERSION as __version__

if TYPE_CHECKING:
    from semisfl.data.dataset import Dataset as Dataset
    from semisfl.data.partition import Partition as Partition
    from semisfl.data.sources import load_data as load_data
    from semisfl.models.layers import Residual as Residual
    from semisfl.models.modules import layers_of as layers_of
    from semisfl.runs.backbone import table_of as table_of
    from semisfl.runs.loop import Result as Result
    from semisfl.runs.run_data import divide as divide
    from semisfl.runs.sinks import Callback as Callback
    from semisfl.runs.start import resume as resume, train as train
    from semisfl.settings.config import Config as Config, ConfigError as ConfigError, parse as parse
    from semisfl.settings.presets import preset as preset
    from semisfl.use.classifier import (
        Classifier as Classifier,
        evaluate as evaluate,
        load as load,
        predict as predict,
    )

# Imported on first use, so that `--help` and reports do not wait for torch.
_HOMES = {
    "Callback": "semisfl.runs.sinks",
    "Classifier": "semisfl.use.classifier",
    "Config": "semisfl.settings.config",
    "ConfigError": "semisfl.settings.config",
    "Dataset": "semisfl.data.dataset",
    "Partition": "semisfl.data.partition",
    "Residual": "semisfl.models.layers",
    "Result": "semisfl.runs.loop",
    "divide": "semisfl.runs.run_data",
    "evaluate": "semisfl.use.classifier",
    "layers_of": "semisfl.models.modules",
    "load": "semisfl.use.classifier",
    "load_data": "semisfl.data.sources",
    "parse": "semisfl.settings.config",
    "predict": "semisfl.use.classifier",
    "preset": "semisfl.settings.presets",
    "resume": "semisfl.runs.start",
    "table_of": "semisfl.runs.backbone",
    "train": "semisfl.runs.start",
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
