"""The bottom that goes back, against a server that wants the images in it, over the network."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from semisfl.attacks.uploads import count_rebuilt
from semisfl.data.augment import Augmentation
from semisfl.fleet.base import RoundAborted, SplitRound
from semisfl.net.client.agreement import check_gradients
from semisfl.net.client.rejection import Rejected
from semisfl.net.frames import Frame
from semisfl.settings.policy import DevicePolicy, PolicyBreach
from tests.net.harness import SIDE, Network, network, tiny, toy_data

LAYERS = [
    *({"kind": "flatten"}, {"kind": "linear", "features": 64}, {"kind": "relu"}),
    {"kind": "linear"},
]
IMAGES = 12
NOISY = DevicePolicy(clip=30.0, noise=0.14, update_clip=0.3, update_noise=0.03)
CAPPED = NOISY.model_copy(update={"bits_per_image": 1000.0})


@pytest.fixture
def net(monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    monkeypatch.setattr(
        Augmentation, "of", lambda _: Augmentation(False, pad=0, num_ops=0, cutout=0)
    )
    config = tiny(
        1,
        model={"layers": LAYERS, "cut": 3, "projector": "linear"},
        clients={"batch": IMAGES, "steps": 1},
    )
    made = Network(config, *toy_data(1))
    yield made
    made.close()


def attacked(net: Network, policy: DevicePolicy, length: float = 1.0) -> Tensor:
    """Send a bottom of zeros and the gradient e_i for row i; return the weight that comes back."""
    net.enrol(0, policy=policy)
    bottom: Any = net.experiment.method.student.bottom  # type: ignore[attr-defined]
    state = {name: torch.zeros_like(tensor) for name, tensor in bottom.state_dict().items()}
    (weight,) = (name for name, tensor in state.items() if tensor.dim() == 2)
    state[weight.replace("weight", "bias")] += 1.0  # the ReLU lets all gradients through
    net.fleet.start_round(SplitRound(0, (0,), 1, 0.02, state, state))
    features = net.fleet.forward()
    net.fleet.backward(-length * torch.eye(IMAGES, features.student.shape[1]))
    return net.fleet.finish_round()[weight][:IMAGES]


def images_in(net: Network, weight: Tensor) -> int:
    """Return how many of the device's images a row of the weight shows."""
    held = net.data.images[net.partition.clients[0]].float().flatten(1)
    likeness = torch.corrcoef(torch.cat((weight, held)))[:IMAGES, IMAGES:]
    return count_rebuilt(weight, held[likeness.argmax(1)])[0]


def test_without_a_policy_every_image_is_a_row_of_the_upload(net: Network) -> None:
    assert images_in(net, attacked(net, DevicePolicy())) == IMAGES


def test_a_policy_with_noise_shows_no_image(net: Network) -> None:
    assert images_in(net, attacked(net, NOISY)) == 0


def aim(net: Network, policy: DevicePolicy, rounds: int) -> list[float]:
    """Read an image by uploads alone, as a server that aims does; return the largest error after each round.

    The first layer gives s (x - estimate / 12) of each image x, the second gives features of 0 and has the
    gradient G for its first one. So the first row of its update is G s times the difference between the sum of the
    device's 12 images and the estimate of that sum: the next estimate adds what the noisy upload shows of it. The
    scale s fills the clip. The other 11 images are black, so their sum shows the first one.
    """
    client = net.enrol(0, policy=policy)
    lr, pixels = 0.02, net.data.images[0].numel()
    assert policy.update_clip is not None
    bottom: Any = net.experiment.method.student.bottom  # type: ignore[attr-defined]
    names = list(bottom.state_dict())
    target = -torch.ones(IMAGES, pixels)  # black pixels, as they are normalised
    target[0] = net.data.images[net.partition.clients[0][0]].flatten() / 127.5 - 1
    truth, estimate = target.sum(0), target[1:].sum(0)
    length, errors = pixels**0.5, []
    for index in range(rounds):
        state = {name: torch.zeros_like(tensor) for name, tensor in bottom.state_dict().items()}
        scale = policy.update_clip / (lr * G * length)
        state[names[0]] = scale * torch.eye(pixels)
        state[names[1]] = -scale * estimate / IMAGES
        net.fleet.start_round(SplitRound(index, (0,), 1, lr, state, state))
        features = net.fleet.forward().student
        net.fleet.backward(G * torch.eye(1, features.shape[1]).repeat(IMAGES, 1))
        uploaded = net.fleet.finish_round()[names[2]][0]
        estimate = estimate - SHARE * uploaded / (lr * G * scale)
        errors.append(float((estimate - truth).abs().max()) / 2)
        length *= SHRINKS
    assert client.error is None
    return errors


