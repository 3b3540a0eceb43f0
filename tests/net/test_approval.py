"""Servers whose terms the owner of a device did not accept: nothing is computed for them, nothing sent."""

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from PIL import Image

from semisfl.cli import devices
from semisfl.cli.main import main
from semisfl.net.client.join import join
from semisfl.net.client.owner import Approval
from semisfl.net.client.rejection import Rejected
from semisfl.net.client.shown_terms import read_terms, text_of_terms
from semisfl.net.frames import WireError
from semisfl.net.server import sessions
from semisfl.net.terms import Terms
from semisfl.net.tls import certs
from semisfl.settings.config import Config
from semisfl.settings.policy import PolicyBreach
from semisfl.settings.presets import PRESETS
from tests.net.harness import CLASSES, SIDE, Network, audited, certificates, network, tiny, until

CONV = {"kind": "conv", "channels": 4, "kernel": 3}
TAIL = [{"kind": "flatten", "name": "flatten"}, {"kind": "linear", "name": "fc"}]
HONEST = [CONV, {"kind": "relu"}, *TAIL]


def config(**changes: Any) -> Config:
    return tiny(1, **{"model": {"layers": HONEST, "cut": "flatten"}, **changes})


def terms(**changes: Any) -> Terms:
    return Terms(config(**changes), (1, SIDE, SIDE), CLASSES, (0.5,), (0.5,))


