"""(FL)² against cases computed by hand and plain loops."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from semisfl import seeds
from semisfl.data.positions import draw_batches
from semisfl.fleet.base import ClientResult, FullRound
from semisfl.methods.fl2.method import (
    FL2,
    FL2Work,
    adversarial,
    choose,
    sharpness_loss,
    status_shares,
)
from semisfl.runs.experiment import Experiment
from tests import toy

SETTINGS = {"confidence_threshold": 0.32}


def make(*assignments: str, **kind: bool) -> tuple[Experiment, FL2]:
    experiment = toy.assemble("fl2", *assignments, **kind)
    assert isinstance(experiment.method, FL2)
    return experiment, experiment.method


def test_a_clients_threshold_follows_its_confidences_and_classes() -> None:
    rows = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.7, 0.1], [0.1, 0.1, 0.8], [0.5, 0.3, 0.2]])
    chosen = choose(rows, 0.75)
    # T = (0.6 + 0.7 + 0.8 + 0.5) / 4; the mean prediction is (0.35, 0.35, 0.3).
    assert float(chosen.threshold) == pytest.approx(0.65)
    assert chosen.labels.tolist() == [0, 1, 2, 0]
    # Classes 0 and 1 need 0.65, class 2 needs 0.65 * 6/7.
    assert chosen.kept.tolist() == [False, True, True, False]
    assert chosen.sure.tolist() == [False, False, True, False]
    rare = choose(torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.4, 0.6]]), 0.95)
    # T = 0.8; class 1 has 0.8 / 2.2 of class 0's mean, so it needs 0.29 only.
    assert rare.kept.tolist() == [True, True, True] and not rare.sure.any()


def test_the_less_sure_client_weighs_more() -> None:
    assert status_shares([0.9, 0.6]) == pytest.approx([0.2, 0.8])
    assert status_shares([1.0, 1.0]) == pytest.approx([0.5, 0.5])


def test_agreement_is_a_divergence_of_those_beyond_doubt() -> None:
    here, moved = torch.tensor([[0.3, -0.4], [1.0, 2.0]]), torch.tensor([[0.1, 0.2], [0.0, 0.0]])
    p, q = here[0].softmax(0), moved[0].softmax(0)
    expected = sum(float(a) * math.log(float(a) / float(b)) for a, b in zip(p, q, strict=True)) / 2
    got = sharpness_loss(moved, here, torch.tensor([True, False]))
    assert float(got) == pytest.approx(expected, rel=1e-5)


def test_adversarial_weights_are_scaled_by_the_weights_sizes() -> None:
    layer = nn.Linear(1, 1)
    with torch.no_grad():
        layer.weight.fill_(-2.0)
        layer.bias.fill_(3.0)
    # loss = 5 w + 2 b: gradients 5 and 2; t = |w| + 0.5 = 2.5 for the weight, 1 for the bias.
    loss = (5 * layer.weight + 2 * layer.bias).sum()
    actual = adversarial(layer, loss, 0.1, 0.5)
    length = math.hypot(12.5, 2.0)
    assert float(actual["weight"].detach()) == pytest.approx(-2 + 0.1 * 2.5 * 12.5 / length)
    assert float(actual["bias"].detach()) == pytest.approx(3 + 0.1 * 2.0 / length)


def test_a_parameter_that_the_loss_does_not_reach_keeps_its_value() -> None:
    """A model of one's own may have one, and the other methods train such a model."""
    layer = nn.Linear(1, 1)
    actual = adversarial(layer, layer.weight.sum(), 0.1, 0.5)
    assert torch.equal(actual["bias"], layer.bias)
    assert not torch.equal(actual["weight"], layer.weight)


