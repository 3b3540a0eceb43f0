"""Which values of a client are believed."""

import math

import pytest
import torch

from semisfl.fleet.yardstick import PACE
from semisfl.net.server import value_checks


def impossible(tensors: dict[str, torch.Tensor]) -> str | None:
    return value_checks.impossible(tensors, value_checks.ranges(tensors))


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, 1.1e6, -1.1e6], ids=lambda value: f"{value:g}"
)
def test_one_impossible_number_makes_a_tensor_unusable(value: float) -> None:
    tensors = {"weight": torch.ones(3, 4), "bias": torch.zeros(5)}
    assert impossible(tensors) is None
    tensors["bias"][3] = value
    fault = impossible(tensors)
    assert fault is not None and fault.startswith("bias runs from")


def test_large_but_possible_numbers_are_believed() -> None:
    assert impossible({"features": torch.tensor([1e6, -1e6]), "none": torch.zeros(0, 4)}) is None


def test_counters_have_a_limit_of_their_own() -> None:
    """A long run counts more batches than any weight is large."""
    for count, believed in ((0, True), (10**7, True), (2**53, True), (2**54, False), (-1, False)):
        fault = impossible({"bn.num_batches_tracked": torch.tensor(count)})
        assert (fault is None) is believed, count


def test_a_variance_is_not_negative_and_a_mean_may_be() -> None:
    values = torch.tensor([0.5, -0.1])
    assert impossible({"bn.running_mean": values}) is None
    fault = impossible({"bn.running_var": values})
    assert fault is not None and "cannot be negative" in fault


# --- who stands out -------------------------------------------------------------------------------


def checked(*sizes: float, usual: float | None = None) -> tuple[value_checks.SizeChecks, list[int]]:
    """A round whose clients 0, 1, ... sent weights of these ``sizes``; and who must not be used."""
    judge = value_checks.SizeChecks()
    if usual is not None:
        judge.note_sent({"bottom weights": usual})
        judge.remember()
    judge.start_round()
    for client, size in enumerate(sizes):
        judge.note_answer(client, {"bottom weights": size})
    return judge, list(judge.outliers())


def test_three_clients_outvote_one_whatever_was_usual() -> None:
    assert checked(1.0, 1.0, 20.0)[1] == [2]
    assert checked(1.0, 1.0, 20.0, usual=15.0)[1] == [2]


def test_two_clients_outvote_nobody_and_are_held_against_the_last_good_round() -> None:
    judge, out = checked(1.0, 20.0)
    assert out == [] and judge.suspect([]) == 1
    assert judge.is_excused(0) and not judge.is_excused(1), "nobody is excused by its own values"
    assert checked(1.0, 20.0, usual=15.0)[1] == []
    assert checked(1.0, 20.0, usual=1.0)[1] == [1]
    assert checked(20.0, 20.0, usual=1.0)[1] == [0, 1]


@pytest.mark.parametrize(
    ("first", "second", "out"), [(8.0, 25.0, []), (1.2, 25.0, [1]), (3, 40.0, [1])]
)
def test_features_that_grow_on_both_of_two_clients_are_used(
    first: float, second: float, out: list[int]
) -> None:
    """The repetition has the same features: refused, they would stop the run for good."""
    judge = value_checks.SizeChecks()
    judge.usual = {"student": 1.7}
    judge.start_round()
    judge.note_answer(0, {"student": first})
    judge.note_answer(1, {"student": second})
    assert list(judge.outliers()) == out


def test_one_of_two_clients_cannot_make_the_weights_of_the_other_unusual() -> None:
    judge = value_checks.SizeChecks()
    for sent in (1.0, 0.5, 0.25):
        judge.start_round()
        judge.note_sent({"bottom weights": sent})
        judge.note_answer(0, {"bottom weights": sent})
        judge.note_answer(1, {"bottom weights": 0.0})
        assert judge.outliers() == {}
        judge.remember()


