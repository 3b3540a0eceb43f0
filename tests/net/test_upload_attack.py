"""The bottom that goes back, against a server that wants the images in it, over the network."""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from semisfl.attacks.uploads import rebuilt
from semisfl.data.augment import Augmentation
from semisfl.fleet.base import RoundAborted, SplitRound
from semisfl.net.client.agreement import check_gradients
from semisfl.net.client.allowance import Allowance, beside
from semisfl.net.client.rejection import Rejected
from semisfl.net.frames import Frame
from semisfl.settings.config import ConfigError
from semisfl.settings.policy import DevicePolicy, PolicyBreach, parse_policy, read_policy
from tests.net.harness import Network, network, tiny, toy_data, until

LAYERS = [
    *({"kind": "flatten"}, {"kind": "linear", "features": 64}, {"kind": "relu"}),
    {"kind": "linear"},
]
IMAGES = 12
POLICIES = Path(__file__).parent.parent.parent / "policies"


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
    return rebuilt(weight, held[likeness.argmax(1)])[0]


def test_without_a_policy_every_image_is_a_row_of_the_upload(net: Network) -> None:
    assert images_in(net, attacked(net, DevicePolicy())) == IMAGES


def test_the_policy_that_only_looked_strict_is_refused_with_the_fix() -> None:
    looked_strict = {"codec": "int8", "full_models": False, "noise": 0.14, "clip": 40.0}
    caps = {"uses_per_image": 1, "rounds": 1}
    with pytest.raises(ConfigError, match=r"set policy\.update_clip and policy\.update_noise"):
        parse_policy(looked_strict | caps)


def test_the_strict_policy_shows_no_image(net: Network) -> None:
    policy = read_policy(POLICIES / "strict.toml").model_copy(update={"bits_per_image": 1e6})
    assert images_in(net, attacked(net, policy)) == 0


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


@pytest.mark.parametrize("name", ["open", "strict"])
def test_the_policies_that_are_shipped_take_part_in_rounds(name: str, tmp_path: Path) -> None:
    text = (POLICIES / f"{name}.toml").read_text(encoding="utf-8")
    policy, file = parse_policy(tomllib.loads(text)), beside(tmp_path / f"{name}.toml")
    with network(tiny(2, rounds=3)) as net:
        for index in range(2):
            many = net.data.images[net.partition.clients[index]].repeat(10, 1, 1, 1)
            net.join(
                index,
                policy=policy,
                allowance=Allowance(file if not index else None),
                load=lambda _, many=many: (many, 0),
            )
        net.wait_for(2)
        bits = []
        for index in range(3):
            net.experiment.method.round(index)
            bits.append(net.clients[0].device.bits_per_image)
        assert sorted(net.fleet.present()) == [0, 1]
    if name == "strict":
        # Written down, and growing by the same amount in each round.
        assert Allowance(file).spent.bits == pytest.approx(bits[-1] * 120)
        assert bits[1] == pytest.approx(2 * bits[0]) and bits[2] == pytest.approx(3 * bits[0])
    else:
        assert bits == [float("inf")] * 3


def test_the_cap_on_bits_ends_the_part_before_the_send_and_outlasts_the_process(
    tmp_path: Path,
) -> None:
    file = beside(tmp_path / "policy.toml")
    shaped = {"clip": 1.0, "noise": 0.14, "update_clip": 1.0, "update_noise": 0.01}
    with network(tiny(1, rounds=3)) as net:
        client = net.enrol(0, policy=DevicePolicy(**shaped), allowance=Allowance(None))
        net.experiment.method.round(0)
        once = client.device.bits_per_image
        client.device.stop()
        client.join(30)
        until(lambda: not net.fleet.present())
        policy = DevicePolicy(**shaped, bits_per_image=1.5 * once)
        client = net.enrol(0, policy=policy, allowance=Allowance(file))
        net.experiment.method.round(1)
        counts = dict(net.fleet.traffic.counts)
        with pytest.raises(RoundAborted):
            net.experiment.method.round(2)
        client.join(30)
        assert f"would carry {2 * once:,.1f} bits per image" in str(client.error)
        assert not net.fleet.present()
        # Nothing went up after the cap was reached.
        up = {key: count for key, count in net.fleet.traffic.counts.items() if key[1] == "up"}
        assert up == {key: count for key, count in counts.items() if key[1] == "up"}
        # A new process reads the same count, and is not let in.
        again = net.join(0, policy=policy, allowance=Allowance(file))
        again.join(30)
        assert "bits per image, the policy has bits_per_image" in str(again.error)
    assert Allowance(file).spent.bits == pytest.approx(once * 12)


def test_two_devices_that_share_a_file_share_its_caps(tmp_path: Path) -> None:
    from semisfl.fleet.caps import Price

    file, policy = beside(tmp_path / "policy.toml"), DevicePolicy(rounds=3)
    one, other = Allowance(file), Allowance(file)
    for allowance in (one, other, one):
        allowance.take(policy, Price(10))
    with pytest.raises(PolicyBreach, match="round 4"):
        other.take(policy, Price(10))
    assert Allowance(file).spent.rounds == 3


def test_a_process_that_starts_gives_back_nothing(tmp_path: Path) -> None:
    """It had read the file before another one counted, and wrote what it had read."""
    from semisfl.fleet.caps import Price

    file, policy = beside(tmp_path / "policy.toml"), DevicePolicy(rounds=3)
    one, other = Allowance(file), Allowance(file)
    one.take(policy, Price(10))
    other.check_writable()
    assert Allowance(file).spent.rounds == 1


def test_a_count_without_bits_is_of_an_earlier_version_and_has_no_bound(tmp_path: Path) -> None:
    file = tmp_path / "policy.spent.json"
    file.write_text('{"rounds": 2, "uses": 3}')
    assert Allowance(file).spent.bits == float("inf")
    file.write_text('{"rounds": 2, "uses": 3, "bits": -5}')
    with pytest.raises(ConfigError, match="cannot be read"):
        Allowance(file)


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
