"""Layer tables: what may stand in one, and where each layer's input comes from."""

import json
from typing import Any

import pytest

from semisfl.models.shapes import MAX_OUTPUT, MAX_PARAMETERS, place
from semisfl.settings import config
from semisfl.settings.config import ConfigError
from semisfl.settings.layer_kinds import (
    Conv,
    Flatten,
    Linear,
    Relu,
    name_layers,
    parse_layers,
)
from semisfl.settings.toml import commented_toml, to_toml

Rows = list[dict[str, Any]]

SMALL: Rows = [
    {"kind": "conv", "channels": 4, "padding": 1},
    {"kind": "residual", "body": [{"kind": "batchnorm"}, {"kind": "relu"}]},
    {"kind": "avgpool"},
    {"kind": "flatten"},
    {"kind": "linear"},
]
WIDE = {"kind": "linear", "features": 65_536}


def at(index: int, row: Any) -> Rows:
    return [*SMALL[:index], row, *SMALL[index + 1 :]]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (3, "model.layers = 3: should be a list"),
        ([], "model.layers has 0 layers"),
        (at(2, {"size": 2}), "model.layers[2] = {'size': 2}: unable to extract tag"),
        (at(2, {"kind": "cnv"}), "model.layers[2].kind = 'cnv' is not known; use one of 'conv',"),
        (at(0, {"kind": "conv"}), "model.layers[0].conv.channels is missing; set it"),
        (
            at(0, {"kind": "conv", "chanels": 4, "channels": 4}),
            "unknown key 'model.layers[0].conv.chanels'",
        ),
        (
            at(0, {"kind": "conv", "channels": 10**9}),
            "model.layers[0].conv.channels = 1000000000: should be less than or equal to 65536",
        ),
        (
            at(2, {"kind": "dropout", "p": 1}),
            "model.layers[2].dropout.p = 1: should be less than 1",
        ),
        (
            at(2, {"kind": "relu", "name": "a.b"}),
            "model.layers[2].relu.name = 'a.b': string should",
        ),
        (
            [{"kind": "relu", "name": "a"}, {"kind": "relu"}, {"kind": "relu", "name": "a"}],
            "model.layers has two layers called 'a'",
        ),
        (
            at(1, {"kind": "residual", "body": [{"kind": "relu"}], "shortcut": [{"kind": "conv"}]}),
            "model.layers[1].residual.shortcut[0].conv.channels is missing",
        ),
        (
            at(1, {"kind": "residual", "body": [{"kind": "residual", "body": []}]}),
            "model.layers[1].residual.body[0].residual.body = []",
        ),
        (
            [{"kind": "residual", "body": [{"kind": "relu"}] * 15}] * 21,
            "model.layers has 336 layers, blocks included; it must have 1 to 320",
        ),
    ],
)
def test_mistakes_in_a_table_are_one_line(rows: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        config.parse({"model": {"layers": rows}})
    text = str(error.value)
    assert message in text and "\n" not in text


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            at(0, {"kind": "conv", "channels": 4, "kernel": 9}),
            "model.layers[0] (conv) is 9 pixels wide, but is given 8x8 and padding = (0, 0, 0, 0)",
        ),
        (
            at(0, {"kind": "conv", "channels": 4, "groups": 2}),
            "model.layers[0] (conv) has groups = 2, which does not divide its 3 input channels",
        ),
        (
            at(0, {"kind": "conv", "channels": 4, "groups": 3}),
            "model.layers[0] (conv) has groups = 3, which does not divide its 4 channels",
        ),
        (
            at(2, {"kind": "pool", "size": 3, "padding": 2}),
            "model.layers[2] (pool) has padding = 2, more than half of size = 3",
        ),
        (at(3, {"kind": "relu"}), "model.layers[4] (linear) is given 4x1x1; put a flatten before"),
        (
            [*SMALL, {"kind": "pool"}],
            "model.layers[5] (pool) takes pictures, and is given 5; put it before the flatten",
        ),
        (
            [*SMALL, {"kind": "linear", "features": 5}],
            "model.layers[4] (linear) has no features; only the last linear layer may",
        ),
        (
            at(4, {"kind": "linear", "features": 7}),
            "model.layers gives 7 numbers for an image, but there are 5 classes; end it with",
        ),
        (SMALL[:1], "model.layers gives 4x8x8 numbers for an image, but there are 5 classes"),
        (
            at(1, {"kind": "residual", "body": [{"kind": "conv", "channels": 6, "stride": 2}]}),
            "model.layers[1] (residual) adds 6x3x3 of its body to 4x8x8 of its shortcut; give the",
        ),
        (
            at(1, {"kind": "residual", "body": [{"kind": "linear", "features": 3}]}),
            "model.layers[1].body[0] (linear) is given 4x8x8",
        ),
        (
            at(0, {"kind": "conv", "channels": 65_536, "kernel": 1, "padding": 8}),
            f"(conv) gives 65536x24x24 numbers for an image, the limit is {MAX_OUTPUT:,}",
        ),
        (
            [*SMALL[:4], WIDE, WIDE, {"kind": "linear"}],
            f"parameters, the limit is {MAX_PARAMETERS:,}; make it narrower",
        ),
    ],
)
def test_layers_that_do_not_fit(rows: Rows, message: str) -> None:
    layers = parse_layers(rows)
    with pytest.raises(ValueError) as error:
        place(layers, (3, 8, 8), 5)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_what_every_layer_takes_and_gives() -> None:
    placed = place(parse_layers(SMALL), (3, 8, 8), 5)
    assert [row.takes for row in placed] == [(3, 8, 8), (4, 8, 8), (4, 8, 8), (4, 1, 1), (4,)]
    assert placed[-1].gives == (5,)
    assert [row.parameters for row in placed] == [3 * 4 * 9 + 4, 8, 0, 0, 4 * 5 + 5]
    assert [row.name for row in placed[1].body] == ["batchnorm1", "relu1"]


