"""Files of earlier versions load to the same run, or are refused with a line that names the version."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from semisfl.settings import config, presets
from semisfl.settings.config import ConfigError, built_in_sections, known_keys, override, parse
from semisfl.settings.policy import parse_policy
from semisfl.settings.retired import ANYTHING, INSTEAD, MOVED, RETIRED
from semisfl.settings.robust import rule_sections
from semisfl.settings.toml import to_toml

ROOT = Path(__file__).parent.parent.parent
OLD = Path(__file__).parent / "digits-0.1.0.toml"
MOST_SETTINGS = 90


def every_key() -> list[str]:
    """Return every setting: the common ones, those of all methods and those of all rules."""
    keys = known_keys(config.Config)
    for prefix, classes in (("", built_in_sections()), ("robust.", rule_sections())):
        for name, section in classes.items():
            keys += known_keys(section, f"{prefix}{name}.")
    return keys


def nested(key: str, value: Any) -> dict[str, Any]:
    for name in reversed(key.split(".")):
        value = {name: value}
    return dict(value)


def with_method(key: str, value: Any) -> dict[str, Any]:
    """Return values in which the retired ``key`` belongs to the chosen method."""
    section = key.partition(".")[0]
    return nested(key, value) | ({"method": section} if section in built_in_sections() else {})


def test_there_are_few_settings() -> None:
    """A setting stays only if a run shows that it pays, the paper has it, or a user must say it."""
    keys = every_key()
    assert len(keys) == len(set(keys)) <= MOST_SETTINGS, len(keys)


def test_a_file_with_all_defaults_of_an_earlier_version_is_todays_preset() -> None:
    values = config.read(OLD)
    assert {"semisfl", "fedmatch", "fedswitch", "semifl", "fl2"} <= values.keys()
    keys = {key for key in (*RETIRED, *MOVED) if _holds(values, key)}
    # A file does not have keys whose value is none.
    assert keys == {*RETIRED, *MOVED} - {key for key in RETIRED if RETIRED[key] == "none"}
    assert parse(values) == presets.preset("digits")
    for method in ("fedmatch", "fedswitch", "supervised"):
        assert parse({**values, "method": method}) == parse(
            presets.values_of("digits") | {"method": method}
        )


def _holds(values: dict[str, Any], key: str) -> bool:
    *sections, leaf = key.split(".")
    for section in sections:
        values = values.get(section, {})
    return leaf in values


def test_no_retired_or_moved_key_is_a_setting_today() -> None:
    known = every_key()
    assert not {*RETIRED, *MOVED} & set(known)
    assert {name for names in MOVED.values() for name in names} <= set(known)


@pytest.mark.parametrize("key", RETIRED)
def test_a_retired_setting_is_dropped_if_it_was_off_and_refused_if_not(key: str) -> None:
    off = "whatever" if RETIRED[key] is ANYTHING else RETIRED[key]
    plain = parse(
        {name: value for name, value in with_method(key, off).items() if name == "method"}
    )
    assert parse(with_method(key, off)) == plain
    if off == "none":
        assert parse(with_method(key, None)) == plain  # as a model's file has it
    if off != "whatever":
        with pytest.raises(ConfigError) as error:
            parse(with_method(key, "other"))
        assert str(error.value) == (
            f"{key} = 'other' is a setting that only version 0.1.0 has; "
            + INSTEAD.get(key, "remove it, or use semisfl 0.1.0")
        )


def test_another_methods_retired_setting_does_not_matter() -> None:
    semisfl = {"sharpness": 0.1, "queue": "balanced", "labels": {"warmup": 3}}
    values = {"method": "semifl", "fedmatch": {"sparse": True}, "semisfl": semisfl}
    assert parse(values) == parse({"method": "semifl"})


def test_a_retired_value_of_a_setting_is_refused_with_its_version() -> None:
    with pytest.raises(ConfigError) as error:
        parse({"semisfl": {"queue": "balanced"}})
    assert str(error.value) == (
        "semisfl.queue = 'balanced' is a setting that only version 0.1.0 has; "
        "remove it, or use semisfl 0.1.0"
    )


def test_a_mistake_in_another_methods_section_is_still_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'fedmatch\.helper'; did you mean"):
        parse({"method": "semisfl", "fedmatch": {"helper": 1}})
    with pytest.raises(ConfigError, match=r"robust\.krum\.attackers = 0\.7"):
        parse({"robust": {"aggregate": "mean", "krum": {"attackers": 0.7}}})


def test_a_moved_setting_of_a_file_counts_under_its_new_name() -> None:
    chosen: Any = parse({"teacher": {"client": "ema"}})
    assert chosen.semisfl.client_teacher == "ema"
    both = {"teacher": {"client": "ema"}, "semisfl": {"client_teacher": "frozen"}}
    newer: Any = parse(both)
    assert newer.semisfl.client_teacher == "frozen"
    robust: Any = parse({"robust": {"aggregate": "krum", "attackers": 0.3, "limit": 2.0}}).robust
    assert robust.krum.attackers == 0.3 and not hasattr(robust, "clipped_mean")
    robust = parse({"robust": {"aggregate": "clipped_mean", "attackers": 0.3, "limit": 2.0}}).robust
    assert robust.clipped_mean.limit == 2.0


@pytest.mark.parametrize(
    ("method", "section", "view", "today"),
    [
        ("semisfl", "semisfl", "strong", "strong"),
        ("semisfl", "semisfl", "weak", "weak"),
        ("semisfl", "semisfl", "both", "both"),
        ("fedswitch-sl", "fedswitch", "strong", "strong"),
        ("fedswitch", "fedswitch", "weak", "weak"),
        # Another method's section of a file does not matter.
        ("fedswitch-sl", "semisfl", "strong", "weak"),
        ("supervised", "semisfl", "both", "weak"),
        ("semisfl", "fedswitch", "weak", "strong"),
    ],
)
def test_a_view_of_labelled_images_in_a_methods_section_means_the_same(
    method: str, section: str, view: str, today: str
) -> None:
    assert parse({"method": method, section: {"labeled_view": view}}).labeled_view == today


@pytest.mark.parametrize("key", MOVED)
def test_a_moved_setting_of_a_command_is_told_its_new_name(key: str) -> None:
    with pytest.raises(ConfigError) as error:
        override({}, [f"{key}=1"])
    assert str(error.value) == f"--set '{key}=1': {key} is now {' or '.join(MOVED[key])}"


def test_a_devices_own_policy_may_be_of_an_earlier_version() -> None:
    assert parse_policy({"rounds": 3, "distance_correlation": 0.0}).rounds == 3
    with pytest.raises(ConfigError, match=r"mine: policy\.distance_correlation = 0\.5 .* 0\.1\.0"):
        parse_policy({"distance_correlation": 0.5}, "mine")


def test_a_run_writes_its_own_methods_section_alone() -> None:
    for method in ("semisfl", "fedmatch", "supervised", "fedswitch-sl"):
        written = tomllib.loads(to_toml(parse({"method": method})))
        own = {"supervised": set(), "fedswitch-sl": {"fedswitch"}}.get(method, {method})
        assert built_in_sections().keys() & written.keys() == own
        assert "krum" not in written["robust"]
