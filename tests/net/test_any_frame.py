"""Test that any frame of a client, at any moment of any method, costs that client its place at most: the run
goes on with the others."""

import contextlib
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor

from semisfl.fleet.outgoing import Outgoing
from semisfl.fleet.packing import tensor_names
from semisfl.net.frames import encode
from semisfl.settings import catalog, lookup
from tests.net.harness import BATCHNORM, Client, Network, audited, network, tiny, until, weights
from tests.toy import watched

MOMENTS = {
    # hello, ready; then what a client says in a round
    "supervised": 2,
    "semisfl": 2 + 3,  # features, features, bottom
    "fedswitch-sl": 2 + 3,
    "fedmatch": 2 + 1,  # states
    "fedswitch": 2 + 2,  # fetch, states
    "semifl": 2 + 1 * 2,  # states; the same for the statistics of BatchNorm
    "fl2": 2 + 1 * 2,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "semifl": {"semifl": {"confidence_threshold": 0.0}},
    "fedswitch": {"fedswitch": {"iid_threshold": 10.0}},
}

# --- a frame, and what can be wrong with it -------------------------------------------------------

ODD: list[Any] = [
    *(None, True, -1, 0, 2**62, 0.5, 1e9, 1e300, math.nan, -math.inf, "", "x" * 300, b"x"),
    *([], [1, [2]], {}, {"a": {"b": []}}, {"student": ["nope"]}, {"loss": 1e300, "coverage": 2.0}),
]
KINDS = ["hello", "ready", "features", "bottom", "fetch", "states", "declined", ""]


@dataclass
class Message:
    """A frame as its sender would encode it."""

    kind: str
    fields: dict[str, Any]
    tensors: dict[str, Tensor]
    codecs: Mapping[str, str] | str


def another_kind(message: Message, rng: random.Random) -> None:
    message.kind = rng.choice(KINDS)


def missing(message: Message, rng: random.Random) -> None:
    del message.fields[rng.choice(list(message.fields))]


def another_value(message: Message, rng: random.Random) -> None:
    message.fields[rng.choice([*message.fields, "extra"])] = rng.choice(ODD)


def tensors_changed(message: Message, rng: random.Random) -> None:
    if not message.tensors:
        return another_value(message, rng)
    name = rng.choice(list(message.tensors))
    tensor = message.tensors.pop(name)
    message.codecs = message.codecs if isinstance(message.codecs, str) else "fp32"
    factor = rng.choice([math.nan, math.inf, 1e5, 1e30, 0.0, -1.0])
    message.tensors |= rng.choice(
        [
            {},
            {name + "x": tensor},
            {name: tensor, "extra": tensor},
            {name: tensor[:-1] if tensor.dim() else tensor[None]},
            {name: tensor.to(torch.float64)},
            {name: tensor * factor if tensor.is_floating_point() else tensor - 10},
        ]
    )
    return None


CHANGES = {
    change.__name__: change for change in (another_kind, missing, another_value, tensors_changed)
}

# --- a client that says such a thing at one moment ------------------------------------------------


@dataclass
class Lie:
    moment: int
    change: str
    seed: int
    sent: int = 0

    def tells(self) -> bool:
        self.sent += 1
        return self.sent - 1 == self.moment

    def packed(self, message: Message) -> bytes:
        CHANGES[self.change](message, random.Random(self.seed))
        with contextlib.suppress(OverflowError, ValueError, TypeError):
            return b"".join(encode(message.kind, message.fields, message.tensors, message.codecs))
        return b"nonsense"


def join_with(net: Network, lie: Lie, patch: pytest.MonkeyPatch) -> Client:
    honest = Outgoing.frame

    def frame(self: Outgoing, kind: str, fields: Any, *more: Any) -> Any:
        if kind != "hello" or fields["name"] != "client-1" or not lie.tells():
            return honest(self, kind, fields, *more)
        return [lie.packed(Message(kind, dict(fields), {}, "fp32"))]

    patch.setattr(Outgoing, "frame", frame)
    client = net.join(1)
    frames = client.device
    original = frames.answer

    def answer(
        received: Any, kind: str, fields: Any, cleared: Any = None, codecs: Any = "fp32", **how: Any
    ) -> None:
        if not lie.tells():
            return original(received, kind, fields, cleared, codecs, **how)
        tensors = cleared.tensors if cleared else {}
        message = Message(kind, dict(fields), dict(tensors), codecs)
        return received.stream.answer(received.ticket, lie.packed(message))

    patch.setattr(frames, "answer", answer)
    return client