def test_names_are_given_by_kind_and_never_twice() -> None:
    layers = (Conv(channels=2, name="relu1"), Relu(), Relu(name="relu2_"), Relu(), Linear())
    assert [name for name, _ in name_layers(layers)] == [
        "relu1",
        "relu1_",
        "relu2_",
        "relu3",
        "linear1",
    ]


def test_a_table_is_written_without_what_is_as_always() -> None:
    layers = parse_layers([{"kind": "conv", "channels": 4, "stride": 1, "bias": False}, *SMALL[1:]])
    written = [layer.model_dump(mode="json") for layer in layers]
    assert written == [{"kind": "conv", "channels": 4, "bias": False}, *SMALL[1:]]
    assert parse_layers(written) == layers
    assert parse_layers([Flatten(), Linear(features=3)]) == (Flatten(), Linear(features=3))


def with_layers(**model: Any) -> config.Config:
    return config.parse({"model": {"name": "cnn", "layers": SMALL, **model}})


def test_tables_survive_toml_and_json(tmp_path: Any) -> None:
    chosen = with_layers()
    for write in (to_toml, commented_toml):
        file = tmp_path / "config.toml"
        file.write_text(write(chosen), encoding="utf-8")
        assert config.parse(config.read(file)) == chosen
    assert config.parse(json.loads(chosen.model_dump_json())) == chosen
    # What crosses the network as JSON must be one value, whatever else was left out in the file.
    assert chosen.model_dump(mode="json")["model"]["layers"] == SMALL


def test_tables_in_toml_and_on_the_command_line(tmp_path: Any) -> None:
    file = tmp_path / "own.toml"
    file.write_text(
        """
        [[model.layers]]
        kind = "conv"
        channels = 4
        padding = 1
        [[model.layers]]
        kind = "residual"
        body = [{kind = "batchnorm"}, {kind = "relu"}]
        [[model.layers]]
        kind = "avgpool"
        [[model.layers]]
        kind = "flatten"
        [[model.layers]]
        kind = "linear"
        """,
        encoding="utf-8",
    )
    assert config.parse(config.read(file)).model == with_layers().model
    layers = '[{kind="flatten"}, {kind = "linear"}]'
    values = config.override({"model": {"name": "alexnet"}}, [f"model.layers={layers}"])
    chosen = config.parse(values).model
    assert chosen.layers == (Flatten(), Linear()) == chosen.table
    assert chosen.name == "custom"


def test_own_layers_win_over_a_name() -> None:
    assert with_layers().model.name == "custom"
    named_again = config.parse({"model": {"name": "vgg13", "layers": "none"}}).model
    assert (named_again.name, named_again.layers, named_again.table) == ("vgg13", None, "vgg13")
    with pytest.raises(ConfigError, match=r"model.name = 'custom' needs model.layers"):
        config.parse({"model": {"name": "custom"}})
