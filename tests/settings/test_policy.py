"""Policies of devices: which are valid, which of two is stricter, and when a cap is reached."""

from dataclasses import replace
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from semisfl.fleet.caps import RoundSizes, RoundUse, Spent, most_uses
from semisfl.fleet.consent import about_batch, objections
from semisfl.settings.config import ConfigError, parse
from semisfl.settings.policy import (
    DevicePolicy,
    Policy,
    PolicyBreach,
    parse_policy,
    read_policy,
    row_bits,
    stricter,
)


def test_a_file_may_have_its_keys_alone_or_in_a_section(tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    for text in ('codec = "int8"\nrounds = 3\n', '[policy]\ncodec = "int8"\nrounds = 3\n'):
        file.write_text(text)
        assert read_policy(file) == DevicePolicy(codec="int8", rounds=3)


@pytest.mark.parametrize("text", ["", "# rounds = 3\n", "[policy]\n"])
def test_a_file_without_a_line_is_not_a_policy_without_limits(tmp_path: Path, text: str) -> None:
    file = tmp_path / "policy.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"policy\.toml holds no line of a policy; policies/open"):
        read_policy(file)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"nose": 1}, "unknown key 'nose'; did you mean 'noise'"),
        ({"zzz": 1}, "unknown key 'zzz'; known: codec, clip"),
        ({"noise": 1, "clip": -1}, "policy: clip = -1: should be greater than 0, or none"),
        ({"noise": -1}, "noise = -1: should be greater than or equal to 0"),
        ({"update_noise": 1.0}, "update_noise = 1 is in units of policy.update_clip"),
        (
            {"noise": 0.14, "update_clip": 1, "update_noise": 1},
            r"noise = 0\.14 is in units of policy\.clip",
        ),
        ({"bits_per_image": 50}, r"bits_per_image = 50 needs noise on all .* set policy\.clip and"),
        (
            {"bits_per_image": 50, "update_clip": 1, "update_noise": 0.1, "clip": 1},
            "bits_per_image = 50 needs noise on all",
        ),
        ({"trained_bottom": "none"}, "trained_bottom"),
    ],
)
def test_a_contradictory_policy_is_one_line(values: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_policy(values)


@pytest.mark.parametrize(("clip", "noise"), [("clip", "noise"), ("update_clip", "update_noise")])
def test_a_smaller_clip_makes_no_amount_of_noise_smaller(clip: str, noise: str) -> None:
    rest = {"clip": 1.0, "noise": 0.1, "update_clip": 1.0, "update_noise": 0.1}
    own, asked = DevicePolicy(**{**rest, noise: 0.5}), Policy(**{**rest, clip: 0.25})
    both = stricter(own, asked)
    assert getattr(both, clip) == 0.25 and getattr(both, noise) == pytest.approx(2.0)


def test_the_stricter_of_two_policies_counts_in_every_line() -> None:
    own = DevicePolicy(
        codec="int8",
        clip=4.0,
        noise=0.5,
        rounds=10,
        full_models=False,
        update_noise=0.1,
        update_clip=1.0,
        bits_per_image=70,
    )
    asked = Policy(clip=2.0, noise=0.1, update_noise=0.3, update_clip=1.0)
    both = stricter(own, asked)
    assert both.codec == "int8" and not both.full_models
    assert (both.clip, both.rounds, both.update_noise) == (2.0, 10, 0.3)
    assert both.bits_per_image == 70
    # 0.5 of a clip of 4 is an amount of 2, which a smaller clip must not make less.
    assert both.noise * both.clip == pytest.approx(2.0)
    assert stricter(own, Policy()) == own
    assert stricter(DevicePolicy(), own).noise == own.noise


def test_terms_are_held_against_the_policy() -> None:
    config = parse({"wire": {"student_features": "int8", "teacher_features": "fp16"}})
    assert objections(Policy(codec="fp16"), config) == []
    (message,) = objections(Policy(codec="int8"), config)
    assert message.startswith("wire.teacher_features = 'fp16' is finer")


def test_noise_on_features_needs_noise_on_a_bottom_that_is_sent_back() -> None:
    noisy = {"clip": 40.0, "noise": 0.14, "bits_per_image": 50}
    frozen = parse({"clients": {"bottom": "frozen"}, "policy": noisy})
    for values in ({"clip": 40.0}, noisy, {**noisy, "update_clip": 1.0}):
        policy = parse_policy(values)
        assert objections(policy, frozen) == []
        (line,) = objections(policy, parse({}))
        assert "set policy.update_clip and policy.update_noise too" in line
        with pytest.raises(ConfigError, match=r"policy\.update_noise too .* clients\.bottom"):
            parse({"policy": values})
    assert objections(NOISY, parse({})) == []


def test_an_owner_may_take_part_with_a_frozen_bottom_alone() -> None:
    own = DevicePolicy(trained_bottom=False, full_models=True)
    assert objections(own, parse({"clients": {"bottom": "frozen"}})) == []
    for method in ("semisfl", "semifl"):
        (line,) = objections(own, parse({"method": method}))
        assert "set clients.bottom = 'frozen', or join with trained_bottom = true" in line


FOR_FEATURES: dict[str, Any] = {
    **{"codec": "int8", "clip": 1.0, "noise": 0.1, "update_clip": 1.0, "update_noise": 0.1},
    **{"bits_per_image": 9.0, "uses_per_image": 3},
}


FOR_BOTH = {"rounds", "model", "full_models", "trained_bottom", "smallest_batch"}


def test_a_line_that_does_nothing_for_whole_models_excludes_methods_that_send_them() -> None:
    whole = parse({"method": "semifl"})
    assert set(DevicePolicy.model_fields) == {*FOR_FEATURES, *FOR_BOTH}
    for name, value in FOR_FEATURES.items():
        policy = DevicePolicy.model_construct(
            **{**dict(DevicePolicy()), name: value, "full_models": True}
        )
        (line,) = objections(policy, whole)
        assert f"sends whole models, for which the policy's {name} would do nothing" in line
    allowed = DevicePolicy(rounds=3, full_models=True)
    assert objections(allowed, whole) == []


def test_a_device_keeps_whole_models_unless_its_owner_says_otherwise() -> None:
    whole, split = parse({"method": "semifl"}), parse({})
    assert objections(Policy(), whole) == [], "a simulation has no owner"
    for policy in (DevicePolicy(), DevicePolicy(full_models=False)):
        (line,) = objections(policy.of_device(), whole)
        assert "join with full_models = true in the file of --policy" in line
        assert objections(policy.of_device(), split) == []
    allowed = DevicePolicy(full_models=True).of_device()
    assert objections(allowed, whole) == []
    assert stricter(DevicePolicy().of_device(), Policy()).full_models is False
    assert stricter(allowed, Policy()).full_models is True


ON_DEVICES = {"model": ["sha256:" + "0a" * 32], "full_models": False}
ON_DEVICES |= {"trained_bottom": False, "rounds": 3, "smallest_batch": 8}


@pytest.mark.parametrize("name", ON_DEVICES)
def test_a_run_has_no_lines_that_only_a_device_can_obey(name: str) -> None:
    assert name not in Policy.model_fields and name in DevicePolicy.model_fields
    with pytest.raises(ConfigError, match=f"unknown key 'policy.{name}'"):
        parse({"policy": {name: ON_DEVICES[name]}})


def test_no_server_changes_the_lines_that_only_an_owner_writes() -> None:
    run = parse({"policy": {"clip": 1.0, "update_clip": 1.0, "update_noise": 0.1}})
    own, lines = DevicePolicy(**ON_DEVICES), set(ON_DEVICES)
    both = stricter(own, run.policy)
    assert both.model_dump(include=lines) == own.model_dump(include=lines) and both.clip == 1.0


def test_the_terms_that_a_device_accepts_are_digests() -> None:
    digest = "sha256:" + "0a" * 32
    assert parse_policy({"model": digest}).model == (digest,)
    assert parse_policy({"model": [digest, digest]}).model == (digest, digest)
    for wrong in ("cnn", "sha256:0a", "SHA256:" + "0A" * 32, ["cnn"], 7):
        with pytest.raises(ConfigError, match="model"):
            parse_policy({"model": wrong})


def test_a_batch_has_four_images_unless_the_owner_allows_fewer() -> None:
    assert about_batch(DevicePolicy(), 4) == about_batch(DevicePolicy(smallest_batch=1), 1) == []
    (line,) = about_batch(DevicePolicy(), 3)
    assert "clients.batch = 3 is below the policy's smallest_batch = 4; set clients.batch" in line


def test_caps_end_a_clients_part() -> None:
    assert most_uses(steps=10, batch=32, count=100) == 4
    policy = DevicePolicy(rounds=5, uses_per_image=8)
    spent = Spent()
    for _ in range(2):
        spent = spent.plus(RoundUse(uses=4))
        assert spent.excess(policy) is None
    after = spent.plus(RoundUse(uses=4))
    assert "used 12 times, the policy has uses_per_image = 8" in (after.excess(policy) or "")
    assert "rounds = 2" in (after.excess(DevicePolicy(rounds=2)) or "")
    for bits, fits in ((50.0, True), (50.1, False), (inf, False)):
        twice = Spent().plus(RoundUse(1, bits)).plus(RoundUse(1, bits))
        assert (twice.excess(NOISY) is None) == fits


NOISY = DevicePolicy(clip=1.0, noise=0.14, update_clip=1.0, update_noise=0.01, bits_per_image=100.0)
HELD = RoundSizes(images=320, batch=32, features=512, weights=52_096)


def test_a_round_costs_the_capacity_of_every_row_and_of_the_upload() -> None:
    assert row_bits(512, 0.14) == pytest.approx(35.1, abs=0.1)
    assert row_bits(512, 0.05) == pytest.approx(213, abs=0.5)
    assert row_bits(10**9, 0.14) == pytest.approx(0.7213 / 0.14**2, rel=1e-3)
    assert row_bits(1, 1.0) == pytest.approx(0.5)
    assert row_bits(512, 0.0) == inf
    price = RoundUse.of_split(NOISY, 10, HELD)
    assert price.uses == 1
    # Both views of one image, and all weights as one row: however many images share the upload.
    assert price.bits == pytest.approx(2 * row_bits(512, 0.14) + row_bits(52_096, 0.01))
    fewer = RoundUse.of_split(NOISY, 10, replace(HELD, images=100))
    assert fewer.bits - price.bits == pytest.approx(2 * 3 * row_bits(512, 0.14))
    unbounded = Policy(update_clip=1.0, update_noise=0.01)
    assert RoundUse.of_split(unbounded, 10, HELD).bits == inf


@pytest.mark.parametrize(("uses", "bits"), [(-1, 1.0), (1, -1.0), (0, nan)])
def test_nothing_is_given_back(uses: int, bits: float) -> None:
    """A server that asks for -1000 steps gains no uses."""
    with pytest.raises(PolicyBreach, match="would give back what was spent"):
        Spent(3, 4, 5.0).plus(RoundUse(uses, bits))
