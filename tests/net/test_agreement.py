"""Servers that ask for something else than their terms say: a device refuses and ends its part."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from semisfl.engine.hardware import Hardware
from semisfl.fleet.base import FullRound, RoundAborted, SplitRound
from semisfl.fleet.caps import Spent
from semisfl.methods.semisfl import SemiSFL
from semisfl.models.build import build_model
from semisfl.models.split import parameter_count
from semisfl.models.zoo import MODELS
from semisfl.net.client.allowance import Allowance
from semisfl.net.client.member import Member
from semisfl.net.client.rejection import Rejected
from semisfl.net.frames import WireError
from semisfl.net.messages import SMALL, Schemas
from semisfl.net.terms import Terms, bottom_digest
from semisfl.settings.config import Config
from semisfl.settings.layer_kinds import MAX_LAYERS
from semisfl.settings.policy import DevicePolicy
from tests.net.harness import CLASSES, SIDE, Network, network, tiny, until

HEAD = [{"kind": "flatten"}, {"kind": "linear"}]


def terms(config: Config | None = None) -> str:
    """Return honest terms as JSON."""
    return Terms(config or tiny(), (1, SIDE, SIDE), CLASSES, (0.5,), (0.5,)).to_json()


def changed(text: str, path: str, value: Any) -> str:
    """Return terms with another value at a dotted ``path``, such as ``config.clients.batch``."""
    plain = json.loads(text)
    *sections, leaf = path.split(".")
    target = plain
    for section in sections:
        target = target[section]
    target[leaf] = value
    return json.dumps(plain)


def refusal(net: Network) -> str:
    """Return why client 0 ended its part; none of its features, bottoms and models may have left."""
    client = net.clients[0]
    until(lambda: client.error is not None)
    assert isinstance(client.error, Rejected), client.error
    assert {kind for kind, up, _ in net.fleet.traffic.counts if up == "up"} == set()
    return str(client.error)


def begin(net: Network, **changes: Any) -> None:
    """Begin a split round with these changes, which its only device refuses."""
    method = net.experiment.method
    assert isinstance(method, SemiSFL)
    method.active = method.setup.active(0)
    plan: SplitRound = replace(method._plan(0, net.config.optimizer.lr), **changes)
    net.fleet.start_round(plan)
    with pytest.raises(RoundAborted):
        net.fleet.forward()


def train(net: Network, **changes: Any) -> None:
    """Begin a full-model round with these changes, which its only device refuses."""
    method: Any = net.experiment.method
    plan = FullRound(0, (0,), 2, 0.02, send={"student": method.student.state_dict()})
    with pytest.raises(RoundAborted):
        net.fleet.train(method.work, replace(plan, **changes))


# --- rounds --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"steps": -1000}, "steps = -1000 for a round; the agreed terms allow 1 to 2"),
        ({"steps": 0}, "steps = 0"),
        ({"steps": 3}, "steps = 3"),
        ({"index": -1}, "round = -1 for a round; the agreed terms allow 0 to 1"),
        ({"index": 2**40}, "round = 1.09951e+12"),
        ({"lr": 0.021}, "lr = 0.021 for a round; the agreed terms allow 0.005 to 0.02"),
        ({"lr": 0.0}, "lr = 0 "),
        ({"teacher_decay": 0.99}, "ema = True for a round; the agreed terms have False"),
        ({"teacher_for": frozenset()}, "teacher = False for a round; the agreed terms have True"),
    ],
)
def test_a_split_round_keeps_to_the_terms(changes: dict[str, Any], reason: str) -> None:
    allowance = Allowance()
    allowance.spent = Spent(rounds=1, uses=4)
    with network(tiny(1)) as net:
        net.enrol(0, policy=DevicePolicy(uses_per_image=10), allowance=allowance)
        begin(net, **changes)
        assert f"the server sends {reason}" in refusal(net)
    assert allowance.spent == Spent(rounds=1, uses=4)


def test_a_teacher_that_follows_has_the_agreed_decay() -> None:
    with network(tiny(1, semisfl={"client_teacher": "ema"})) as net:
        net.join_all()
        begin(net, teacher_decay=0.0)
        assert "decay = 0.0 for a round; the agreed terms have 0.99" in refusal(net)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"steps": 10_000}, "steps = 10000 for a round; the agreed terms allow 1 to 2"),
        ({"steps": 0}, "steps = 0 for a round; the agreed terms allow 1 to 2"),
        ({"lr": 50.0}, "lr = 50"),
        ({"index": 7}, "round = 7"),
        (
            {"settings": {"confidence_threshold": 0.0, "iid_threshold": 9.0, "ema_decay": 0.99}},
            "confidence_threshold = 0.0 for a round; the agreed terms have 0.95",
        ),
        ({"settings": {"save_to": "x"}}, "save_to = 'x' for a round; the agreed terms have None"),
    ],
)
def test_a_full_round_keeps_to_the_terms(changes: dict[str, Any], reason: str) -> None:
    with network(tiny(1, method="fedswitch")) as net:
        net.join_all()
        train(net, **changes)
        assert f"the server sends {reason}" in refusal(net)
        assert net.clients[0].link.owner.allowance.spent == Spent()


def test_a_round_that_cannot_be_done_ends_with_a_reason() -> None:
    with network(tiny(1, method="fedswitch")) as net:
        net.join_all()
        train(net, send={})
        assert "the server sends no 'student' for a round" in refusal(net)
    with network(tiny(1, method="fedswitch")) as net:
        net.join_all()
        state: Any = net.experiment.method.student.state_dict()  # type: ignore[attr-defined]
        train(net, send={"student": dict(list(state.items())[:1])})
        assert "the server's round cannot be done: RuntimeError: " in refusal(net)
    layers = [{"kind": "avgpool"}, {"kind": "flatten"}, {"kind": "batchnorm"}, {"kind": "linear"}]
    config = tiny(1, model={"layers": layers, "cut": "batchnorm1"}, clients={"batch": 1})
    with network(config) as net:  # BatchNorm has no statistics of a single value
        net.join_all(policy=DevicePolicy(smallest_batch=1))
        with pytest.raises(RoundAborted):
            net.experiment.method.round(0)
        assert "the server's round cannot be done: ValueError: Expected more than 1" in refusal(net)


@pytest.mark.parametrize(
    "method", ["semisfl", "fedswitch-sl", "fedswitch", "semifl", "fedmatch", "fl2"]
)
def test_an_honest_run_is_within_its_terms_to_its_last_round(method: str) -> None:
    by_classes = {"confidence_threshold": "by_classes"}
    with network(tiny(1, method=method, semisfl=by_classes, fedswitch=by_classes)) as net:
        net.join_all()
        for index in range(2):
            net.experiment.method.round(index)
        assert net.clients[0].error is None
        states = net.experiment.method.state_dict().values()
        assert all(torch.isfinite(x).all() for x in states if torch.is_tensor(x))


# --- terms ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("config.clients.batch", 3_000_000, "clients.batch = 3e+06"),
        ("config.clients.steps", 20_000_000, "clients.steps = 2e+07"),
        ("config.rounds", 10**12, "rounds = 1e+12"),
        ("config.optimizer.lr", float("inf"), "optimizer.lr = inf"),
        ("config.optimizer.weight_decay", 1e9, "optimizer.weight_decay = 1e+09"),
        ("config.data.augment.cutout", 10**9, "data.augment.cutout = 1e+09"),
        ("shape", [1, 16_384, 16_384], "height = 16384"),
        ("shape", [-1, 16, 16], "channels = -1"),
        ("shape", [float("inf"), 16, 16], "cannot convert float infinity"),
        ("classes", 10**9, "classes = 1e+09"),
        ("mean", [float("nan")], "mean = nan"),
        ("std", [0.0], "std = 0"),
        ("std", [0.5, 0.5], "1 means and 2 stds for 1 channels"),
        ("config.model.layers", [{"kind": "relu"}] * 1000, "has 1000 layers"),
        ("config.model.layers", [{"kind": "conv", "channels": 10**12}], "channels = 100000000000"),
        ("config.model.layers", [{"kind": "__import__"}], "kind = '__import__' is not known"),
        ("config.model.layers", [{"kind": "relu", "hook": "x"}], "unknown key 'model.layers[0]"),
    ],
)
def test_numbers_and_layers_of_the_terms_have_limits(path: str, value: Any, reason: str) -> None:
    with pytest.raises(WireError, match="the server's terms cannot be read") as error:
        Terms.from_json(changed(terms(), path, value), ["semisfl"])
    assert reason in str(error.value) and "\n" not in str(error.value)


def test_the_largest_table_fits_into_a_welcome() -> None:
    longest = {"name": "a" * 40, "kind": "conv", "channels": 65_536, "kernel": 64, "stride": 64}
    row = {**longest, "padding": 64, "bias": False, "groups": 65_536}
    rows = [{**row, "name": f"{number:040}"} for number in range(MAX_LAYERS)]
    text = changed(terms(), "config.model.layers", rows)
    received = Terms.from_json(text, ["semisfl"])
    assert len(received.to_json()) < SMALL - 1024
    assert Terms.from_json(received.to_json(), ["semisfl"]).run == received.run


@pytest.mark.parametrize(
    ("layers", "error"),
    [
        (
            [HEAD[0], *[{"kind": "linear", "features": 65_536}] * 2, HEAD[1]],
            "the model would have 4,312,137,732 parameters, the limit is 1,073,741,824",
        ),
        (
            [{"kind": "conv", "channels": 65_536, "kernel": 1, "padding": 64}, *HEAD],
            "gives 65536x144x144 numbers for an image, the limit is 16,777,216",
        ),
    ],
)
def test_a_device_makes_no_model_without_limit(layers: Any, error: str) -> None:
    received = Terms.from_json(changed(terms(), "config.model.layers", layers), ["semisfl"])
    hardware = Hardware("cpu", received.config.runtime)
    with pytest.raises(ValueError, match=error):
        Member(received, lambda shape: pytest.fail("too late"), hardware)


@pytest.mark.parametrize(
    ("cut", "side", "method"), [(1, "device", "semisfl"), (4, "server", "fedswitch")]
)
def test_a_model_that_leaves_one_side_nothing_to_train_is_refused(
    cut: int, side: str, method: str
) -> None:
    rows = [{"kind": "relu"}, {"kind": "conv", "channels": 3}, *HEAD, {"kind": "relu"}]
    text = terms(tiny(method=method, model={"layers": rows, "cut": cut}))
    with pytest.raises(WireError, match=f"leaves the {side} no parameters"):
        Terms.from_json(text, [method]).placed()


# --- frames out of turn --------------------------------------------------------------------------


def test_a_split_round_is_no_part_of_terms_that_send_whole_models() -> None:
    with network(tiny(1, method="fedswitch", network={"deadline": 1.0})) as net:
        net.join_all()
        method: Any = net.experiment.method
        bottom = method.student.get_submodule("bottom").state_dict()
        net.fleet.start_round(SplitRound(0, (0,), 2, 0.02, bottom, bottom))
        with pytest.raises(RoundAborted):
            net.fleet.forward()
        assert {kind for kind, way, _ in net.fleet.traffic.counts if way == "up"} == set()
        assert net.clients[0].link.owner.allowance.spent == Spent()


def test_a_full_round_is_no_part_of_terms_that_split_the_model() -> None:
    with network(tiny(1)) as net:
        net.join_all()
        assert set(net.clients[0].device.beginnings) == {"split", "split_alone"}


@pytest.mark.parametrize("bottom", ["trained", "frozen"])
@pytest.mark.parametrize(("name", "cut"), [("cnn", None), ("resnet18-imagenet", "block1_2")])
def test_a_device_builds_the_servers_bottom_from_the_bottoms_layers_alone(
    name: str, cut: str | None, bottom: str
) -> None:
    settings = tiny(model={"name": name, "cut": cut}, clients={"bottom": bottom})
    shape = (3, 64, 64)
    server = build_model(settings, shape, 5)
    sent = Terms(settings, shape, 5, (0.5,) * 3, (0.5,) * 3, bottom_digest(settings, server))
    received = Terms.from_json(sent.to_json(), ["semisfl"])
    layers, held = received.placed()
    assert len(layers) == held < len(MODELS[name].table())
    assert (
        sum(one.parameters for one in layers) == parameter_count(server.bottom)
        or bottom == "frozen"
    )
    images = torch.zeros(1, *shape, dtype=torch.uint8)
    member = Member(received, lambda _: (images, 0), Hardware("cpu", received.config.runtime))
    assert member.schemas.digest == Schemas.of(settings, server).digest
    member.model.bottom.load_state_dict(server.bottom.state_dict())
    with torch.no_grad():
        x = torch.rand(2, *shape)
        torch.testing.assert_close(member.model.bottom(x), server.bottom(x), rtol=0, atol=0)
    assert bottom_digest(received.config, member.model) == received.bottom
