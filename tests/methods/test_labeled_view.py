"""``server.labeled_view``: every method shows its labelled images as the configuration says."""

from typing import Any

import pytest
import torch

from semisfl.settings.catalog import METHODS
from semisfl.settings.config import parse
from tests import toy


def first_loss(method: str, *changes: str) -> float | None:
    experiment = toy.assemble(method, *changes)
    return experiment.method.round(0).loss_supervised


@pytest.mark.parametrize("method", METHODS)
def test_every_method_reads_the_view(method: str) -> None:
    own = "strong" if method == "semisfl" else "weak"
    views = ("strong", "weak", "both", "mixed")
    losses = {view: first_loss(method, f"server.labeled_view={view}") for view in views}
    assert len(set(losses.values())) == 4
    assert first_loss(method) == losses[own]
    assert parse({"method": method}).labeled_view == own


def test_a_view_that_the_method_has_anyway_is_the_same_configuration() -> None:
    for method, own in (("semisfl", "strong"), ("fedswitch-sl", "weak")):
        message = parse({"method": method, "server": {"labeled_view": own, "steps": 7}})
        assert message == parse({"method": method, "server": {"steps": 7}})
    assert parse({"server": {"labeled_view": "weak"}}).server.labeled_view == "weak"


def test_both_views_of_an_image_have_its_label() -> None:
    """The second half shows the same images as the first, weakly."""
    method: Any = toy.assemble("supervised", "data.augment.flip=false").method
    labeled = method.supervised.labeled
    labeled.start(0, 1, "both", views=1)
    images, (labels, *_) = labeled.next()
    strong, weak = images.chunk(2)
    assert torch.equal(*labels.chunk(2)) and not torch.equal(strong, weak)
    # A class is a colour, which a weak view keeps.
    colours = weak.mean((2, 3))
    for label in labels.unique():
        alike = colours[labels.chunk(2)[1] == label]
        assert (alike - alike.mean(0)).abs().max() < 0.35
