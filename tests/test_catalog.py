"""What is said to exist exists, and nothing else does."""

import json

import pytest
import torch

from semisfl import catalog, config
from semisfl.cli.main import main
from semisfl.data.sources import SOURCES
from semisfl.methods import METHODS
from semisfl.models import MODELS, build, parameter_count


def test_methods_and_data_are_those_of_the_code() -> None:
    assert list(catalog.METHODS) == list(METHODS) == list(config.METHODS)
    assert list(catalog.DATA) == list(SOURCES)
    assert catalog.title_of("fedswitch-sl") == METHODS["fedswitch-sl"].title == "FedSwitch-SL"
    assert catalog.note_of("fedswitch") == METHODS["fedswitch"].note != ""
    assert catalog.title_of("my.package:Mine") == "my.package:Mine"
    assert catalog.note_of("my.package:Mine") == ""


def test_models_are_counted_as_they_are_built(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--json"]) == 0
    told = {row["name"]: row for row in json.loads(capsys.readouterr().out)["models"]}
    assert list(told) == list(MODELS)
    for name, row in MODELS.items():
        with torch.device("meta"):  # shapes without memory
            model = build(name, row.shape, row.classes, projector="none")
        counts = (model.features, parameter_count(model.bottom), parameter_count(model.top))
        assert counts == tuple(told[name][key] for key in ("features", "bottom", "top")), name
