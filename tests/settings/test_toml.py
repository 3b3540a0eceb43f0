"""Configurations written as TOML come back the same, whatever they hold."""

import re
import tomllib
from typing import Any

import pytest
from pydantic import Field

from semisfl.settings import config, presets
from semisfl.settings.config import Config, Section
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


class Block(Section):
    kind: str = Field("conv", description="what the layer is")
    stride: int | None = Field(None, description="none: one")
    inside: tuple[dict[str, Any], ...] = Field((), description="layers of a block")


class Nested(Section):
    # Tables before a plain value: written in this order, the value would fall into the table.
    layers: list[Block] = Field([], description="the layers, from the input up")
    tables: list[dict[str, Any]] = Field([], description="tables with any keys")
    sizes: tuple[int, ...] = Field((3, 32), description="numbers in a row")
    name: str = Field("mine", description="what it is called")


class Whole(Section):
    nested: Nested = Nested()
    seed: int = Field(0, description="the last one, and plain")


NESTED = Whole.model_validate(
    {
        "nested": {
            "layers": [
                {"kind": STRANGE, "inside": [{"kind": "relu", "inside": [{"deep": 1}]}, {"b": 2}]},
                {"kind": "pool", "stride": 2},
            ],
            "tables": [{"a key": {"x.y": True}, "z": [1.5, 2.5]}, {}],
        }
    }
)


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("table", [NESTED, Whole()], ids=["full", "empty"])
def test_tables_inside_tables(table: Any, write: Any) -> None:
    assert Whole.model_validate(tomllib.loads(write(table))) == table


def test_layers_are_written_as_arrays_of_tables() -> None:
    lines = to_toml(NESTED).splitlines()
    assert lines.count("[[nested.layers]]") == 2
    assert lines.count("[[nested.layers.inside]]") == 2
    assert "# layers: the layers, from the input up" in commented_toml(NESTED)


def test_explanations_stand_in_one_column() -> None:
    text = commented_toml(config.parse({"optimizer": {"lr": 0.5}}))
    assert "\nlr = 0.5                        # learning rate of the first round, eta\n" in text
    assert "\n# cut = none                    # last layer on the clients, by index or name" in text
    assert re.search(r'\nprojector = "mlp" +# .* \(mlp \| linear \| none\)\n', text)
    assert "#" not in to_toml(config.parse({}))
