"""SemiFL against plain loops."""

import copy
from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from semisfl import seeds
from semisfl.data.partition import Partition
from semisfl.data.positions import draw_batches
from semisfl.fleet.base import ClientResult, ClientWork, FullRound, draw_active
from semisfl.methods.semifl.method import SemiFL, SemiFLWork, mix, semifl_losses
from semisfl.methods.semifl.static_batchnorm import (
    combine_statistics,
    recompute_statistics,
    statistics_of,
)
from semisfl.runs.experiment import Experiment, assemble
from tests import toy


def make(*assignments: str, **kind: bool) -> tuple[Experiment, SemiFL]:
    experiment = toy.assemble("semifl", *assignments, **kind)
    assert isinstance(experiment.method, SemiFL)
    return experiment, experiment.method


def cross_entropy(logits: np.ndarray, labels: np.ndarray) -> float:
    rows = logits - logits.max(1, keepdims=True)
    logs = rows - np.log(np.exp(rows).sum(1, keepdims=True))
    return float(-logs[np.arange(len(labels)), labels].mean())


def test_loss_is_the_sum_of_three_cross_entropies() -> None:
    rng = np.random.default_rng(0)
    strong, mixed = rng.normal(size=(2, 6, 4))
    labels, others = rng.integers(0, 4, size=(2, 6))
    weight = 0.3
    mixing = weight * cross_entropy(mixed, labels) + (1 - weight) * cross_entropy(mixed, others)
    got = semifl_losses(
        *(torch.from_numpy(value) for value in (strong, mixed, labels, others)),
        torch.tensor(weight),
    )
    assert [float(loss) for loss in got] == pytest.approx(
        [cross_entropy(strong, labels), mixing], rel=1e-6
    )


def test_mixing_weights_the_fixed_image() -> None:
    a, b = torch.full((2, 1, 1, 1), 10.0), torch.full((2, 1, 1, 1), 20.0)
    assert mix(a, b, torch.tensor(0.25)).flatten().tolist() == [17.5, 17.5]


def settings_for(threshold: float) -> dict[str, float]:
    return {"confidence_threshold": threshold}


