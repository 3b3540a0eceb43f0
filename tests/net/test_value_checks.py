"""Which values of a client are believed."""

import math

import pytest
import torch

from semisfl.net.server import value_checks


def unbelievable(tensors: dict[str, torch.Tensor]) -> str | None:
    return value_checks.unbelievable(tensors, value_checks.ranges(tensors))


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, 1.1e6, -1.1e6], ids=lambda value: f"{value:g}"
)
def test_one_impossible_number_makes_a_tensor_unusable(value: float) -> None:
    tensors = {"weight": torch.ones(3, 4), "bias": torch.zeros(5)}
    assert unbelievable(tensors) is None
    tensors["bias"][3] = value
    said = unbelievable(tensors)
    assert said is not None and said.startswith("bias runs from")


def test_large_but_possible_numbers_are_believed() -> None:
    assert unbelievable({"features": torch.tensor([1e6, -1e6]), "none": torch.zeros(0, 4)}) is None


def test_counters_have_a_limit_of_their_own() -> None:
    """A long run counts more batches than any weight is large."""
    for count, believed in ((0, True), (10**7, True), (2**53, True), (2**54, False), (-1, False)):
        said = unbelievable({"bn.num_batches_tracked": torch.tensor(count)})
        assert (said is None) is believed, count


def test_a_variance_is_not_negative_and_a_mean_may_be() -> None:
    values = torch.tensor([0.5, -0.1])
    assert unbelievable({"bn.running_mean": values}) is None
    said = unbelievable({"bn.running_var": values})
    assert said is not None and "cannot be negative" in said


# --- who stands out -------------------------------------------------------------------------------


def screen(*sizes: float, usual: float | None = None) -> tuple[value_checks.Screen, list[int]]:
    """A round whose clients 0, 1, ... sent weights of these ``sizes``; and who must not be used."""
    judge = value_checks.Screen()
    if usual is not None:
        judge.sends({"bottom weights": usual})
        judge.remember()
    judge.start_round()
    for client, size in enumerate(sizes):
        judge.takes(client, {"bottom weights": size})
    return judge, list(judge.outliers())


def test_three_clients_outvote_one_whatever_was_usual() -> None:
    assert screen(1.0, 1.0, 20.0)[1] == [2]
    assert screen(1.0, 1.0, 20.0, usual=15.0)[1] == [2]


def test_two_clients_outvote_nobody_and_are_held_against_the_last_good_round() -> None:
    judge, out = screen(1.0, 20.0)
    assert out == [] and judge.strained and judge.suspect([]) == 1
    assert screen(1.0, 20.0, usual=15.0)[1] == []
    assert screen(1.0, 20.0, usual=1.0)[1] == [1]
    assert screen(20.0, 20.0, usual=1.0)[1] == [0, 1]


def test_half_of_an_even_number_cannot_raise_what_is_usual() -> None:
    assert screen(1.0, 20.0, 1.0, 20.0)[1] == [1, 3]
    assert screen(1.0, 2.0, 3.0, 15.0)[1] == []


@pytest.mark.parametrize(
    ("ratio", "used", "strained"),
    [(2.9, True, False), (3.0, True, True), (9.9, True, True), (10.0, False, False)],
)
def test_between_suspicion_and_refusal_values_are_used_and_remembered(
    ratio: float, used: bool, strained: bool
) -> None:
    judge, out = screen(1.0, 1.0, ratio)
    assert (out == []) is used and judge.strained is strained
    assert judge.suspect([]) == (2 if strained else None)
    assert judge.suspect([2]) is None, "who is on trial already is not accused again"


@pytest.mark.parametrize(
    ("ratio", "sent", "strained"), [(2.9, True, False), (9.9, True, True), (10.0, False, True)]
)
def test_what_the_server_sends_is_held_against_the_last_good_round(
    ratio: float, sent: bool, strained: bool
) -> None:
    judge, _ = screen(1.0, usual=1.0)
    assert judge.sends({"bottom weights": ratio}) is not sent
    assert judge.strained is strained
    judge.start_round()
    assert not judge.strained
