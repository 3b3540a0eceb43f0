"""SemiSFL's settings beyond the paper: off unless set, and a run with all of them is a run like any other."""

from pathlib import Path

import pytest
import torch

from semisfl.methods.fedswitch_sl import FedSwitchSL
from semisfl.methods.semisfl import SemiSFL
from semisfl.runs import checkpoint
from semisfl.runs.experiment import Experiment
from semisfl.settings import presets
from tests import toy
from tests.leaving import leave

PARTS = ("semisfl.align=client", "server.labeled_view=both")
EVERYTHING = (*PARTS, "semisfl.confidence_threshold=0.6")
OF_FEDSWITCH_SL = ("fedswitch.align=client", "fedswitch.confidence_threshold=0.4")
SETTINGS = {"semisfl": EVERYTHING, "fedswitch-sl": OF_FEDSWITCH_SL}


def method_of(experiment: Experiment) -> SemiSFL:
    method = experiment.method
    assert isinstance(method, SemiSFL)
    return method


def test_extensions_are_off_in_presets_of_published_data_and_leave_no_state() -> None:
    published = set(presets.PRESETS) - {"images", "photos"}
    for name in (*published, "cifar10+as_in_paper", "cifar10+as_published_code"):
        config = presets.preset(name)
        assert config.semisfl.align == "none"
    method = method_of(toy.assemble("semisfl"))
    method.round(0)
    assert not method.state_dict()["labelling"]


def test_the_frontier_is_semisfl_with_settings_of_its_own_and_cheaper_codecs() -> None:
    for name in ("cifar10", "digits"):
        plain, beyond = presets.preset(name), presets.preset(f"{name}+frontier")
        assert beyond.method == "semisfl" and beyond.semisfl.align == "client"
        assert "fp32" not in beyond.wire.model_dump().values()
        kept = {"data", "clients", "server", "model", "optimizer", "rounds"}
        assert plain.model_dump(include=kept) == beyond.model_dump(include=kept)


@pytest.mark.parametrize("changed", (*PARTS, "semisfl.align=global"))
def test_each_extension_changes_the_losses(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting that nothing reads changes none."""
    monkeypatch.setattr("semisfl.algorithm.labelling.WARMUP_ROUNDS", 0)
    common = "semisfl.confidence_threshold=0.3"
    plain, other = (method_of(toy.assemble("semisfl", common, *more)) for more in ((), (changed,)))
    for round_index in range(2):
        plain.round(round_index)
        other.round(round_index)
    before, after = (
        torch.cat([tensor.flatten().double() for tensor in method.student.state_dict().values()])
        for method in (plain, other)
    )
    assert not torch.equal(before, after)


@pytest.mark.parametrize("method", SETTINGS)
def test_rounds_without_clients_are_no_warm_up_of_the_labels(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("semisfl.algorithm.labelling.WARMUP_ROUNDS", 1)
    section = method.partition("-")[0]
    settings = (f"{section}.confidence_threshold=0.3", "optimizer.lr=0.05", "clients.active=3")
    plain, corrected = (
        toy.assemble(
            method, *settings, f"{section}.align={align}", "server.pretrain_rounds=2"
        ).method
        for align in ("none", "client")
    )
    losses = [
        (plain.round(index).loss_semi, corrected.round(index).loss_semi) for index in range(4)
    ]
    assert losses[2][0] == losses[2][1] and losses[3][0] != losses[3][1]


@pytest.mark.parametrize("method", SETTINGS)
def test_resume_with_all_of_them_is_bit_identical(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("semisfl.algorithm.labelling.WARMUP_ROUNDS", 1)
    straight, before, after = (
        toy.assemble(method, *SETTINGS[method], batchnorm=True, dropout=True) for _ in range(3)
    )
    for round_index in range(4):
        straight.method.round(round_index)
    for round_index in range(2):
        before.method.round(round_index)
    checkpoint.write(tmp_path / "latest.safetensors", before.method.state_dict())
    after.method.load_state_dict(checkpoint.read(tmp_path / "latest.safetensors"))
    for round_index in range(2, 4):
        after.method.round(round_index)
    assert checkpoint.digest(after.method.state_dict()) == checkpoint.digest(
        straight.method.state_dict()
    )
    assert "labelling" in straight.method.state_dict()


@pytest.mark.parametrize("name", SETTINGS)
def test_a_client_that_leaves_keeps_its_own_means(name: str) -> None:
    experiment = toy.assemble(name, *SETTINGS[name], "clients.active=3")
    method = experiment.method
    assert isinstance(method, SemiSFL | FedSwitchSL)
    leave(experiment.fleet, (1,), lambda features: None)
    method.round(0)
    steps = method.labelling.state_dict()["client_steps"].tolist()
    assert steps[0] == steps[2] == 4 and steps[1] < 4


def test_both_views_are_the_strong_and_the_weak_one_of_the_same_images() -> None:
    batches = {}
    for view in ("strong", "weak", "both"):
        experiment = toy.assemble("semisfl", f"server.labeled_view={view}")
        labeled = method_of(experiment).labeled
        labeled.start(0, 2, view)  # type: ignore[arg-type]
        batches[view] = labeled.next_two()
    first, _, second, labels = batches["both"]
    assert len(first) == 2 * len(labels) == 2 * len(second)
    assert torch.equal(first[: len(labels)], batches["strong"][0])
    assert torch.equal(second, batches["strong"][2]) and torch.equal(labels, batches["strong"][3])
    # A weak view of its own: not cut out, not recoloured, of the same images.
    assert not torch.equal(first[len(labels) :], batches["weak"][0])
    assert (
        float((first[len(labels) :].mean((2, 3)) - batches["weak"][0].mean((2, 3))).abs().max())
        < 0.2
    )
