"""The linear probe, and runs that begin with it: stored statistics, a fitted head, no run below it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from semisfl import train
from semisfl.engine.regression import regression, span
from semisfl.methods.probe import DECAYS, WEAK_VIEWS, best_decay
from semisfl.models.layers import StoredNorm2d, batchnorms, keep_statistics
from semisfl.models.modules import layers_of, modules_of
from semisfl.models.zoo import layers_by_cut
from semisfl.runs.compare import choose_methods
from semisfl.runs.experiment import assemble
from semisfl.settings.layer_kinds import parse_layers
from tests import toy


def weights_of_toy(tmp_path: Path, rounds: int = 3) -> Path:
    """Return the weights of a network with BatchNorm that has learnt other labels of the toy set."""
    given = toy.own(toy.network(batchnorm=True))
    settings = toy.values("supervised", f"rounds={rounds}", "server.steps=10", "optimizer.lr=0.05")
    train(settings, out=tmp_path / "before", **given)
    return tmp_path / "before" / "best.safetensors"


def begun(method: str, weights: Path, *more: str) -> Any:
    """Return an experiment that begins with these weights and whose classes have other names."""
    data = toy.dataset()
    renamed = type(data)(
        "toy",
        tuple("wxyz"),
        *(getattr(data, name) for name in ("images", "labels")),
        data.test_images,
        data.test_labels,
        data.mean,
        data.std,
    )
    settings = toy.values(method, f"model.weights={weights}", *more)
    return assemble(
        settings, renamed, toy.partition(data), toy.network(batchnorm=True), device="cpu"
    )


def test_stored_statistics_never_change_and_are_a_layer_of_a_table() -> None:
    model = toy.network(batchnorm=True)
    keep_statistics(model)
    assert type(model.bn) is StoredNorm2d and not batchnorms(model)
    before = model.bn.running_mean.clone()
    images = torch.rand(4, 3, 12, 12)
    out = model.train()(images)
    torch.testing.assert_close(out, model.eval()(images))
    assert torch.equal(before, model.bn.running_mean) and model.bn.weight.requires_grad
    table = parse_layers(layers_of(model))
    again = modules_of(table, (3, 12, 12), toy.CLASSES)
    assert type(again.bn) is StoredNorm2d


@pytest.mark.parametrize("method", ["semisfl", "supervised", "semifl"])
def test_statistics_of_the_weights_stay_in_training(method: str, tmp_path: Path) -> None:
    experiment = begun(method, weights_of_toy(tmp_path))
    before = {k: v.clone() for k, v in experiment.model.state_dict().items() if "running" in k}
    assert before
    experiment.method.round(0)
    after = experiment.model.state_dict()
    for name, value in before.items():
        torch.testing.assert_close(after[name], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("method", ["semisfl", "supervised", "semifl", "fedmatch"])
def test_pretrained_layers_have_a_learning_rate_of_their_own(method: str, tmp_path: Path) -> None:
    rates = ("optimizer.lr_pretrained=1e-9", "server.pretrain_rounds=1", "optimizer.kind=sgd")
    experiment = begun(method, weights_of_toy(tmp_path), *rates)
    before = {name: one.clone() for name, one in experiment.model.named_parameters()}
    experiment.method.round(0)
    moved = {
        name: float((one - before[name]).detach().abs().max())
        for name, one in experiment.model.named_parameters()
    }
    new = {name for name, far in moved.items() if far > 1e-5}
    assert {name for name in new if "projector" not in name} == {"top.fc2.weight", "top.fc2.bias"}


def test_devices_keep_the_statistics_too() -> None:
    settings = toy.values("semisfl", f"model.layers={toy.RESIDUAL}", "model.weights=a.pth")
    layers, _ = layers_by_cut(settings.model)
    norms = [layer for _, layer in layers if layer.kind == "batchnorm"]
    (inside,) = [
        one for _, layer in layers for one in getattr(layer, "body", ()) if one.kind == "batchnorm"
    ]
    assert inside.stored and norms[0].stored


def test_the_probe_separates_what_can_be_separated_and_sends_nothing(tmp_path: Path) -> None:
    experiment = begun("probe", weights_of_toy(tmp_path))
    first = experiment.method.round(0)
    accuracy = experiment.evaluate()["student"].accuracy
    assert accuracy > 85 and first.loss_supervised is not None and first.loss_supervised < 0.5
    labeled = experiment.method.setup.labeled  # type: ignore[attr-defined]
    logits = experiment.model.eval()(labeled.normalized(labeled.views(WEAK_VIEWS)))
    loss = F.cross_entropy(logits, labeled.labels.repeat(1 + WEAK_VIEWS))
    assert float(loss.detach()) == pytest.approx(first.loss_supervised, rel=1e-4)
    before = {name: one.clone() for name, one in experiment.model.state_dict().items()}
    experiment.method.round(1)
    toy.assert_same(before, dict(experiment.model.state_dict()))
    assert experiment.fleet.traffic.total() == 0


def test_a_run_from_weights_begins_as_their_probe(tmp_path: Path) -> None:
    weights = weights_of_toy(tmp_path)
    probe = begun("probe", weights)
    probe.method.round(0)
    images = probe.normalizer(toy.dataset().test_images)
    for method in ("semisfl", "supervised", "fedmatch"):
        model = begun(method, weights).model
        torch.testing.assert_close(model.eval()(images), probe.model.eval()(images))


@pytest.mark.parametrize("method", ["semisfl", "fedswitch-sl", "supervised"])
def test_no_run_from_weights_ends_below_their_probe(method: str, tmp_path: Path) -> None:
    weights = weights_of_toy(tmp_path)
    probe = begun("probe", weights)
    probe.method.round(0)
    run = begun(method, weights)
    for number in range(3):
        run.method.round(number)
    assert run.evaluate().popitem()[1].accuracy >= probe.evaluate()["student"].accuracy - 1


def features_of(images: int, length: int, classes: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Return features [4 views of each image, length + 1] with a constant last column, and the images' labels."""
    rng, labels = np.random.default_rng(0), torch.arange(images) % classes
    features = torch.from_numpy(rng.normal(0, 1, (images, length))).float()
    features[:, :classes] += 2 * F.one_hot(labels, classes)
    views = features + 0.5 * torch.from_numpy(rng.normal(0, 1, (4, *features.shape))).float()
    return F.pad(views.flatten(0, 1), (0, 1), value=1.0), labels


