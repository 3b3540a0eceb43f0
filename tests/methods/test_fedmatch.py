"""FedMatch against plain loops and NumPy."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from semisfl import seeds
from semisfl.data.positions import draw_batches
from semisfl.engine.host import HostShelf
from semisfl.fleet.base import ClientResult, FullRound
from semisfl.methods.fedmatch.helpers import Helpers, nearest, noise_image
from semisfl.methods.fedmatch.method import (
    FedMatch,
    FedMatchWork,
    decomposed_names,
    inter_client_loss,
    majority_labels,
    shares,
    sum_parameters,
)
from semisfl.methods.fedmatch.settings import FedMatchSettings
from semisfl.runs import checkpoint
from semisfl.runs.experiment import Experiment
from tests import toy


def make(*assignments: str, **kind: bool) -> tuple[Experiment, FedMatch]:
    experiment = toy.assemble("fedmatch", *assignments, **kind)
    assert isinstance(experiment.method, FedMatch)
    return experiment, experiment.method


def one_hot(*classes: int) -> torch.Tensor:
    return F.one_hot(torch.tensor(classes), 4).float()


def test_votes_are_counted_and_ties_go_to_the_lowest_class() -> None:
    own = one_hot(3, 3, 1, 2, 0)
    helpers = torch.stack([one_hot(2, 3, 3, 2, 3), one_hot(2, 1, 2, 0, 3)])
    expected = []
    for row in range(5):
        votes = np.zeros(4)
        for voter in (own, *helpers):
            votes[int(voter[row].argmax())] += 1
        expected.append(int(np.flatnonzero(votes == votes.max())[0]))
    assert expected == [2, 3, 1, 2, 3]
    assert majority_labels(own, helpers, torch.tensor(1.0)).tolist() == expected
    assert majority_labels(own, helpers, torch.tensor(0.0)).tolist() == own.argmax(1).tolist()
    assert majority_labels(own, helpers[:0], torch.tensor(0.0)).tolist() == own.argmax(1).tolist()


def test_inter_client_loss_is_the_mean_divergence_over_confident_rows() -> None:
    rng = np.random.default_rng(2)
    p, h1, h2 = rng.dirichlet(np.ones(4), size=(3, 5))
    confident = np.array([True, False, True, True, False])
    total = 0.0
    for row in np.flatnonzero(confident):
        for h in (h1, h2):
            total += sum(h[row, c] * np.log(h[row, c] / p[row, c]) for c in range(4)) / 2
    own, guesses = torch.from_numpy(p).log(), torch.from_numpy(np.stack([h1, h2]))
    for mean_over, rows in (("confident", 3), ("batch", 5)):
        got = inter_client_loss(own, guesses, shares(torch.from_numpy(confident), mean_over))
        assert float(got) == pytest.approx(total / rows, rel=1e-6)
        nobody = shares(torch.zeros(5, dtype=torch.bool), mean_over)
        assert float(inter_client_loss(own, guesses, nobody)) == 0


def test_the_sum_of_a_layer_that_is_used_twice_is_there_under_both_names() -> None:
    """A helper loads it over a whole upload, in which psi alone has both names."""
    layer = nn.Linear(2, 2)
    sigma = nn.Sequential(layer, nn.BatchNorm1d(2), layer)
    upload = {name: torch.full_like(value, 3) for name, value in sigma.state_dict().items()}
    helper = copy.deepcopy(sigma)
    helper.load_state_dict({**upload, **sum_parameters(sigma, upload)})
    assert torch.equal(helper[0].weight, layer.weight + 3)
    assert torch.equal(helper[1].weight, sigma[1].weight)


def test_psi_starts_as_a_share_of_sigma_and_small_entries_are_not_tested() -> None:
    _, method = make(batchnorm=True)
    for name, sigma in method.sigma.named_parameters():
        psi, theta = method.psi.get_parameter(name), method.model.get_parameter(name)
        if ".bn." in name:
            assert float(psi.abs().sum()) == 0
            torch.testing.assert_close(theta, sigma)
        else:
            torch.testing.assert_close(psi, 0.2 * sigma)
            kept = torch.where(psi.abs() <= 1e-5, 0.0, psi)
            torch.testing.assert_close(theta, sigma + kept)


def test_entries_of_psi_up_to_the_threshold_are_tested_as_zero(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only the tested model has them as zero: the clients go on with all of psi."""
    monkeypatch.setattr("semisfl.methods.fedmatch.method.THRESHOLD", 0.01)
    _, method = make(batchnorm=True)
    method.round(0)
    dropped = kept = 0
    for name in method.names:
        sigma, psi = method.sigma.get_parameter(name), method.psi.get_parameter(name)
        small = psi.abs() <= 0.01
        expected = torch.where(small, sigma, sigma + psi)
        torch.testing.assert_close(method.model.get_parameter(name), expected)
        dropped, kept = dropped + int((small & (psi != 0)).sum()), kept + int((~small).sum())
    assert dropped and kept, "the threshold must drop some entries and keep some"


