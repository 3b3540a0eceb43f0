"""A run that cannot work says so, with what to change: in the log, in its metrics and in its result."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from semisfl.metrics import RoundMetrics
from semisfl.runs import start
from semisfl.runs.advice import Advice
from semisfl.runs.experiment import assemble
from semisfl.runs.loop import run_rounds
from semisfl.runs.report import read_run
from semisfl.settings.config import Config, ConfigError, parse
from tests import toy

CLASSES = 10


def warned(config: Config, rounds: list[dict[str, Any]]) -> dict[int, list[str]]:
    """Return the warnings by round; only rounds with some are in it."""
    advice = Advice(config, CLASSES)
    warnings = {
        index: advice.after(RoundMetrics(round=index, **one)) for index, one in enumerate(rounds)
    }
    return {index: texts for index, texts in warnings.items() if texts}


@pytest.mark.parametrize("nothing", [{"mask_rate": 1.0}, {"contributing": 0}])
def test_no_confident_image_for_five_rounds(nothing: dict[str, Any]) -> None:
    config = parse({"method": "semifl", "rounds": 40, "semifl": {"confidence_threshold": 0.8}})
    some = {"mask_rate": 0.9, "contributing": 2}
    ((at, (text,)),) = warned(config, [some] * 3 + [nothing] * 20).items()
    assert at == 9, "the first rounds say little"
    assert "lower semifl.confidence_threshold = 0.8" in text
    assert "raise data.labeled" in text
    ((_, (text,)),) = warned(config.in_fleet("network"), [nothing] * 20).items()
    assert "add labelled images to --labeled" in text and "data.labeled" not in text
    assert list(warned(config, [some] * 12 + [nothing] * 5)) == [16]
    assert not warned(config, ([nothing] * 4 + [some]) * 6)


@pytest.mark.parametrize(("rounds", "at"), [(30, 9), (300, 29)])
def test_accuracy_at_chance_after_a_tenth_of_the_rounds(rounds: int, at: int) -> None:
    config = parse({"rounds": rounds, "optimizer": {"lr": 0.3}})
    ((index, (text,)),) = warned(config, [{"accuracy": 11.5}] * 40).items()
    assert index == at
    assert "the accuracy is 11.5 %, and guessing gives 10.0 %" in text
    assert "lower optimizer.lr = 0.3" in text
    assert not warned(config, [{"accuracy": 12.5}] * 40)
    assert not warned(config, [{}] * 40), "never tested"


def test_one_answer_for_every_image_of_uneven_classes() -> None:
    config = parse({"rounds": 30, "server": {"steps": 20}})
    most = {"accuracy": 90.0, "recall_by_class": [100.0, 0.0, None]}
    ((index, (text,)),) = warned(config, [most] * 15).items()
    assert index == 9
    assert "the accuracy of 90.0 % is that of one answer for every image" in text
    assert "raise data.labeled, of the rarer classes too" in text
    two = {"accuracy": 90.0, "recall_by_class": [99.0, 1.0, None]}
    assert not warned(config, [two, *[most] * 15])
    assert not warned(config, [{"accuracy": 90.0, "recall_by_class": [90.0, None, None]}] * 15)


def test_clients_that_bring_nothing_over_labels_alone() -> None:
    config = parse({"rounds": 20, "server": {"pretrain_rounds": 3}, "clients": {"steps": 7}})
    alone = [{"accuracy": accuracy} for accuracy in (30.0, 60.0, 55.0)]
    ((at, (text,)),) = warned(config, [*alone, *[{"accuracy": 60.0}] * 12]).items()
    assert at == 9 and "60.0 % with them, 60.0 % with labels alone" in text
    assert "lower clients.steps = 7" in text
    assert not warned(config, [*alone, *[{"accuracy": 60.5}] * 12])


def arguments() -> dict[str, Any]:
    data = toy.dataset()
    shards = toy.partition(data)
    return {"data": data, "partition": shards, "model": toy.network(), "device": "cpu"}


def hopeless() -> Config:
    """Return the settings of a run that does not move."""
    still = ("rounds=14", "optimizer.lr=1e-12", "optimizer.lr_min=0", "stop.patience=11")
    return toy.values("supervised", *still)


def test_a_run_keeps_its_warnings_and_says_each_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "run"
    result = start.train(hopeless(), **arguments(), out=out)
    (text,) = result.warnings
    assert "guessing gives 25.0 %" in text and not result.diverged
    assert caplog.text.count("guessing gives") == 1
    lines = (out / "metrics.jsonl").read_text().splitlines()
    assert [("guessing" in line) for line in lines] == [False] * 9 + [True] + [False] * 2
    # It goes on beyond its limit and has nothing new to say.
    resumed = start.resume(out, settings=["stop.patience=none"], **arguments())
    assert len(resumed.rounds) == 14
    assert resumed.warnings == [text] and caplog.text.count("guessing gives") == 1


def test_a_run_that_diverges_is_not_a_success(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = toy.values("supervised", "rounds=2", "optimizer.lr=1e30")
    result = start.train(settings, **arguments(), out=tmp_path / "run")
    assert read_run(tmp_path / "run").diverged
    assert result.diverged and "lower optimizer.lr = 1e+30" in caplog.text
    assert not all(math.isfinite(one.detach().abs().max()) for one in result.model.parameters())


def test_batchnorm_over_one_value_names_the_settings() -> None:
    layers = """[
        {kind = "conv", channels = 4, kernel = 12},
        {kind = "batchnorm"},
        {kind = "flatten"},
        {kind = "linear"},
    ]"""
    data = toy.dataset()
    images = toy.partition(data)
    one_each = replace(images, clients=tuple(client[:1] for client in images.clients))
    for batches, dealt, fix in (
        (["server.batch=1"], images, r"set server\.batch = 1 to 2 or more"),
        (["clients.batch=1"], images, r"set clients\.batch = 1 to 2 or more"),
        ([], one_each, r"give a client two images or more"),
    ):
        settings = toy.values("semisfl", f"model.layers={layers}", *batches)
        experiment = assemble(settings, data, dealt, device="cpu")
        with pytest.raises(ConfigError, match=rf"1x1 pixels: {fix}, or set data\.size"):
            run_rounds(experiment)
