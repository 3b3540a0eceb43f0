"""Named groups of settings from a file, for `compare --variants`."""

import re
from dataclasses import dataclass
from pathlib import Path

from semisfl.settings import config as configs
from semisfl.settings.sections import ConfigError


@dataclass(frozen=True)
class Variant:
    """Settings that belong together."""

    name: str = ""
    assignments: tuple[str, ...] = ()
    """As ``--set`` has them."""


PLAIN = Variant()


def read_variants(path: Path) -> list[Variant]:
    """A line each: ``name = ["key=value", ...]``; of none, ``[]``, the preset as it is."""
    found = []
    for name, settings in configs.read(path).items():
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            raise ConfigError(
                f"{path}: variant {name!r} names run directories; use letters, digits, _ and -"
            )
        if not isinstance(settings, list) or not all(isinstance(one, str) for one in settings):
            raise ConfigError(
                f'{path}: variant {name} = {settings!r} is not a list of "key=value"; '
                f'e.g. {name} = ["rounds=10"]'
            )
        for key, why in (("method", "--methods"), ("seed", "--seeds")):
            if any(one.partition("=")[0].strip() == key for one in settings):
                raise ConfigError(f"{path}: variant {name} sets {key}; use {why}")
        found.append(Variant(name, tuple(settings)))
    if not found:
        raise ConfigError(f'{path} names no variant, e.g. quick = ["rounds=10"]')
    return found