def test_server_descends_sigma_alone() -> None:
    _, method = make("server.pretrain_rounds=9", "fedmatch.lambda_s=3")
    sigma, psi = copy.deepcopy(method.sigma), copy.deepcopy(method.psi)
    config, labeled = method.setup.config, method.setup.labeled
    lr = method.round(0).learning_rate
    toy.assert_same(method.psi.state_dict(), psi.state_dict())
    optimizer = toy.sgd(sigma, config, lr)
    labeled.start(0, config.server.steps, "weak", views=1)
    for _ in range(config.server.steps):
        images, (labels, *_) = labeled.next()
        theta = {name: p + psi.get_parameter(name) for name, p in sigma.named_parameters()}
        optimizer.zero_grad()
        (3 * F.cross_entropy(functional_call(sigma, theta, images), labels)).backward()
        optimizer.step()
    toy.assert_same(method.sigma.state_dict(), sigma.state_dict())


@pytest.mark.parametrize("batchnorm", [False, True])
@pytest.mark.parametrize("helped", [False, True])
@pytest.mark.parametrize("mean_over", ["batch", "confident"])
def test_client_half_equals_a_plain_loop(batchnorm: bool, helped: bool, mean_over: str) -> None:
    settings = toy.values("fedmatch")
    experiment, method = make(batchnorm=batchnorm)
    sigma, psi = copy.deepcopy(method.sigma), copy.deepcopy(method.psi).requires_grad_(True)
    uploads = []
    for scale in (-3.0, 4.0):
        upload = copy.deepcopy(psi.state_dict())
        for name in decomposed_names(psi):
            upload[name] = upload[name].roll(1) * scale
        uploads.append(upload)
    weights = {
        "lambda_a": 0.7,
        "lambda_i": 0.4,
        "lambda_l2": 0.02,
        "lambda_l1": 1e-3,
        "confidence_threshold": 0.32,
        "mean_over": mean_over,
    }
    helpers = {f"helper{place}": upload for place, upload in enumerate(uploads)}
    plan = FullRound(
        3,
        (0, 1),
        4,
        0.1,
        send={"sigma": sigma.state_dict(), "psi": psi.state_dict()},
        send_to={1: helpers} if helped else {},
        settings={**settings.fedmatch.model_dump(), **weights},
    )
    result = experiment.fleet.train(FedMatchWork(), plan)[1]

    helper_models = []
    for upload in uploads:
        helper = copy.deepcopy(sigma)
        with torch.no_grad():
            for name in decomposed_names(psi):
                helper.get_parameter(name).add_(upload[name])
        helper_models.append(helper.eval())
    count = len(toy.partition(toy.dataset()).clients[1])
    rng = seeds.generator(settings.seed, "batches", 3, 1)
    places = draw_batches(rng, count, 4, 8)
    plain = toy.views(settings, "plain", "plain", places, 3, 1)
    strong = toy.views(settings, "strong", "strong", places, 3, 1)
    optimizer = toy.sgd(psi, settings, 0.1)
    kept = 0
    for step in range(4):
        theta = {
            name: s.detach() + psi.get_parameter(name)
            if name in decomposed_names(psi)
            else s.detach()
            for name, s in sigma.named_parameters()
        }
        p = functional_call(psi.eval(), theta, plain[step]).softmax(1)
        guesses = [helper(plain[step]).softmax(1).detach() for helper in helper_models]
        psi.train()
        logits = functional_call(psi, theta, strong[step])
        rows, loss = [], torch.zeros(())
        for row in range(8):
            if p[row].max().item() < 0.32:
                continue
            kept += 1
            votes = [0] * 4
            votes[int(p[row].argmax())] += 1
            value = torch.zeros(())
            if helped:
                for guess in guesses:
                    votes[int(guess[row].argmax())] += 1
                    value = value + 0.4 * (guess[row] * (guess[row] / p[row]).log()).sum() / 2
            label = torch.tensor([votes.index(max(votes))])
            rows.append(value + 0.7 * F.cross_entropy(logits[row : row + 1], label))
        if rows:
            loss = loss + torch.stack(rows).sum() / (8 if mean_over == "batch" else len(rows))
        for name in decomposed_names(psi):
            entry = psi.get_parameter(name)
            loss = loss + 0.02 * (sigma.get_parameter(name).detach() - entry).square().sum()
            loss = loss + 1e-3 * entry.abs().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert 0 < kept < 32, "the threshold must keep some images and drop some"
    assert result.numbers["coverage"] == pytest.approx(kept / 32)
    toy.assert_same(dict(result.states["psi"]), psi.state_dict())