G = 0.01
"""Small, so that the second layer's bias takes little of the clip."""
SHARE, SHRINKS = 0.8, 0.5
"""Of a difference that an upload shows, the part that is added; and how much smaller the next one is expected."""


def aimed(monkeypatch: pytest.MonkeyPatch) -> Network:
    """Return a run whose device holds one image and 11 black ones, without augmentation."""
    monkeypatch.setattr(
        Augmentation, "of", lambda _: Augmentation(False, pad=0, num_ops=0, cutout=0)
    )
    layers = [{"kind": "flatten"}, {"kind": "linear", "features": SIDE * SIDE}]
    layers += [{"kind": "linear", "features": 8}, {"kind": "relu"}, {"kind": "linear"}]
    config = tiny(
        1,
        rounds=12,
        model={"layers": layers, "cut": 3, "projector": "linear"},
        clients={"batch": IMAGES, "steps": 1},
        optimizer={"weight_decay": 0.0},
    )
    data, partition = toy_data(1)
    data.images[partition.clients[0][1:]] = 0
    return Network(config, data, partition)


def test_uploads_that_refine_an_estimate_read_an_image_exactly_unless_a_quota_ends_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each upload was counted over all images held: the policy allowed 14 rounds here."""
    net = aimed(monkeypatch)
    with contextlib.closing(net):
        errors = aim(net, NOISY, 12)
    assert errors[0] > 0.2 and errors[-1] < 0.5 / 255, errors
    net = aimed(monkeypatch)
    with contextlib.closing(net):
        with pytest.raises(RoundAborted):
            aim(net, CAPPED, 12)
        net.clients[0].join(30)
        assert "bits about an image, the policy has bits_per_image = 1000" in str(
            net.clients[0].error
        )
        assert net.clients[0].device.rounds == 1


def test_gradients_far_longer_than_their_features_end_the_part(net: Network) -> None:
    with pytest.raises(RoundAborted):
        attacked(net, DevicePolicy(), length=1e4)
    net.clients[0].join(30)
    error = net.clients[0].error
    assert isinstance(error, Rejected) and "gradients of a row have norm 1e+04" in str(error)
    assert not [kind for kind, *_ in net.fleet.traffic.counts if kind == "model" and _[0] == "up"]


def test_the_limit_is_relative_to_the_features_by_row_and_by_batch() -> None:
    features, nothing = torch.full((8, 4), 2.0), torch.zeros(8, 4)  # rows of norm 4
    one, every = nothing.clone(), nothing.clone()
    one[3, 0], every[:, 1] = 20.0, 12.0  # 5 times a row, 1.8 times the batch; 3 times every row
    check_gradients(one, features)
    check_gradients(nothing, nothing)
    for gradients, sent, word in [
        (3 * one, features, "a row"),
        (every, features, "a batch"),
        (one * torch.nan, features, "nan"),
        (one, nothing, "a row"),
    ]:
        with pytest.raises(PolicyBreach, match=word):
            check_gradients(gradients, sent)


def test_a_batch_of_one_is_refused_unless_the_owner_allows_it() -> None:
    config = tiny(1, clients={"batch": 1})
    with network(config) as net:
        net.join(0)
        net.clients[0].join(30)
        assert "clients.batch = 1 is below the policy's smallest_batch = 4" in str(
            net.clients[0].error
        )
    with network(config) as net:
        net.enrol(0, policy=DevicePolicy(smallest_batch=1))


def first_gradients(victim: Tensor) -> Tensor:
    """Return what client 1 gets back for its first features, if client 0 holds the images of ``victim``."""
    received: list[Tensor] = []

    def listen(_: object, frame: Frame) -> None:
        if frame.kind == "gradients":
            received.append(frame.tensors["gradients"].clone())

    with network(tiny(2)) as net:
        net.enrol(0, load=lambda _: (victim, 0))
        net.enrol(1, break_at=listen)
        net.experiment.method.round(0)
    return received[0]


def test_the_gradients_of_one_device_depend_on_the_images_of_another() -> None:
    """docs/security.md says so: they are made with the keys of all."""
    images = toy_data(2)[0].images[:IMAGES]
    before, again = first_gradients(images), first_gradients(images)
    assert torch.equal(before, again)
    assert not torch.allclose(before, first_gradients(torch.full_like(images, 200)), rtol=0.1)
