"""Which values of a client are believed."""

import math

import pytest
import torch

from semisfl.net.server import plausible


def unbelievable(tensors: dict[str, torch.Tensor]) -> str | None:
    return plausible.unbelievable(tensors, plausible.ranges(tensors))


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, 1.1e6, -1.1e6], ids=lambda value: f"{value:g}"
)
def test_one_impossible_number_spoils_a_tensor(value: float) -> None:
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