def overflowing(psi: nn.Module) -> dict[str, torch.Tensor]:
    """Return an upload whose model answers NaN, as one with running variances of 0 in a deep model does."""
    return {name: torch.full_like(value, 1e30) for name, value in psi.state_dict().items()}


def test_a_helper_that_answers_nan_harms_no_client() -> None:
    experiment, method = make("fedmatch.confidence_threshold=0")
    psi = method.psi.state_dict()
    plan = FullRound(
        *(3, (0, 1), 2, 0.1),
        send={"sigma": method.sigma.state_dict(), "psi": psi},
        send_to={1: {"helper0": overflowing(method.psi), "helper1": psi}},
        settings=experiment.config.settings(FedMatchSettings).model_dump(),
    )
    result = experiment.fleet.train(FedMatchWork(), plan)[1]
    assert all(value.isfinite().all() for value in result.states["psi"].values())
    assert np.isfinite(result.numbers["loss"])


def test_a_model_that_answers_nan_becomes_no_helper() -> None:
    """Its embedding would keep every later checkpoint from being written."""
    _, method = make()
    psi = method.psi.state_dict()
    states = {0: psi, 1: psi, 2: overflowing(method.psi)}
    results = [ClientResult(client, {"psi": state}, {}) for client, state in states.items()]
    method._aggregate(0, results)
    assert sorted(method.helpers.state_dict()["embeddings"]) == ["0", "1"]
    assert checkpoint.finite(method.helpers.state_dict())


def test_regularisers_act_without_a_confident_image() -> None:
    experiment, method = make("fedmatch.confidence_threshold=1", "optimizer.weight_decay=0")
    before = copy.deepcopy(method.psi.state_dict())
    method.round(0)
    assert float((method.psi.state_dict()["top.fc1.weight"] - before["top.fc1.weight"]).abs().max())
    assert experiment.fleet.traffic.total() > 0


def test_psi_becomes_the_mean_of_the_uploads() -> None:
    _, method = make(batchnorm=True)
    rounds = toy.watched(method.setup.fleet)
    method.round(0)
    (results,) = (one.results for one in rounds)
    for name, value in method.psi.state_dict().items():
        expected = torch.stack([result.states["psi"][name].double() for result in results]).mean(0)
        torch.testing.assert_close(value.double(), expected.to(value.dtype).double())
    for name, buffer in method.model.named_buffers():
        torch.testing.assert_close(buffer, method.psi.state_dict()[name])