@pytest.mark.parametrize("decay", [1.0, 0.03, 0.001])
@pytest.mark.parametrize("length", [30, 300])
def test_a_fit_in_few_columns_is_the_optimum_in_all_of_them(length: int, decay: float) -> None:
    features, labels = features_of(15, length)
    labels, exact = labels.repeat(4), features.double()
    basis = span(features[:, :-1])
    assert basis.shape == (length, min(60, length))
    few = torch.cat([features[:, :-1] @ basis, features[:, -1:]], 1)
    fitted = few @ regression(few.double(), labels, decay, 3).float().T
    weight = torch.zeros(3, length + 1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], max_iter=2000, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        squares = weight[:, :-1].square().sum()
        value = F.cross_entropy(exact @ weight.T, labels) + decay / 2 * squares
        value.backward()
        return value

    optimizer.step(loss)
    best = exact @ weight.detach().T
    torch.testing.assert_close(fitted.softmax(1), best.softmax(1).float(), rtol=0, atol=1e-4)


def test_decays_are_judged_on_images_that_are_left_out() -> None:
    features, labels = features_of(60, 40)
    # Of images that a fit has seen, the weakest decay would always be the best.
    assert min(DECAYS) < best_decay(features, labels, 3) < max(DECAYS)
    nothing = torch.from_numpy(np.random.default_rng(1).normal(0, 1, (240, 41))).float()
    assert best_decay(nothing, labels, 3) > best_decay(features, labels, 3), "noise is held down"


def test_one_image_of_each_class_is_enough() -> None:
    assert best_decay(torch.eye(5)[:4], torch.arange(4), 4) == max(DECAYS)


def test_the_probe_is_compared_where_there_are_weights() -> None:
    assert "probe" not in choose_methods("all", {})
    assert "probe" in choose_methods("all", {"model": {"weights": "imagenet"}})
    assert choose_methods("probe") == ["probe"]
