"""The rules of who comes in, one by one; that they are followed is tested with real connections."""

from typing import Any

import pytest

from semisfl.models.build import build
from semisfl.net import messages
from semisfl.net.frames import PROTOCOL, decode, encode
from semisfl.net.messages import Schemas
from semisfl.net.server.admission import (
    MOST_IMAGES,
    Refused,
    check_hello,
    check_ready,
    policy_of,
)
from semisfl.net.server.roster import Roster
from semisfl.net.terms import Terms
from semisfl.settings import config
from semisfl.settings.policy import DevicePolicy

SETTINGS = config.parse(
    {"clients": {"total": 2, "active": 1}, "wire": {"gradients": "int8", "models": "fp16"}}
)
TERMS = Terms(SETTINGS, (1, 28, 28), 10, (0.5,), (0.5,))
SCHEMAS = Schemas.of(SETTINGS, build("cnn", (1, 28, 28), 10, projector="none"))


def hello(**change: Any) -> dict[str, Any]:
    """Return the fields of a fitting hello with ``change``."""
    frame = encode("hello", messages.hello(["semifl", "semisfl"], run=TERMS.run), {})
    return {**decode(b"".join(frame), {"hello": messages.HELLO}).fields, **change}


def ready(**change: Any) -> dict[str, Any]:
    return {"model": SCHEMAS.digest, "images": 5, "skipped": 0, **change}


def roster(*names: str) -> Roster:
    known = Roster(2)
    for name in names:
        known.enrol(name, 5)
    return known


@pytest.mark.parametrize("run", ["", TERMS.run])
def test_clients_that_fit_are_admitted(run: str) -> None:
    check_hello(hello(run=run), "ann", TERMS, roster())
    check_hello(hello(run=run), "ann", TERMS, roster("bob"))
    check_ready(ready(), SCHEMAS)
    check_ready(ready(images=MOST_IMAGES, skipped=MOST_IMAGES), SCHEMAS)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"protocol": PROTOCOL - 1}, "install the same semisfl"),
        ({"protocol": PROTOCOL + 1}, "install the same semisfl"),
        ({"run": "another"}, "the client belongs to run 'another'"),
        ({"codecs": ["fp32", "int8", 7]}, "does not know the codecs fp16"),
        ({"codecs": []}, "does not know the codecs fp16, fp32, int8"),
        ({"methods": ["semifl"]}, "does not have method 'semisfl'"),
        ({"policy": {"codec": "int8"}}, "policy: wire.student_features = 'fp32' is finer than"),
        ({"policy": {"layers": "fc1"}}, "unknown key 'layers'"),
        (
            {"policy": {"noise": -1.0}},
            r"policy: noise = -1\.0: should be greater than or equal to 0",
        ),
        ({"policy": {"nose": 1.0}}, "policy: unknown key 'nose'; did you mean 'noise'"),
        ({"policy": {"x" * 200: 1.0}}, "policy: unknown key 'xxx.*; known: codec, clip"),
        ({"policy": {"codec": "int-8"}}, "policy: policy.codec = 'int-8' is not known; use fp32"),
        ({"policy": {"codec": "antigravity:fly"}}, "policy names antigravity:fly, code that would"),
    ],
)
def test_clients_that_do_not_fit_get_the_reason(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        check_hello(hello(**change), "ann", TERMS, roster())


def test_a_place_once_given_is_kept_and_others_find_none() -> None:
    full = roster("ann", "bob")
    check_hello(hello(), "bob", TERMS, full)
    with pytest.raises(Refused, match=r"all clients\.total = 2 places are taken and eve has none"):
        check_hello(hello(), "eve", TERMS, full)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model": "0" * 32}, "the client built model"),
        ({"images": 0}, "the client has no images"),
        ({"images": -3}, "the client has no images"),
        ({"images": MOST_IMAGES + 1}, "says images = "),
        ({"skipped": -1}, "says skipped = -1"),
        ({"skipped": MOST_IMAGES + 1}, "says skipped = "),
    ],
)
def test_what_a_client_says_it_holds_is_checked(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        check_ready(ready(**change), SCHEMAS)


def test_a_server_does_not_hear_which_terms_of_others_a_device_accepts() -> None:
    policy = DevicePolicy(model=("sha256:" + "7" * 64,), rounds=9)
    fields = messages.hello(["semisfl"], policy=policy)
    assert "7777" not in str(fields) and policy_of(fields) == DevicePolicy(rounds=9)
