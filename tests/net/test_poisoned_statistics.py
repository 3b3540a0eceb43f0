"""One device with a single bad BatchNorm buffer, or one that comes only to attack, harms nobody else."""

import math
from functools import partial
from typing import Any

import pytest
import torch

from reproduction.poisoning.attacks import ATTACKS, Attack, Weights
from reproduction.poisoning.fleet import PoisonedBlock, attackers_of
from semisfl.metrics import MethodMetrics
from semisfl.net.client import member
from semisfl.net.frames import Frame
from semisfl.runs.loop import run_rounds
from semisfl.settings.config import Config
from semisfl.settings.robust import SERVED
from tests.net.harness import Client, network, tiny, until, weights
from tests.net.test_poisoning import assert_sound

LAYERS = [
    *({"kind": "conv", "channels": 3, "stride": 4}, {"kind": "batchnorm"}, {"kind": "relu"}),
    *({"kind": "flatten"}, {"kind": "linear"}),
]


def with_batchnorm(clients: int, **changes: Any) -> Config:
    model = {"name": "custom", "layers": LAYERS}
    settings = {"model": model, "robust": SERVED, "network": {"quorum": clients - 1}, **changes}
    return tiny(clients, **settings)


def first_of(buffer: str, value: float) -> Attack:
    """Return the attack that sets one channel of one buffer; all else stays as it was trained."""

    def changed(sent: Weights) -> torch.Tensor:
        poisoned = sent.trained.clone()
        if sent.name.endswith(buffer):
            poisoned[0] = value
        return poisoned

    return Attack(f"{buffer}={value}", "", state=changed, variances=True)


def attacking(monkeypatch: pytest.MonkeyPatch, config: Config, attack: Attack) -> int:
    """Let one device attack; return which."""
    total = config.clients.total
    (attacker,) = attackers_of(config.seed, total, 1 / total)
    block = partial(PoisonedBlock, attack=attack, attackers={attacker})
    monkeypatch.setattr(member, "ClientBlock", block)
    return attacker


@pytest.mark.parametrize("buffer", ["running_mean", "running_var"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_impossible_value_in_one_buffer_shuts_its_author_out(
    buffer: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = with_batchnorm(4, rounds=5)
    attacker = attacking(monkeypatch, config, first_of(buffer, value))
    with network(config) as net:
        net.join_all()
        result = run_rounds(net.experiment)
        assert_sound(net)
        assert net.strikes == {f"plaintext:client-{attacker}": 3}
        until(lambda: net.fleet.present() == [c for c in range(4) if c != attacker])
    assert len(result.rounds) == 5


def test_a_tiny_variance_in_one_channel_stays_one_client_s_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    variances = {}
    for attacked in (False, True):
        config = with_batchnorm(4, rounds=4)
        with monkeypatch.context() as patch:
            if attacked:
                attacking(patch, config, first_of("running_var", 1e-12))
            with network(config) as net:
                net.join_all()
                run_rounds(net.experiment)
                assert_sound(net)
                assert net.strikes == {} and len(net.fleet.present()) == 4
                state = weights(net.experiment)
        (name,) = [key for key in state if key.startswith("/student/") and key.endswith("var")]
        variances[attacked] = float(state[name][0])
    # It has a quarter of the weight, four times: (3/4)^4 of its part is left, and honest batches bring it back.
    assert 0.3 * variances[False] < variances[True] < variances[False]


def test_a_device_that_comes_only_in_every_other_round_to_attack(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It leaves in odd rounds when it is sent the bottom, and comes back for even ones."""
    config = tiny(4, rounds=6, robust=SERVED, network={"quorum": 3})
    attacker = attacking(monkeypatch, config, ATTACKS["scaled_bottom"])

    def leave(client: Client, frame: Frame) -> None:
        if frame.kind == "split" and frame.fields["round"] % 2:
            client.die()

    with network(config) as net:
        for client in range(4):
            net.join(client, break_at=leave if client == attacker else None)
        assert net.fleet.wait_for(4, 20)
        method = net.experiment.method
        original = method.round

        def back_in_even_rounds(index: int) -> MethodMetrics:
            if index and index % 2 == 0:
                net.join(attacker, break_at=leave)
                assert net.fleet.wait_for(4, 20)
            return original(index)

        monkeypatch.setattr(method, "round", back_in_even_rounds)
        rounds = run_rounds(net.experiment).rounds
        assert_sound(net)
        assert net.strikes == {}
        assert net.fleet.present() == [c for c in range(4) if c != attacker]
    assert [list(row.get("held_back") or {}) for row in rounds] == [[str(attacker)], []] * 3
