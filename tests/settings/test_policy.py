"""What a device may insist on, and what noise guarantees."""

import math
from pathlib import Path

import pytest

from semisfl.fleet.caps import Spent, most_uses
from semisfl.fleet.consent import objections
from semisfl.settings.config import ConfigError, parse
from semisfl.settings.policy import (
    Policy,
    guarantee,
    parse_policy,
    read_policy,
    spent_epsilon,
    step_loss,
    stricter,
)


def test_a_file_may_have_its_keys_alone_or_in_a_section(tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    for text in ('codec = "int8"\nnoise = 0.1\n', '[policy]\ncodec = "int8"\nnoise = 0.1\n'):
        file.write_text(text)
        assert read_policy(file) == Policy(codec="int8", noise=0.1)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"nose": 1}, "nose: .*known: codec"),
        ({"noise": -1}, "noise: .*greater than or equal to 0"),
        ({"update_noise": 1.0}, "update_noise = 1 is in units of policy.update_clip"),
        ({"epsilon": 2.0}, "epsilon = 2 cannot be kept: features leave without clip and noise"),
        ({"epsilon": 2.0, "clip": 1.0, "noise": 1.0}, "the bottom sent after each round"),
        ({"hijacking": "maybe"}, "hijacking: "),
    ],
)
def test_what_makes_no_sense_is_said_in_a_line(values: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_policy(values)


def test_the_stricter_of_both_in_every_line() -> None:
    own = Policy(codec="int8", clip=4.0, noise=0.5, rounds=10, hijacking="warn", full_models=False)
    asked = Policy(
        clip=2.0, noise=0.1, rounds=20, hijacking="ignore", update_noise=0.3, update_clip=1.0
    )
    both = stricter(own, asked)
    assert both.codec == "int8" and not both.full_models
    assert (both.clip, both.rounds, both.update_noise) == (2.0, 10, 0.3)
    assert both.hijacking == "warn"
    # 0.5 of a clip of 4 is an amount of 2, which a smaller clip must not make less.
    assert both.noise * both.clip == pytest.approx(2.0)
    assert stricter(own, Policy()) == own
    assert stricter(Policy(), own).noise == own.noise


def test_terms_are_held_against_the_policy() -> None:
    config = parse({"wire": {"student_features": "int8", "teacher_features": "fp16"}})
    assert objections(Policy(codec="fp16"), config) == []
    (said,) = objections(Policy(codec="int8"), config)
    assert said.startswith("wire.teacher_features = 'fp16' is finer")
    assert (
        objections(Policy(layers=7), config) == objections(Policy(layers="flatten"), config) == []
    )
    assert "7 layers" in objections(Policy(layers="relu_fc1"), config)[0]
    early = parse({"model": {"cut": "pool1"}})
    assert "set model.cut = 4" in objections(Policy(layers=4), early)[0]
    whole = parse({"method": "semifl"})
    assert objections(Policy(codec="int8"), whole) == []
    assert "full_models = false" in objections(Policy(full_models=False), whole)[0]
    assert "update_clip" in objections(Policy(update_clip=1.0), whole)[0]


def test_privacy_loss_is_that_of_the_gaussian_mechanism() -> None:
    """Bun and Steinke: rho = distance² / 2 deviation²; epsilon = rho + 2 sqrt(rho log(1 / delta))."""
    policy = Policy(clip=3.0, noise=8.0, update_clip=1.0, update_noise=10.0, delta=1e-6)
    # Two rows, each of which may move by twice the clip.
    by_hand = 2 * (2 * 3.0) ** 2 / (2 * (8.0 * 3.0) ** 2)
    step = step_loss(policy)
    assert step is not None and step.rho == pytest.approx(by_hand)
    total = 12 * by_hand + 5 * (2 * 1.0) ** 2 / (2 * 10.0**2)
    epsilon = total + 2 * math.sqrt(total * math.log(1e6))
    assert spent_epsilon(policy, uses=12, rounds=5) == pytest.approx(epsilon)
    assert f"({epsilon:.3g}, 1e-06)-DP" in guarantee(policy, 12, 5)


def test_where_there_is_no_guarantee_that_is_said() -> None:
    assert guarantee(Policy(), 1, 1).startswith("none")
    assert guarantee(Policy(noise=1.0), 1, 1).startswith("none")  # without a clip
    features_only = guarantee(Policy(clip=1.0, noise=1.0), 1, 1)
    assert "in total none" in features_only and "the bottom sent" in features_only
    whole = Policy(clip=1.0, noise=1.0, update_clip=1.0, update_noise=1.0)
    assert "BatchNorm" in guarantee(whole, 1, 1, batchnorm=True)


def test_caps_end_a_clients_part() -> None:
    assert most_uses(steps=10, batch=32, count=100) == 4
    policy = Policy(rounds=5, uses_per_image=8)
    spent = Spent()
    for _ in range(2):
        assert spent.refusal(policy, 4) is None
        spent.take(4)
    assert "used 12 times, the policy has uses_per_image = 8" in (spent.refusal(policy, 4) or "")
    assert "rounds = 2" in (spent.refusal(Policy(rounds=2), 0) or "")


def test_a_budget_of_epsilon_is_a_cap() -> None:
    policy = Policy(clip=1.0, noise=50.0, update_clip=1.0, update_noise=50.0, epsilon=1.0)
    spent, rounds = Spent(), 0
    while spent.refusal(policy, 2) is None:
        spent.take(2)
        rounds += 1
    within = spent_epsilon(policy, 2 * rounds, rounds)
    beyond = spent_epsilon(policy, 2 * rounds + 2, rounds + 1)
    assert within is not None and beyond is not None and within <= 1.0 < beyond
