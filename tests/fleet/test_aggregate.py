"""Rules that make one state of several: what each gives, and what one client can do to it."""

import logging

import numpy as np
import pytest
import torch

from semisfl.fleet.aggregate import combine, long_updates, rule_named
from semisfl.fleet.base import HeldBack, mean_state
from semisfl.runs.loop import run_rounds
from semisfl.settings import catalog
from semisfl.settings.robust import RobustConfig
from tests import toy
from tests.fleet.test_every_fleet import FLEETS
from tests.net.harness import tiny, weights

RULES = list(catalog.AGGREGATES)
ROBUST = [name for name in RULES if name != "mean"]
HONEST = torch.randn(9, 40, generator=torch.Generator().manual_seed(3))


def settings(name: str, **more: float) -> RobustConfig:
    return RobustConfig(aggregate=name, **({name: more} if more else {}))  # type: ignore[arg-type]


def result(name: str, updates: torch.Tensor, **more: float) -> torch.Tensor:
    return rule_named(name)(updates, settings(name, **more).of_rule).update


@pytest.mark.parametrize("count", [1, 2, 3, 5, 10])
def test_coordinate_rules_are_those_of_numpy(count: int) -> None:
    updates = torch.randn(count, 30)
    values = updates.numpy()
    assert np.allclose(result("median", updates), np.median(values, axis=0), atol=1e-6)
    ends = min(int(np.ceil(0.2 * count)), (count - 1) // 2)
    trimmed = np.sort(values, axis=0)[ends : count - ends].mean(0)
    assert np.allclose(result("trimmed_mean", updates, attackers=0.2), trimmed, atol=1e-6)


def test_a_share_of_the_clients_is_not_rounded_up_by_floating_point() -> None:
    updates = torch.cat([torch.ones(93, 1), torch.full((7, 1), 100.0)])
    assert 0.07 * 100 > 7
    assert len(rule_named("krum")(updates, settings("krum", attackers=0.07).of_rule).held_back) == 7
    values = torch.arange(100.0).square().unsqueeze(1)
    mine = result("trimmed_mean", values, attackers=0.07)
    torch.testing.assert_close(mine, values[7:93].mean(0))


def test_long_updates_are_shortened_and_short_ones_are_not() -> None:
    updates = torch.tensor([[1.0, 0.0], [0.0, 2.0], [30.0, 40.0]])
    assert result("clipped_mean", updates, limit=1.0).tolist() == pytest.approx([2.2 / 3, 3.6 / 3])
    assert result("clipped_mean", updates, limit=100.0).tolist() == pytest.approx([31 / 3, 14.0])


def test_the_usual_length_is_between_the_middle_two_of_four() -> None:
    updates = torch.diag(torch.tensor([1.0, 2.0, 4.0, 8.0]))
    expected = [length / 4 for length in (1, 2, 3, 3)]
    assert result("clipped_mean", updates, limit=1.0).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("name", ["clipped_mean", "median", "trimmed_mean"])
def test_a_round_of_two_has_no_limit_and_a_round_of_three_has(name: str) -> None:
    reference, held = {"w": torch.zeros(4)}, HeldBack()
    uploads = {c: {"w": torch.full((4,), value)} for c, value in enumerate((1.0, 1.0, 1e3))}
    two = combine(settings(name), {1: uploads[1], 2: uploads[2]}, reference, held)
    assert torch.equal(two["w"], torch.full((4,), 500.5)) and held.take() is None
    three = combine(settings(name), uploads, reference, held)
    assert three["w"].tolist() == pytest.approx([1.0] * 4) and list(held.take() or {}) == ["2"]


def test_krum_leaves_out_the_farthest() -> None:
    updates = torch.cat([HONEST[:5] * 0.1, torch.full((1, 40), 5.0), HONEST[5:7] * 0.1])
    actual = rule_named("krum")(updates, settings("krum", attackers=0.1).of_rule)
    assert list(actual.held_back) == [5] and "farthest" in actual.held_back[5]
    kept = [0, 1, 2, 3, 4, 6, 7]
    torch.testing.assert_close(actual.update, updates[kept].mean(0))
    few = updates[:4]
    torch.testing.assert_close(result("krum", few, attackers=0.4), few.mean(0))


@pytest.mark.parametrize("name", ROBUST)
def test_one_client_cannot_move_the_result_far(name: str) -> None:
    poisoned = torch.cat([HONEST, torch.full((1, 40), 1e5)])
    honest = result(name, HONEST)
    assert (result(name, poisoned) - honest).norm() < 2.0 < (poisoned.mean(0) - honest).norm()
    held = rule_named(name)(poisoned, settings(name).of_rule).held_back
    assert 9 in held, "it is named"
    assert name == "krum" or list(held) == [9], "and nobody else is; krum leaves out a fixed share"


def states(poisoned: float = 1.0) -> dict[int, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = {}
    for client in (2, 4, 5, 7, 8):
        made[client] = {
            "conv.weight": torch.randn(3, 2, 2, 2, generator=generator),
            "bn.running_var": torch.rand(3, generator=generator),
            "bn.num_batches_tracked": torch.tensor(client),
        }
    made[4]["conv.weight"] *= poisoned
    return made


def test_the_mean_is_the_plain_one_bit_by_bit() -> None:
    inputs, held = states(), HeldBack()
    actual = combine(settings("mean"), inputs, inputs[2], held)
    for name, value in mean_state(list(inputs.values())).items():
        assert torch.equal(actual[name], value) and actual[name].dtype == value.dtype
    assert held.take() is None


@pytest.mark.parametrize("name", ROBUST)
def test_aggregated_states_keep_their_form_and_clients_held_back_are_named(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "semisfl")
    inputs, held = states(poisoned=1e4), HeldBack()
    reference = mean_state(list(states().values()))
    actual = combine(settings(name), inputs, reference, held)
    for key, value in inputs[2].items():
        assert actual[key].shape == value.shape and actual[key].dtype == value.dtype, key
    assert int(actual["bn.num_batches_tracked"]) == 5
    assert actual["conv.weight"].abs().max() < 10 and (actual["bn.running_var"] >= 0).all()
    message = held.take()
    assert message is not None and message["4"] in caplog.text
    # Krum leaves out a fixed share, of weights and of statistics.
    of_weights = [one for one, why in message.items() if not why.startswith("running_var: ")]
    assert of_weights == ["4"] and (name == "krum" or list(message) == ["4"])
    assert "client 4 is held back" in caplog.text and held.take() is None


def moved(weight: float, mean: float, variance: float) -> dict[str, torch.Tensor]:
    """Return a state that moved so far from zeros, in its weights and in each kind of statistics."""
    return {
        "conv.weight": torch.full((4,), weight),
        "bn.running_mean": torch.full((4,), mean),
        "bn.running_var": torch.full((4,), variance),
    }


@pytest.mark.parametrize("kind", ["conv.weight", "bn.running_mean"])
def test_long_updates_of_weights_do_not_hide_behind_longer_ones_of_statistics(kind: str) -> None:
    """Variances of honest clients move by 50. A client that moves its weights by 20 is far out."""
    reference = moved(0.0, 0.0, 0.0)
    uploads = {client: moved(0.1, 0.5, 50.0 + client) for client in range(4)}
    uploads[4] = {**moved(0.1, 0.5, 50.0), kind: torch.full((4,), 20.0)}
    held = HeldBack()
    actual = combine(settings("clipped_mean"), uploads, reference, held)
    assert float(actual[kind].max()) <= float(uploads[0][kind].max()) * 1.01
    assert list(held.take() or {}) == ["4"]
    assert long_updates(uploads, reference) == {4}


@pytest.mark.parametrize("clients", [3, 5])
def test_no_client_puts_the_length_of_its_whole_update_into_a_small_layer(clients: int) -> None:
    def layers(first: float, last: float) -> dict[str, torch.Tensor]:
        return {"first.weight": torch.full((4,), first), "last.weight": torch.full((400,), last)}

    uploads = {client: layers(0.1, 0.1) for client in range(clients)}
    uploads[0] = layers(1.0, 0.0)  # no longer than the others'
    held = HeldBack()
    actual = combine(settings("clipped_mean"), uploads, layers(0.0, 0.0), held)
    assert float(actual["first.weight"][0]) == pytest.approx(0.1)
    assert list(held.take() or {}) == ["0"]


def test_a_tensor_that_most_clients_left_alone_stays() -> None:
    reference = moved(0.0, 0.0, 0.0)
    uploads = {client: moved(0.0, 0.1, 0.1) for client in range(3)}
    uploads[1] = moved(0.1, 0.1, 0.1)
    held = HeldBack()
    assert not combine(settings("clipped_mean"), uploads, reference, held)["conv.weight"].any()
    assert list(held.take() or {}) == ["1"]


@pytest.mark.parametrize("name", ROBUST)
def test_updates_to_a_negative_variance_leave_none(name: str) -> None:
    reference = {"bn.running_var": torch.tensor([0.2, 0.3]), "bn.running_mean": torch.zeros(2)}
    sent = {"bn.running_var": torch.tensor([-0.4, 0.5]), "bn.running_mean": torch.full((2,), -1.0)}
    actual = combine(settings(name), dict.fromkeys(range(3), sent), reference, HeldBack())
    assert actual["bn.running_var"].tolist() == pytest.approx([0.0, 0.5])
    assert actual["bn.running_mean"].tolist() == pytest.approx([-1.0, -1.0])


@pytest.mark.parametrize("name", ROBUST)
def test_unchanged_weights_stay_as_they_are(name: str) -> None:
    reference = states()[2]
    actual = combine(
        settings(name), {1: reference, 3: reference, 6: reference}, reference, HeldBack()
    )
    toy.assert_same(actual, reference)


@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("semisfl", "median"),
        ("fedswitch-sl", "clipped_mean"),
        ("fedswitch", "clipped_mean"),
        ("fedmatch", "median"),
        ("semifl", "median"),
    ],
)
def test_every_fleet_aggregates_alike(method: str, name: str) -> None:
    changes = {"semifl": {"confidence_threshold": 0.0}, "fedswitch": {"confidence_threshold": 0.2}}
    config = tiny(3, method=method, rounds=1, robust={"aggregate": name}, **changes)
    plain = tiny(3, method=method, rounds=1, **changes)
    actual = []
    for kind, settings_ in (("local", config), ("network", config), ("local", plain)):
        with FLEETS[kind](settings_) as fixture:
            run_rounds(fixture.experiment)
            actual.append(weights(fixture.experiment))
    local, network, mean = actual
    for key, value in local.items():
        torch.testing.assert_close(value, network[key], rtol=1e-4, atol=1e-5, msg=key)
    assert any(not torch.equal(value, mean[key]) for key, value in local.items()), "it is used"