# --- helpers --------------------------------------------------------------------------------------


def test_nearest_are_those_a_kd_tree_finds() -> None:
    spatial = pytest.importorskip("scipy.spatial")
    points = np.random.default_rng(4).dirichlet(np.ones(10), size=40)
    tree = spatial.KDTree(points)
    embeddings = {client: torch.from_numpy(point) for client, point in enumerate(points)}
    for client in range(40):
        _, actual = tree.query(points[client], k=3)
        assert nearest(embeddings, client, 2) == [c for c in actual.tolist() if c != client][:2]
    assert nearest({0: torch.zeros(2), 1: torch.ones(2)}, 0, 2) == []


def test_the_noise_image_is_a_truncated_gaussian() -> None:
    stats = pytest.importorskip("scipy.stats")
    image = noise_image((3, 80, 80), seeds.generator(0, "noise")).float()
    expected = stats.truncnorm(-1, (255 - 125) / 125, loc=125, scale=125)
    assert float(image.mean()) == pytest.approx(expected.mean() - 0.5, abs=3)
    assert float(image.std()) == pytest.approx(expected.std(), abs=3)


def test_clients_are_known_by_what_their_upload_makes_of_the_noise_image() -> None:
    """sigma of this round and the client's own psi, in eval mode, on noise as a model takes it."""
    experiment, method = make("clients.active=3", "optimizer.lr=0.2", batchnorm=True)
    rounds = toy.watched(method.setup.fleet)
    method.round(0)
    image = noise_image((3, 12, 12), seeds.generator(experiment.config.seed, "noise"))
    pixels = (image.float() / 255 - 0.5) / 0.5  # the toy set's mean and deviation
    embeddings = method.helpers.state_dict()["embeddings"]
    assert sorted(embeddings) == ["0", "1", "2"]
    (results,) = (one.results for one in rounds)
    for client, upload in [(result.client, result.states["psi"]) for result in results]:
        theta = {
            name: value + upload[name] if name in method.names else value
            for name, value in method.sigma.named_parameters()
        }
        buffers = {name: upload[name] for name, _ in method.model.named_buffers()}
        with torch.no_grad():
            model = copy.deepcopy(method.sigma).eval()
            expected = functional_call(model, {**theta, **buffers}, pixels).softmax(1)[0]
        torch.testing.assert_close(embeddings[str(client)], expected, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(embeddings["0"], embeddings["1"], atol=1e-4)


def test_an_upload_is_kept_while_it_is_needed() -> None:
    helpers = Helpers(HostShelf(torch.device("cpu")))
    for client in range(3):
        helpers.remember(client, 0, {"w": torch.full((1,), float(client))}, torch.eye(3)[client])
    helpers.choose([0, 7], 2)
    assert {name: float(s["w"]) for name, s in helpers.of(0).items()} == {
        "helper0": 1,
        "helper1": 2,
    }
    assert helpers.of(7) == {}
    helpers.remember(1, 1, {"w": torch.full((1,), 9.0)}, torch.eye(3)[1])
    assert float(helpers.of(0)["helper0"]["w"]) == 1, "client 0 still holds the old one"
    helpers.choose([0], 2)
    helpers.remember(2, 2, {"w": torch.full((1,), 8.0)}, torch.eye(3)[2])
    copy_ = Helpers(HostShelf(torch.device("cpu")))
    copy_.load_state_dict(helpers.state_dict())
    assert sorted(helpers.state_dict()["shelf"]) == ["0@0", "1@1", "2@0", "2@2"]
    assert float(copy_.of(0)["helper0"]["w"]) == 9


def test_the_upload_of_a_client_that_was_removed_or_shut_out_helps_nobody() -> None:
    helpers = Helpers(HostShelf(torch.device("cpu")))
    for client in range(5):
        helpers.remember(client, 0, {"w": torch.full((1,), float(client))}, torch.eye(5)[client])
    helpers.choose([0, 1, 2], 2)
    assert [float(state["w"]) for state in helpers.of(2).values()] == [0, 1]
    helpers.keep(dict.fromkeys([0, 2, 3, 4], "name"))
    assert helpers.of(0) == helpers.of(2) == {}, "they had it as a helper"
    helpers.choose([0, 1, 2], 2)
    assert [float(state["w"]) for state in helpers.of(2).values()] == [0, 3]
    assert helpers.of(1) == {}
    helpers.remember(1, 1, {"w": torch.full((1,), 9.0)}, torch.eye(5)[1])
    assert "1@0" not in helpers.state_dict()["shelf"]


def test_the_upload_of_a_client_whose_place_another_has_taken_helps_nobody() -> None:
    helpers = Helpers(HostShelf(torch.device("cpu")))
    names = {client: f"camera-{client}" for client in range(4)}
    helpers.keep(names)
    for client in range(4):
        helpers.remember(client, 0, {"w": torch.full((1,), float(client))}, torch.eye(4)[client])
    restored = Helpers(HostShelf(torch.device("cpu")))
    restored.load_state_dict(helpers.state_dict())
    for memory in (helpers, restored):
        memory.keep(names | {0: "another"})
        memory.choose([0, 1], 2)
        assert [float(state["w"]) for state in memory.of(1).values()] == [2, 3]
        assert memory.of(0) == {}
        memory.remember(0, 1, {"w": torch.full((1,), 9.0)}, torch.eye(4)[0])
        memory.keep(names | {0: "another"})
        memory.choose([1], 2)
        assert float(memory.of(1)["helper0"]["w"]) == 9


def test_remembering_a_round_copies_no_upload_that_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("semisfl.methods.fedmatch.method.REFRESH", 1)
    _, method = make()
    for index in range(2):
        method.round(index)
    state = method.state_dict()
    before = checkpoint.snapshot(state)
    shelf, kept = (one["helpers"]["shelf"] for one in (state, before))
    assert kept and all(kept[name] is shelf[name] for name in kept)
    digest = checkpoint.digest(before)
    method.round(2)
    assert checkpoint.digest(before) == digest != checkpoint.digest(method.state_dict())
    method.load_state_dict(before)
    assert checkpoint.digest(method.state_dict()) == digest


@pytest.mark.parametrize("keep", [True, False])
def test_helpers_come_with_a_refresh_and_stay(keep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three clients, all active: known after round 0, helped in round 1, and in round 2 if kept."""
    monkeypatch.setattr("semisfl.methods.fedmatch.method.REFRESH", 2)
    experiment, method = make("clients.active=3", f"fedmatch.keep_helpers={str(keep).lower()}")
    rounds = toy.watched(method.setup.fleet)
    sizes = []
    for round_index in range(3):
        before = experiment.fleet.traffic.by_kind().get("model_down", 0)
        method.round(round_index)
        sizes.append(experiment.fleet.traffic.by_kind()["model_down"] - before)
    assert sizes[1] == 2 * sizes[0]  # 2S and J = 2 helpers
    assert sizes[2] == sizes[0]
    assert sorted(rounds[1].plan.send_to[0]) == ["helper0", "helper1"]
    assert bool(rounds[2].plan.held[0]) is keep


@pytest.mark.parametrize("rule", ["mean", "clipped_mean"])
def test_a_model_that_is_far_from_all_others_helps_nobody(rule: str) -> None:
    _, method = make("clients.active=3", f"robust.aggregate={rule}")
    sent = {**method.psi.state_dict(), **dict(method.model.named_buffers())}
    results = [
        ClientResult(
            client,
            {"psi": {k: v * (9 if client == 1 else 1) + 0.01 * client for k, v in sent.items()}},
            {},
        )
        for client in range(3)
    ]
    method._aggregate(0, results)
    assert sorted(method.helpers._embeddings) == ([0, 1, 2] if rule == "mean" else [0, 2])