# What a server could do to get at images, its terms looking much the same by name.
ATTACKS: dict[str, dict[str, Any]] = {
    "a 1x1 convolution called flatten": {
        "model": {
            "layers": [
                {"kind": "conv", "channels": 1, "kernel": 1, "name": "flatten"},
                *({"kind": "flatten", "name": "rest"}, TAIL[1]),
            ],
            "cut": "flatten",
        }
    },
    "twelve dropouts that drop nothing": {
        "model": {"layers": [*[{"kind": "dropout", "p": 0.0}] * 12, *HONEST], "cut": 13}
    },
    "an earlier cut": {"model": {"layers": HONEST, "cut": 1}},
    "a wider kernel": {
        "model": {"layers": [{**CONV, "padding": 1}, *HONEST[1:]], "cut": "flatten"}
    },
    "another method": {"method": "fedswitch-sl"},
    "whole models": {"method": "fedswitch"},
    "no augmentation": {"data": {"augment": {"cutout": 0, "flip": False}}},
    "a batch of one": {"clients": {"batch": 1}},
    "more steps": {"clients": {"steps": 3}},
    "more rounds": {"rounds": 3},
    "another seed": {"seed": 6},
    "a finer codec": {"wire": {"teacher_features": "fp16"}},
    "a teacher that follows": {"semisfl": {"client_teacher": "ema"}},
    "another learning rate": {"optimizer": {"lr": 5.0}},
    "no policy": {"policy": {"uses_per_image": 9}},
    "another precision": {"runtime": {"precision": "bf16"}},
    "a frozen bottom": {"clients": {"bottom": "frozen"}},
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_every_change_of_what_a_device_computes_or_sends_changes_the_digest(attack: str) -> None:
    accepted, other = terms(), terms(**ATTACKS[attack])
    assert accepted.digest != other.digest and accepted.run != other.run
    with pytest.raises(PolicyBreach, match=other.digest):
        Approval([accepted.digest]).check(other.digest)
    Approval([accepted.digest]).check(accepted.digest)


NO_MATTER = {
    *("another method", "a batch of one", "more steps", "more rounds", "another learning rate"),
    "a teacher that follows",
}
"""Changes that a device whose bottom is frozen never hears of."""


@pytest.mark.parametrize("attack", sorted({*ATTACKS} - {"whole models", "a frozen bottom"}))
def test_the_terms_of_a_frozen_bottom_hold_what_its_rows_follow_from(attack: str) -> None:
    changes = ATTACKS[attack]
    clients = {"bottom": "frozen", **changes.get("clients", {})}
    other = terms(**{**changes, "clients": clients})
    assert (other.digest == terms(clients={"bottom": "frozen"}).digest) == (attack in NO_MATTER)
    assert terms(clients={**clients, "strong_views": 5}).digest != other.digest


@pytest.mark.parametrize(
    ("field", "value"), [("shape", (1, 12, 12)), ("classes", 9), ("mean", (0.4,)), ("std", (0.1,))]
)
def test_the_images_a_device_makes_are_part_of_the_digest(field: str, value: Any) -> None:
    plain = vars(terms())
    assert Terms(**{**plain, field: value}).digest != terms().digest


def test_what_stays_on_the_server_changes_no_digest() -> None:
    own = terms(
        clients={"total": 4, "active": 2},
        server={"steps": 7, "batch": 3},
        network={"deadline": 3.0},
        semisfl={"temperature": 0.5, "queue_size": 3},
        model={
            "layers": [*HONEST[:3], {"kind": "linear", "features": 9}, TAIL[1]],
            "cut": 3,
            "projection": 5,
        },
        robust={"aggregate": "median"},
    )
    assert own.digest == terms().digest
    named = Terms(tiny(1), (1, 28, 28), 10, (0.5,), (0.5,))
    table = json.loads(named.to_json())["config"]["model"]
    spelled = Terms(tiny(1, model=table), (1, 28, 28), 10, (0.5,), (0.5,))
    assert spelled.digest == named.digest, "a named model is its layers"


def test_a_device_obeys_nothing_that_the_digest_does_not_cover() -> None:
    plain = json.loads(terms().to_json())
    plain["config"]["semisfl"]["queue_size"] = 77
    plain["config"]["network"] = {"deadline": 1.0}
    plain["config"]["clients"]["total"] = 900
    received = Terms.from_json(json.dumps(plain), ["semisfl"])
    assert received.digest == terms().digest
    honest = Terms.from_json(terms().to_json(), ["semisfl"])
    assert received == honest and honest.digest == terms().digest


def ended(net: Network) -> str:
    client = net.clients[0]
    until(lambda: client.error is not None)
    assert isinstance(client.error, Rejected), client.error
    assert net.fleet.traffic.total() == 0 and client.device.joined is None
    return str(client.error)


@pytest.mark.parametrize("attack", ["a 1x1 convolution called flatten", "no augmentation"])
def test_a_server_with_other_terms_gets_nothing(
    attack: str, caplog: pytest.LogCaptureFixture
) -> None:
    accepted = Approval([terms().digest])
    with network(config(**ATTACKS[attack])) as net:
        net.join(0, approval=accepted, load=lambda shape: pytest.fail("images were read"))
        assert f"has not accepted the terms {net.fleet.terms.digest}" in ended(net)
        until(lambda: bool(audited(caplog)))


def test_other_terms_with_the_same_short_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two terms whose digests begin alike take 2^64 attempts, which a server can afford."""
    monkeypatch.setattr(Terms, "run", "0" * 32)
    change_the_terms(monkeypatch)


def test_terms_that_change_at_a_reconnection_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    change_the_terms(monkeypatch)


def change_the_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train one round, then show the device other terms."""
    monkeypatch.setattr(sessions, "check_hello", lambda *_: None)
    with network(config(rounds=3)) as net:
        accepted = Approval([net.fleet.terms.digest])
        client = net.enrol(0, approval=accepted)
        net.experiment.method.round(0)
        other = terms(rounds=3, data={"augment": {"cutout": 0}})
        net.fleet.sessions.terms = other  # with the run's old name: that counts for nothing
        net.fleet.sessions.enrolled[0].close(grpc.StatusCode.UNAVAILABLE, "come again")
        until(lambda: client.error is not None)
        assert f"has not accepted the terms {other.digest}" in str(client.error)


def test_a_connection_without_an_owners_word_accepts_nothing() -> None:
    with network(config()) as net:
        net.join(0, approval=Approval())
        assert "has not accepted the terms" in ended(net)


def test_terms_that_are_named_replace_those_that_are_remembered(tmp_path: Path) -> None:
    file, other = tmp_path / "accepted.txt", terms(data={"augment": {"cutout": 0}})
    Approval([terms().digest], file).check(terms().digest)
    for _ in range(2):
        named = Approval([other.digest], file)
        named.check(other.digest)
        with pytest.raises(PolicyBreach):
            named.check(terms().digest)
    assert file.read_text().split() == [terms().digest, other.digest], "each once"
    assert file.stat().st_mode & 0o777 == 0o600
    Approval(file=file).check(terms().digest)


def test_the_shown_terms_say_what_a_layer_is_not_what_it_is_called() -> None:
    lying = text_of_terms(terms(**ATTACKS["a 1x1 convolution called flatten"]))
    assert "1 conv channels=1 kernel=1 stride=1" in lying and "(flatten)" in lying
    text = text_of_terms(terms())
    assert text.isascii() and terms().digest in text
    # 4 channels of 14 x 14 pixels, twice, as fp32; 3 x 3 weights and a bias for each channel.
    assert "two views of 784 values, 6,272 bytes (an image has 256 values)" in text
    assert "40 parameters in 3 layers; the server runs the layers above" in text
    assert "flip on, cutout 4" in text and "4 images each" in text
    full_model = text_of_terms(terms(method="fedswitch"))
    assert "WHOLE MODELS of 3,180 values" in full_model and "iid_threshold" in full_model
    with pytest.raises(WireError, match="cannot be cut at 9"):
        text_of_terms(terms(model={"layers": HONEST, "cut": 9}))


# --- the commands --------------------------------------------------------------------------------


def test_join_refuses_with_the_line_that_accepts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.new("L", (SIDE, SIDE)).save(tmp_path / "one.png")
    with network(config()) as net:
        words = ["join", net.address, "--data", str(tmp_path), "--insecure-loopback"]
        assert main([*words, "--name", "client-0"]) != 0
        line = capsys.readouterr().err.strip().splitlines()[-1]
        digest = net.fleet.terms.digest
        assert "`semisfl inspect` shows them" in line and f"--accept {digest}" in line


def test_a_policy_with_a_model_accepts_that_one_alone(tmp_path: Path) -> None:
    Image.new("L", (SIDE, SIDE)).save(tmp_path / "one.png")
    policy = tmp_path / "policy.toml"
    policy.write_text(f'model = "{terms(rounds=7).digest}"\n')
    with network(config()) as net, pytest.raises(Rejected, match=r"has not accepted the terms"):
        join(
            net.address,
            tmp_path,
            certificates=None,
            insecure_loopback=True,
            name="client-0",
            policy=policy,
            accept=[net.fleet.terms.digest],
        )


def test_inspect_shows_a_servers_terms_and_takes_no_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    authority = certificates(tmp_path / "certs", 1)
    caplog.set_level(logging.INFO, "semisfl")
    with network(config(), certificates=authority) as net:
        net.join_all()
        folder = shutil.copytree(authority / "clients" / "client-0", tmp_path / "device")
        for _ in range(2):
            assert main(["inspect", net.address, "--certs", str(folder)]) == 0
        printed = capsys.readouterr().out
        assert printed == 2 * (text_of_terms(net.fleet.terms) + "\n")
        assert main(["inspect", net.address, "--certs", str(folder), "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert answer["digest"] == net.fleet.terms.digest
        net.experiment.method.round(0)
        assert net.clients[0].link.losses == 0, "the same certificate is at work undisturbed"
        certs.revoke(authority, name="client-0")
        with pytest.raises(ValueError, match="revoked"):
            read_terms(net.address, certs.load_client_credentials(folder))
    assert not (folder / "accepted.txt").exists()


def test_what_inspect_prints_without_a_network_is_what_a_server_sends() -> None:
    planned = devices.planned_terms("digits", ["rounds=3"], None)
    assert planned.shape == (1, 28, 28) and planned.classes == 10
    assert planned.digest != devices.planned_terms("digits", None, None).digest
    fresh, again, other, coded = (
        devices.planned_terms("digits", ["clients.bottom=frozen", "rounds=3", *more], None)
        for more in ([], [], ["seed=1"], ["wire.models=int8"])
    )
    assert (
        fresh.bottom == again.bottom
        and len({planned.bottom, fresh.bottom, other.bottom, coded.bottom}) == 4
    )
    assert fresh.digest != replace(
        fresh, bottom=other.bottom
    ).digest and other.bottom in text_of_terms(other)
    assert Terms.from_json(fresh.to_json(), ["semisfl"]).digest == fresh.digest
    for wrong in (replace(fresh, bottom=None), replace(planned, bottom=fresh.bottom)):
        with pytest.raises(WireError, match="does not fit"):
            Terms.from_json(wrong.to_json(), ["semisfl"])
    with pytest.raises(ValueError, match="inspect needs --certs DIR"):
        devices.inspect("localhost:1")


def test_images_of_clients_beside_the_labelled_ones_change_no_terms(tmp_path: Path) -> None:
    for folder, side in (("train/a", 16), ("train/b", 16), ("test/a", 16), ("clients/one", 20)):
        (tmp_path / folder).mkdir(parents=True)
        for number in range(8):
            Image.new("RGB", (side, side)).save(tmp_path / folder / f"{number}.png")
    assert devices.planned_terms("digits", None, tmp_path).shape == (3, 16, 16)


def test_the_page_lists_the_digests_of_the_presets() -> None:
    page = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text(encoding="utf-8")
    table = "".join(
        f"| `{name}` | `{devices.planned_terms(name, None, None).digest}` |\n"
        for name in PRESETS
        if name not in ("images", "photos")  # they have no data set of their own
    )
    assert table in page, f"docs/deploy.md needs this table:\n{table}"
