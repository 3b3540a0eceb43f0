"""Test that a device checks a server's terms before it allocates anything."""

import json
from typing import Any

import pytest

from semisfl.engine.hardware import Hardware
from semisfl.net.client.member import Member
from semisfl.net.frames import WireError
from semisfl.net.messages import SMALL
from semisfl.net.terms import Terms, placed_model
from semisfl.settings.layer_kinds import MAX_LAYERS
from tests.net.harness import CLASSES, SIDE, tiny

HEAD = [{"kind": "flatten"}, {"kind": "linear"}]


def terms(layers: Any) -> str:
    plain = json.loads(Terms(tiny(), (1, SIDE, SIDE), CLASSES, (0.5,), (0.5,)).to_json())
    plain["config"]["model"]["layers"] = layers
    return json.dumps(plain)


def test_a_table_reaches_the_device_as_it_was_sent() -> None:
    body = [{"kind": "relu", "name": "only"}]
    sent = [{"kind": "conv", "channels": 3}, {"kind": "residual", "body": body}, *HEAD]
    received = Terms.from_json(terms(sent), ["semisfl"])
    named = [{**row, "name": f"{row['kind']}1"} for row in sent]
    assert received.config.model.model_dump(mode="json")["layers"] == named
    assert Terms.from_json(received.to_json(), ["semisfl"]).run == received.run


def test_the_largest_table_fits_into_a_welcome() -> None:
    longest = {"name": "a" * 40, "kind": "conv", "channels": 65_536, "kernel": 64, "stride": 64}
    row = {**longest, "padding": 64, "bias": False, "groups": 65_536}
    rows = [{**row, "name": f"{number:040}"} for number in range(MAX_LAYERS)]
    assert len(Terms.from_json(terms(rows), ["semisfl"]).to_json()) < SMALL - 1024


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        (
            [{"kind": "relu"}] * 1000,
            "model.layers has 1000 layers, blocks included; it must have 1 to 256",
        ),
        ([{"kind": "conv", "channels": 10**12}], "model.layers[0].channels = 1000000000000"),
        ([{"kind": "__import__"}], "model.layers[0].kind = '__import__' is not known"),
        ([{"kind": "conv", "channels": 3, "hook": "x"}], "unknown key 'model.layers[0].hook'"),
    ],
)
def test_a_table_beyond_the_limits_is_refused_when_read(layers: Any, reason: str) -> None:
    with pytest.raises(WireError) as error:
        Terms.from_json(terms(layers), ["semisfl"])
    assert reason in str(error.value) and "\n" not in str(error.value)


def test_terms_without_end_are_refused() -> None:
    with pytest.raises(WireError, match="the server's terms cannot be read"):
        Terms.from_json("[" * 60_000, ["semisfl"])


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
    with pytest.raises(ValueError, match=error):
        Member(
            Terms.from_json(terms(layers), ["semisfl"]),
            lambda shape: pytest.fail("too late"),
            Hardware("cpu"),
        )


@pytest.mark.parametrize(("cut", "side"), [(1, "device"), (4, "server")])
def test_a_model_that_leaves_one_side_nothing_to_train_is_not_asked_about(
    cut: int, side: str
) -> None:
    """Its owner would accept the terms, and then read of a mistake on the device."""
    rows = [{"kind": "relu"}, {"kind": "conv", "channels": 3}, *HEAD, {"kind": "relu"}]
    model = Terms.from_json(terms(rows), ["semisfl"]).config.model
    with pytest.raises(WireError, match=f"leaves the {side} no parameters"):
        placed_model(model.model_copy(update={"cut": cut}), (1, SIDE, SIDE), CLASSES)