@pytest.mark.parametrize("batchnorm", [False, True])
def test_client_half_equals_a_plain_loop(batchnorm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("semisfl.methods.semifl.method.CLIP_NORM", 0.5)
    settings = toy.values("semifl")
    experiment, method = make(batchnorm=batchnorm)
    model = copy.deepcopy(method.model)
    client, threshold = 0, 0.32
    plan = FullRound(
        1, (client,), 4, 0.1, send={"model": model.state_dict()}, settings=settings_for(threshold)
    )
    (result,) = experiment.fleet.train(SemiFLWork(), plan)

    count = len(toy.partition(toy.dataset()).clients[client])
    weak = toy.views(settings, "weak", "predict-weak", np.arange(count)[:, None], 1, client)[:, 0]
    with torch.no_grad():
        confidence, labels = model.eval()(weak).softmax(1).max(1)
    kept = np.flatnonzero(confidence.numpy() >= threshold)
    assert 0 < len(kept) < count, "the threshold must keep some images and drop some"
    rng = seeds.generator(settings.seed, "batches", 1, client)
    fix = kept[draw_batches(rng, len(kept), 4, 8)]
    pool = rng.integers(count, size=len(kept))
    other = pool[draw_batches(rng, len(pool), 4, 8)]
    weights = rng.beta(0.75, 0.75, size=4)
    assert set(fix.flatten()) <= set(kept)
    strong = toy.views(settings, "strong", "strong", fix, 1, client)
    weak_fix = toy.views(settings, "weak", "weak_fix", fix, 1, client)
    weak_mix = toy.views(settings, "weak", "weak_mix", other, 1, client)
    optimizer = toy.sgd(model, settings, 0.1)
    model.train()
    for step in range(4):
        weight = float(weights[step])
        one, two = labels[fix[step]], labels[other[step]]
        mixed = weight * weak_fix[step] + (1 - weight) * weak_mix[step]
        loss = F.cross_entropy(model(strong[step]), one)
        logits = model(mixed)
        loss = loss + weight * F.cross_entropy(logits, one)
        loss = loss + (1 - weight) * F.cross_entropy(logits, two)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    toy.assert_same(dict(result.states["model"]), model.state_dict())
    assert result.numbers["coverage"] == pytest.approx(len(kept) / count)


def test_a_client_without_a_confident_image_is_left_out() -> None:
    experiment, method = make("clients.active=3")
    state = method.model.state_dict()
    count = {c: len(shard) for c, shard in enumerate(toy.partition(toy.dataset()).clients)}
    best = {}
    for client in count:
        places = np.arange(count[client])[:, None]
        weak = toy.views(experiment.config, "weak", "predict-weak", places, 0, client)[:, 0]
        with torch.no_grad():
            best[client] = float(method.model.eval()(weak).softmax(1).max())
    order = sorted(best, key=lambda client: best[client])
    threshold = (best[order[0]] + best[order[1]]) / 2
    plan = FullRound(0, (0, 1, 2), 2, 0.1, send={"model": state}, settings=settings_for(threshold))
    results = experiment.fleet.train(SemiFLWork(), plan)
    assert [result.client for result in results if not result.states] == [order[0]]
    size = sum(value.numel() * value.element_size() for value in state.values())
    assert experiment.fleet.traffic.by_kind() == {"model_down": 3 * size, "model_up": 2 * size}
    # Nobody confident: the model is as the server's fine-tuning alone makes it.
    _, alone = make("semifl.confidence_threshold=1")
    row = alone.round(0)
    assert row.contributing == 0
    assert all(float(velocity.abs().sum()) == 0 for velocity in alone.velocity)


def test_aggregation_has_momentum() -> None:
    _, method = make()
    names = [name for name, _ in method.model.named_parameters()]
    w = {name: p.detach().numpy().copy() for name, p in method.model.named_parameters()}
    v = {name: np.zeros_like(value) for name, value in w.items()}
    rng = np.random.default_rng(3)
    for _ in range(3):
        uploads = [{n: rng.normal(size=w[n].shape).astype(np.float32) for n in names} for _ in "ab"]
        states = [{n: torch.from_numpy(u[n]) for n in names} for u in uploads]
        method._aggregate([ClientResult(c, {"model": s}, {}) for c, s in enumerate(states)])
        for name in names:
            g = w[name] - (uploads[0][name] + uploads[1][name]) / 2
            v[name] = 0.5 * v[name] + g
            w[name] = w[name] - v[name]
    for name, parameter in method.model.named_parameters():
        np.testing.assert_allclose(parameter.detach().numpy(), w[name], rtol=1e-4, atol=1e-6)


def test_statistics_of_two_holders_combine_to_those_of_all_batches() -> None:
    model = toy.network(batchnorm=True)
    batches = list(torch.randn(5, 7, 3, 12, 12, generator=torch.Generator().manual_seed(1)))
    activations = [model.get_submodule("conv")(batch).detach().double() for batch in batches]
    mean = torch.stack([a.mean((0, 2, 3)) for a in activations]).mean(0)
    variance = torch.stack([a.transpose(0, 1).flatten(1).var(1) for a in activations]).mean(0)
    parts = []
    for share in (batches[:2], batches[2:]):
        count = recompute_statistics(model, share)
        parts.append(({k: v.clone() for k, v in statistics_of(model).items()}, float(count)))
    both = combine_statistics(parts)
    torch.testing.assert_close(both["bn.running_mean"].double(), mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(both["bn.running_var"].double(), variance, rtol=1e-5, atol=1e-6)
    assert int(both["bn.num_batches_tracked"]) == 5
    recompute_statistics(model, batches)
    toy.assert_same(both, statistics_of(model))
    assert model.get_submodule("bn").momentum == 0.1


def flat_network() -> nn.Sequential:
    """Return a model with BatchNorm of single values, not of pixels: one image has no deviation."""
    return nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(),
            fc1=nn.Linear(3 * 12 * 12, 6),
            bn=nn.BatchNorm1d(6),
            relu=nn.ReLU(),
            fc2=nn.Linear(6, toy.CLASSES),
        )
    )


