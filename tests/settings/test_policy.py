"""Policies of devices: which are valid, which of two is stricter, and when a cap is reached."""

from pathlib import Path

import pytest

from semisfl.fleet.caps import Spent, most_uses
from semisfl.fleet.consent import objections
from semisfl.settings.config import ConfigError, parse
from semisfl.settings.policy import Policy, parse_policy, read_policy, stricter


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
        ({"epsilon": 2.0}, r"policy\.epsilon = 2\.0 is a setting that only version 0\.1\.0 has"),
        ({"hijacking": "maybe"}, "hijacking: "),
    ],
)
def test_a_contradictory_policy_is_one_line(values: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_policy(values)


def test_the_stricter_of_two_policies_counts_in_every_line() -> None:
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


def test_caps_end_a_clients_part() -> None:
    assert most_uses(steps=10, batch=32, count=100) == 4
    policy = Policy(rounds=5, uses_per_image=8)
    spent = Spent()
    for _ in range(2):
        assert spent.refusal(policy, 4) is None
        spent.take(4)
    assert "used 12 times, the policy has uses_per_image = 8" in (spent.refusal(policy, 4) or "")
    assert "rounds = 2" in (spent.refusal(Policy(rounds=2), 0) or "")
