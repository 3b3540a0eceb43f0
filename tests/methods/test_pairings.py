"""Test that methods keep images, labels, buffers, limits and warm-up paired."""

from typing import Any

import numpy as np
import pytest
import torch

from semisfl.fleet.base import ClientRuntime, ClientWork, FullRound
from semisfl.methods.fedmatch.method import FedMatch
from semisfl.methods.semifl.method import SemiFL, SemiFLWork
from semisfl.methods.semisfl import SemiSFL
from tests import toy


def test_semifl_mixes_images_with_their_own_labels() -> None:
    labels: dict[str, torch.Tensor] = {}
    indices: dict[str, np.ndarray] = {}

    class Watched(SemiFLWork):
        def start(self, client: ClientRuntime) -> bool:
            set_buffer, draw_view = client.set_buffer, client.draw_view

            def watch_labels(name: str, tensor: torch.Tensor) -> None:
                labels[name] = tensor
                set_buffer(name, tensor)

            def watch_images(name: str, view: Any, rows: np.ndarray) -> None:
                indices[name] = rows
                draw_view(name, view, rows)

            # Neighbouring images have different labels, all of them confident.
            predicted = torch.eye(toy.CLASSES)[torch.arange(client.count) % toy.CLASSES]
            client.predict = lambda *_: predicted  # type: ignore[method-assign]
            client.set_buffer, client.draw_view = watch_labels, watch_images  # type: ignore[method-assign]
            return super().start(client)

    experiment = toy.assemble("semifl")
    assert isinstance(experiment.method, SemiFL)
    settings = {"confidence_threshold": 0.5}
    state = experiment.method.model.state_dict()
    experiment.fleet.train(
        Watched(), FullRound(0, (0,), 3, 0.1, send={"model": state}, settings=settings)
    )
    for pool in ("fix", "mix"):
        assert labels[f"labels_{pool}"].tolist() == (indices[f"weak_{pool}"] % toy.CLASSES).tolist()
    assert not np.array_equal(indices["weak_fix"], indices["weak_mix"])


def test_semifls_server_clips_its_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = []
    for limit in (1e-6, 1e6):
        monkeypatch.setattr("semisfl.methods.semifl.method.CLIP_NORM", limit)
        method: Any = toy.assemble("semifl", "optimizer.weight_decay=0").method
        before = [parameter.detach().clone() for parameter in method.model.parameters()]
        method.supervised.run(0, 5, 0.1)
        after = method.model.parameters()
        moved.append(
            sum(float((a - b).detach().norm()) for a, b in zip(after, before, strict=True))
        )
    # Each step moves by at most lr * limit / (1 - momentum).
    assert moved[0] < 5e-5 < 1e-2 < moved[1]


def test_fedmatchs_clients_are_sent_the_buffers_of_the_trained_model() -> None:
    experiment = toy.assemble("fedmatch", batchnorm=True)
    method, train = experiment.method, experiment.fleet.train
    assert isinstance(method, FedMatch)
    seen = 0

    def watch(work: ClientWork, plan: FullRound) -> Any:
        nonlocal seen
        for name, buffer in method.model.named_buffers():
            for part in (method.sigma, method.psi):
                assert not torch.equal(part.get_buffer(name), buffer), "the server has trained"
            for sent in ("sigma", "psi"):
                assert torch.equal(plan.send[sent][name], buffer), (sent, name)
            seen += 1
        return train(work, plan)

    experiment.fleet.train = watch  # type: ignore[method-assign]
    method.round(0)
    assert seen == 3


def test_semisfls_queue_has_few_positives_of_one_client(monkeypatch: pytest.MonkeyPatch) -> None:
    share = 0.2
    monkeypatch.setattr("semisfl.methods.influence.LEAST_AGREEMENT", 0.0)
    experiment = toy.assemble(
        "semisfl",
        "clients.active=3",
        "semisfl.confidence_threshold=0",
        "robust.features=limited",
        f"robust.class_share={share}",
    )
    method = experiment.method
    assert isinstance(method, SemiSFL)
    pushed: list[tuple[torch.Tensor, torch.Tensor]] = []
    push = method.queue.push_pseudo

    def watch(keys: torch.Tensor, labels: torch.Tensor, positives: torch.Tensor) -> Any:
        pushed.append((labels.view(3, -1), positives.view(3, -1)))
        return push(keys, labels, positives)

    method.queue.push_pseudo = watch  # type: ignore[method-assign]
    method.round(0)
    assert len(pushed) == 4
    for labels, positives in pushed:
        assert not bool(positives.all())
        for label in labels.unique():
            counts = (labels == label).sum(1)
            allowed = ((counts.sum() - counts) * share / (1 - share)).clamp(min=1)
            used = ((labels == label) & positives).sum(1)
            assert bool((used <= allowed).all()) and int(used.sum()) > 0


@pytest.mark.parametrize("method", ["semisfl", "fedswitch-sl", "fedswitch"])
def test_a_threshold_by_classes_is_the_one_for_the_images_classes(method: str) -> None:
    section = "semisfl" if method == "semisfl" else "fedswitch"
    shares = []
    for threshold in ("by_classes", "0.675", "0.5"):
        trained = toy.assemble(
            method, f"{section}.confidence_threshold={threshold}", "optimizer.lr=0.2"
        ).method
        rows = [trained.round(index) for index in range(3)]
        shares.append([row.mask_rate for row in rows])
    by_classes, same, other = shares
    assert by_classes == same != other