@pytest.mark.parametrize("sizes", [(5, 4, 1), (5, 1), (1, 5), (6, 4)])
def test_an_image_left_over_joins_a_batch_and_is_counted(sizes: tuple[int, ...]) -> None:
    model = flat_network()
    images = torch.randn(sum(sizes), 3, 12, 12, generator=torch.Generator().manual_seed(2))
    count = recompute_statistics(model, images.split(sizes))
    joined = {(5, 4, 1): (5, 5), (5, 1): (6,), (1, 5): (6,), (6, 4): (6, 4)}[sizes]
    values = [model[:2](part).detach().double() for part in images.split(joined)]
    mean = torch.stack([part.mean(0) for part in values]).mean(0)
    variance = torch.stack([part.var(0) for part in values]).mean(0)
    actual = statistics_of(model)
    assert count == len(joined) == int(actual["bn.num_batches_tracked"])
    torch.testing.assert_close(actual["bn.running_mean"].double(), mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(actual["bn.running_var"].double(), variance, rtol=1e-5, atol=1e-6)


def test_the_only_image_of_a_client_has_finite_statistics() -> None:
    model = flat_network()
    image = torch.randn(1, 3, 12, 12, generator=torch.Generator().manual_seed(3))
    assert recompute_statistics(model, [image]) == 1
    actual = statistics_of(model)
    torch.testing.assert_close(actual["bn.running_mean"], model[:2](image)[0].detach())
    assert actual["bn.running_var"].tolist() == [0.0] * 6


def test_a_round_whose_clients_have_an_image_left_over() -> None:
    """251 images: a batch of 250 and one alone, with BatchNorm after a linear layer."""
    data = toy.dataset(count=16 + 251 + 2)
    rest = np.arange(16, len(data.images))
    shards = Partition(np.arange(16), (rest[:251], rest[251:252], rest[252:]))
    settings = toy.values(
        "semifl", "clients.active=3", "semifl.confidence_threshold=0", "model.cut=fc1"
    )
    method = assemble(settings, data, shards, flat_network(), device="cpu").method
    row = method.round(0)
    assert row.contributing == 3
    (model,) = method.tested().values()
    actual = statistics_of(model)
    assert all(bool(value.isfinite().all()) for value in actual.values()) and len(actual) == 3


def test_tested_statistics_are_those_of_the_server_and_the_coming_clients() -> None:
    experiment, method = make(batchnorm=True)
    method.round(0)
    data, part = toy.dataset(), toy.partition(toy.dataset())
    coming = draw_active(experiment.config.seed, 1, 3, range(3), 2)
    fresh = copy.deepcopy(method.model)
    owners = [part.labeled, *(part.clients[client] for client in coming)]
    batches = [experiment.normalizer(data.images[torch.from_numpy(owner)]) for owner in owners]
    recompute_statistics(fresh, batches)
    toy.assert_same(statistics_of(method.model), statistics_of(fresh))


def lying(experiment: Experiment, liar: int) -> None:
    """Let one client report statistics nine times its own, of a million batches."""
    honest = experiment.fleet.train

    def train(work: ClientWork, plan: FullRound) -> list[ClientResult]:
        return [
            replace(
                result,
                states={"statistics": {k: 9 * v for k, v in result.states["statistics"].items()}},
                numbers={"batches": 1e6},
            )
            if work.name == "batchnorm-statistics" and result.client == liar
            else result
            for result in honest(work, plan)
        ]

    experiment.fleet.train = train  # type: ignore[method-assign]


def test_limited_statistics_weigh_as_much_as_unlimited_ones() -> None:
    """Here every client and the server have one batch."""
    actual = []
    for rule in ("robust.aggregate=mean", "robust.aggregate=clipped_mean"):
        wide = "robust.clipped_mean.limit=1e6"
        _, method = make("clients.active=3", rule, wide, batchnorm=True)
        method._recompute_statistics(0, (0, 1, 2))
        actual.append(statistics_of(method.model))
    running = [name for name in actual[0] if "running" in name]
    assert len(running) == 2
    for name in running:
        torch.testing.assert_close(actual[1][name], actual[0][name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", ["mean", "clipped_mean", "median"])
def test_one_client_s_statistics_are_limited_as_its_weights_are(rule: str) -> None:
    actual = {}
    for liar in (None, 1):
        experiment, method = make("clients.active=3", f"robust.aggregate={rule}", batchnorm=True)
        if liar is not None:
            lying(experiment, liar)
        method._recompute_statistics(0, (0, 1, 2))
        actual[liar] = statistics_of(method.model)
        held_back = experiment.fleet.held_back.take() or {}
        assert ("1" in held_back) == (liar is not None and rule != "mean")
    times = [
        float(actual[1][name].norm() / value.norm())
        for name, value in actual[None].items()
        if value.is_floating_point()
    ]
    if rule == "mean":
        assert max(times) > 5, "the attack works"
    else:
        assert max(times) < 1.5