@pytest.mark.parametrize("batchnorm", [False, True])
def test_client_half_equals_a_plain_loop(batchnorm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("semisfl.methods.fl2.method.RHO", 0.2)
    monkeypatch.setattr("semisfl.methods.fl2.method.CLIP_NORM", 0.5)
    settings = toy.values("fl2")
    experiment, method = make(batchnorm=batchnorm)
    model, client = copy.deepcopy(method.model), 0
    plan = FullRound(1, (client,), 4, 0.1, send={"model": model.state_dict()}, settings=SETTINGS)
    (result,) = experiment.fleet.train(FL2Work(), plan)

    count = len(toy.partition(toy.dataset()).clients[client])
    weak = toy.views(settings, "weak", "predict-weak", np.arange(count)[:, None], 1, client)[:, 0]
    with torch.no_grad():
        chosen = choose(model.eval()(weak).softmax(1), 0.32)
    kept = np.flatnonzero(chosen.kept.numpy())
    assert 0 < len(kept) < count and 0 < int(chosen.sure.sum()) < count
    rng = seeds.generator(settings.seed, "batches", 1, client)
    places = kept[draw_batches(rng, len(kept), 4, 8)]
    strong = toy.views(settings, "strong", "strong", places, 1, client)
    optimizer = toy.sgd(model, settings, 0.1)
    model.train()
    for step in range(4):
        labels, sure = chosen.labels[places[step]], chosen.sure[places[step]]
        before = copy.deepcopy(model.state_dict())
        # Climb the loss of those beyond doubt.
        logits = model(strong[step])
        here = logits.detach()
        climbing = F.cross_entropy(logits[sure], labels[sure], reduction="sum")
        gradients = torch.autograd.grad(climbing, list(model.parameters()))
        steps = []
        for (name, weight), gradient in zip(model.named_parameters(), gradients, strict=True):
            size = weight.detach().abs() + 0.01 if name.endswith("weight") else 1.0
            steps.append((size, gradient * size))
        length = torch.cat([scaled.flatten() for _, scaled in steps]).norm()
        with torch.no_grad():
            for weight, (size, scaled) in zip(model.parameters(), steps, strict=True):
                weight.add_(0.2 * size * scaled / (length + 1e-12))
        there = model(strong[step]).log_softmax(1)
        divergence = (here.softmax(1) * (here.log_softmax(1) - there)).sum(1)
        sharp = torch.autograd.grad((divergence * sure).mean(), list(model.parameters()))
        # Come back, and descend both.
        running = {k: v.clone() for k, v in model.state_dict().items() if "running" in k}
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.copy_(before[name])
        optimizer.zero_grad()
        F.cross_entropy(model(strong[step]), labels).backward()
        model.load_state_dict(running, strict=False)
        for weight, extra in zip(model.parameters(), sharp, strict=True):
            assert weight.grad is not None
            weight.grad.add_(extra)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    got = {k: v for k, v in result.states["model"].items() if "num_batches" not in k}
    toy.assert_same(got, {k: v for k, v in model.state_dict().items() if k in got})
    assert result.numbers["coverage"] == pytest.approx(len(kept) / count)
    assert result.numbers["threshold"] == pytest.approx(float(chosen.threshold), rel=1e-5)


def test_aggregation_is_weighted() -> None:
    """In its first round momentum changes nothing; SemiFL's test has the rounds after it."""
    _, method = make()
    states = [
        {name: torch.randn_like(weight) for name, weight in method.model.named_parameters()}
        for _ in range(2)
    ]
    results = [
        ClientResult(client, {"model": state}, {"threshold": threshold})
        for client, (state, threshold) in enumerate(zip(states, (0.9, 0.6), strict=True))
    ]
    method._aggregate([*results, ClientResult(2, {}, {})])
    for name, weight in method.model.named_parameters():
        expected = 0.2 * states[0][name] + 0.8 * states[1][name]
        torch.testing.assert_close(weight.detach(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("rounds", "before"), [(0, [50]), (1, [])])
def test_fl2_pretrains_on_its_labels(rounds: int, before: list[int]) -> None:
    """Ten rounds' worth of supervised steps before the first clients, once, or the rounds that are set."""
    _, method = make("clients.steps=1", f"server.pretrain_rounds={rounds}")
    taken: list[int] = []
    drawn: list[tuple[int, ...]] = []
    run, labeled = method.supervised.run, method.setup.labeled

    def watch(round_index: int, steps: int, lr: float) -> float:
        taken.append(steps)
        loss = run(round_index, steps, lr)
        drawn.append(tuple(labeled._batches._plans["view1"].indices[0]))
        return loss

    method.supervised.run = watch  # type: ignore[method-assign]
    counted = [method.round(0).supervised_steps, method.round(1).supervised_steps]
    assert taken == [*before, 5, 5]
    assert len(set(drawn)) == len(drawn), "no images and views are drawn twice"
    assert counted == [5 + sum(before), 5], "bytes and hours are computed from what a round reports"