@pytest.mark.parametrize("first", [0.0, 11.0])
def test_one_of_two_clients_cannot_make_the_features_of_the_other_unusual(first: float) -> None:
    """It sends features near 0, from the first round on or once both were alike."""
    judge = value_checks.SizeChecks()
    for attacker in (first, 0.0, 1e-3, 0.0, 0.0, 0.0, 0.0, 0.0):
        judge.start_round()
        judge.note_answer(0, {"student": 12.0})
        judge.note_answer(1, {"student": attacker})
        assert judge.outliers() == {}
        judge.remember()


def test_half_of_an_even_number_cannot_raise_what_is_usual() -> None:
    assert checked(1.0, 20.0, 1.0, 20.0)[1] == [1, 3]
    assert checked(1.0, 2.0, 3.0, 15.0)[1] == []


@pytest.mark.parametrize(
    ("ratio", "used", "strained"),
    [(2.9, True, False), (3.0, True, True), (9.9, True, True), (10.0, False, False)],
)
def test_between_suspicion_and_refusal_values_are_used_and_remembered(
    ratio: float, used: bool, strained: bool
) -> None:
    judge, out = checked(1.0, 1.0, ratio)
    assert (out == []) is used and judge.is_excused(0) is strained and not judge.is_excused(2)
    assert judge.suspect([]) == (2 if strained else None)
    assert judge.suspect([2]) is None, "who is on trial already is not accused again"


@pytest.mark.parametrize(
    ("ratio", "sent", "strained"), [(2.9, True, False), (9.9, True, True), (10.0, False, True)]
)
def test_what_the_server_sends_is_held_against_the_last_good_round(
    ratio: float, sent: bool, strained: bool
) -> None:
    judge, _ = checked(1.0, usual=1.0)
    assert judge.note_sent({"bottom weights": ratio}) is not sent
    assert judge.is_excused(0) is strained
    judge.start_round()
    assert not judge.is_excused(0)


def test_what_is_usual_follows_slowly() -> None:
    judge, _ = checked(1.0, usual=1.0)
    for size, usual in ((9.0, PACE), (9.0, PACE**2), (0.1, PACE)):
        judge.start_round()
        judge.note_sent({"bottom weights": size})
        judge.remember()
        assert judge.usual["bottom weights"] == pytest.approx(usual)


def test_who_moved_the_weights_is_suspected_before_who_has_large_features() -> None:
    judge = value_checks.SizeChecks(updates_limited=True)
    for client, (update, feature) in enumerate([(0.01, 9.0), (0.01, 1.0), (8.0, 1.0)]):
        judge.note_answer(client, {"bottom update": update, "student": feature})
    assert judge.outliers() == {} and judge.suspect([]) == 2 and judge.suspect([2]) == 0


@pytest.mark.parametrize(("moved", "out"), [(0.4, []), (0.6, [2])])
def test_an_update_is_too_long_only_if_it_changes_the_weights_much(
    moved: float, out: list[int]
) -> None:
    """Where the others found no confident label, an honest update is many times theirs."""
    sent = {"w": torch.ones(4), "bn.running_var": torch.ones(4), "n": torch.tensor(3)}
    judge = value_checks.SizeChecks()
    for client, far in enumerate((0.001, 0.001, moved)):
        state = {"w": sent["w"] * (1 + far), "bn.running_var": 90 * torch.ones(4), "n": sent["n"]}
        size = value_checks.update_size(state, sent)
        assert size == pytest.approx(far, rel=1e-3)
        judge.note_answer(client, {"bottom update": size})
    assert list(judge.outliers()) == out


def test_announced_noise_explains_features_up_to_a_limit_and_no_weights() -> None:
    extremes = {"student": (-20.0, 5.0), "bottom/conv.weight": (-1.0, 2.0)}
    assert value_checks.sizes(extremes) == {"student": 20.0, "bottom weights": 2.0}
    assert value_checks.sizes(extremes, 1.0) == pytest.approx(
        {"student": 13.3, "bottom weights": 2.0}
    )
    assert value_checks.sizes(extremes, 1e9) == {"student": 2.0, "bottom weights": 2.0}
