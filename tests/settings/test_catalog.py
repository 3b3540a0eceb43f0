"""Test that everything in the catalog exists, and that it has everything that exists."""

import json

import pytest
import torch

from semisfl.cli.main import main
from semisfl.models.build import build
from semisfl.models.split import parameter_count
from semisfl.models.zoo import MODELS
from semisfl.settings import catalog, config, lookup


def test_every_row_is_called_by_its_own_name_and_has_its_code() -> None:
    for table in (catalog.METHODS, catalog.DATA, catalog.CODECS, catalog.AGGREGATES):
        assert all(name == row.name for name, row in table.items())
    for name, row in catalog.METHODS.items():
        assert lookup.method(name) is row and callable(lookup.load(row.code).round) and row.cost
        assert name in ("semisfl", "supervised") or row.note, f"{name} must say what is ours"
    works = [work for row in catalog.METHODS.values() for work in lookup.works(row)]
    assert sorted(works) == [
        *("batchnorm-statistics", "batchnorm-statistics", "fedmatch", "fedswitch", "fl2", "semifl")
    ]
    assert list(catalog.CODECS) == ["fp32", "fp16", "bf16", "int8", "int4"]


def test_titles_and_notes_are_found_without_importing_anything() -> None:
    assert lookup.title_of("fedswitch-sl") == "FedSwitch-SL"
    assert lookup.note_of("fedswitch").startswith("a reconstruction")
    assert lookup.title_of("my.package:Mine") == "Mine" and lookup.note_of("my.package:Mine") == ""


def test_models_are_counted_as_they_are_built(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--json"]) == 0
    listed = {row["name"]: row for row in json.loads(capsys.readouterr().out)["models"]}
    assert list(listed) == list(MODELS)
    for name, row in MODELS.items():
        with torch.device("meta"):  # shapes without memory
            model = build(name, row.shape, row.classes, cut=catalog.MODELS[name], projector="none")
        counts = (model.features, parameter_count(model.bottom), parameter_count(model.top))
        assert counts == tuple(listed[name][key] for key in ("features", "bottom", "top")), name


def test_an_unknown_model_is_refused_where_settings_are_read() -> None:
    assert list(MODELS) == list(catalog.MODELS)
    with pytest.raises(
        config.ConfigError, match=r"model.name = .resnet. is not known; known: cnn, al"
    ):
        config.parse({"model": {"name": "resnet"}})
