"""Configurations written as TOML come back the same, whatever they hold."""

import tomllib
from typing import Any

import pytest

from semisfl.settings import config, presets
from semisfl.settings.config import Config
from semisfl.settings.toml import commented_toml, to_toml

WRITERS = [to_toml, commented_toml]
STRANGE = "a \"quoted\" \\ 'path' # = [x]\n\t\x00\x7f😀 ü"


def parsed(text: str) -> Config:
    return config.parse(tomllib.loads(text))


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize(
    "name", [*presets.PRESETS, "digits+as_published_code", "svhn+as_in_paper", "digits+frontier"]
)
def test_presets(name: str, write: Any) -> None:
    assert parsed(write(presets.preset(name))) == presets.preset(name)


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize(
    "values",
    [
        {"data": {"name": STRANGE}},
        {"data": {"name": '"""'}},
        {"data": {"name": "none"}},
        {"model": {"cut": "4"}},
        {"model": {"cut": 4}},
        {"data": {"size": None, "validation": None}},
        {"data": {"size": 32, "augment": {"cutout": 0}}},
        {"optimizer": {"lr": 1e-7, "lr_min": 1e-30}},
        {"optimizer": {"lr": 1.0, "lr_min": 0.1 + 0.2}},
        {"fedswitch": {"iid_threshold": float("-inf")}},
        {"fedswitch": {"iid_threshold": float("inf")}},
        {"data": {"augment": {"flip": False}}},
    ],
    ids=str,
)
def test_strange_values(values: dict[str, Any], write: Any) -> None:
    chosen = config.parse(values)
    assert parsed(write(chosen)) == chosen