@pytest.fixture(scope="module", params=MOMENTS)
def net(request: pytest.FixtureRequest) -> Iterator[Network]:
    config = tiny(
        3,
        method=request.param,
        rounds=10_000,  # a device ends if a server begins many more rounds than its terms have
        model={"layers": BATCHNORM},
        network={"deadline": 10.0},
        **SETTINGS.get(request.param, {}),
    )
    with network(config) as net:
        for honest in (0, 2):
            net.join(honest)
        net.wait_for(2)
        net.fleet.waiting._settled = True  # nobody else comes who would be waited for
        yield net


def goes_on(net: Network, lie: Lie) -> None:
    experiment, fleet = net.experiment, net.fleet
    honest = [net.clients[client] for client in (0, 2)]
    before = [client.device.rounds for client in honest]
    with pytest.MonkeyPatch.context() as patch:
        liar = join_with(net, lie, patch)
        until(lambda: 1 in fleet.present() or not liar.is_alive())
        fleet.wait_ready()
        row = experiment.method.round(0)
        fleet.settle(True)
        liar.kill()
        liar.join(10)
    until(lambda: 1 not in fleet.present())
    strikes = set(net.strikes)
    fleet.sessions.strikes.clear()
    # Before a hello is understood nobody has a name.
    assert strikes <= {"plaintext:client-1", "?"} and fleet.present() == [0, 2]
    if MOMENTS[net.config.method] > 2:
        # They count a round once its last answer is sent, so a little after the server has it.
        until(lambda: [client.device.rounds for client in honest] > before)
    assert all(client.error is None for client in honest)
    assert row.loss_supervised is not None
    for key, value in weights(experiment).items():
        assert torch.isfinite(value.float()).all(), key


LIES = {"change": st.sampled_from(list(CHANGES)), "seed": st.integers(0, 2**20)}


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(moment=st.integers(0, max(MOMENTS.values()) - 1), **LIES)
def test_the_run_goes_on(net: Network, moment: int, change: str, seed: int) -> None:
    goes_on(net, Lie(moment % MOMENTS[net.config.method], change, seed))


@pytest.mark.parametrize(
    "numbers",
    [
        {},
        {"loss": 1.0, "coverage": 2.0, "by_teacher": 0.0},
        {"loss": 1, "coverage": 0.5, "by_teacher": 0.0},
        {"loss": math.nan, "coverage": 0.5, "by_teacher": 0.0},
    ],
    ids=["none", "out of range", "an integer", "NaN"],
)
def test_what_the_work_declares_is_all_that_is_taken(
    numbers: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with network(tiny(3, method="fedswitch", rounds=1)) as net:
        net.join_all()
        frames = net.clients[1].device
        original = frames.answer

        def answer(received: Any, kind: str, fields: Any, *more: Any, **how: Any) -> None:
            changed = {**fields, "numbers": numbers} if kind == "states" else fields
            original(received, kind, changed, *more, **how)

        monkeypatch.setattr(frames, "answer", answer)
        row = net.experiment.method.round(0)
        assert row.contributing == 2
        assert net.strikes == {"plaintext:client-1": 1}
    assert len(audited(caplog)) == 1


def test_the_simulation_holds_to_the_same_declaration() -> None:
    """Every client half answers in one process what it declares, no less and no more."""
    from semisfl.runs.experiment import assemble
    from tests.net.harness import toy_data

    seen = set()
    for method in MOMENTS:
        data, partition = toy_data(3)
        config = tiny(3, method=method, model={"layers": BATCHNORM}, **SETTINGS.get(method, {}))
        experiment = assemble(config, data, partition, device="cpu")
        model = experiment.method.tested()["student"].state_dict()
        full = [name for name in model if not name.startswith("projector")]
        rounds = watched(experiment.fleet)
        experiment.method.round(0)
        for work, _, results in rounds:
            for result in results:
                assert tensor_names(result.states) == work.answers.outline(full)
                # Where the true labels are known, as on no device, there are counts of them too.
                numbers = {name: v for name, v in result.numbers.items() if "/" not in name}
                assert numbers.keys() == work.answers.numbers.keys()
                for name, value in numbers.items():
                    assert value == work.answers.within(name, value), name
            seen.add(work.name)
    works = [work for row in catalog.METHODS.values() for work in lookup.works(row)]
    assert seen == set(works)
