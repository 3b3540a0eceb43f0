"""Options that several commands share, and what they stand for."""

import contextlib
import itertools
import logging
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

Preset = Annotated[
    str, typer.Argument(metavar="[PRESET|FILE.toml]", help="A preset of `semisfl list`, or a file.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE...",
        help="Change settings, e.g. --set rounds=10 seed=1; may be repeated.",
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for a machine to read.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, results only.")]
Jobs = Annotated[
    int,
    typer.Option(
        "--jobs",
        min=1,
        help="Runs at a time, in processes of their own; with Ray: that share a GPU.",
    ),
]
Engine = Annotated[
    str | None,
    typer.Option(
        metavar="ray[=ADDRESS]", help="Where runs are executed: a Ray cluster, or Ray here."
    ),
]

Target = Annotated[
    float | None,
    typer.Option(
        help="Also print the cost of reaching this accuracy, in percent.",
        callback=lambda value: finite(value),
    ),
]
Insecure = Annotated[
    bool,
    typer.Option("--insecure-loopback", help="Plaintext; only on a loopback address."),
]

EXTRA = "this needs the network packages: pip install 'semisfl[network]'"

ASSIGNMENT = re.compile(r"\s*[A-Za-z_][A-Za-z0-9_.-]*\s*=")


def spread_settings(words: Sequence[str]) -> list[str]:
    """``--set a=1 b=2`` as ``--set a=1 --set b=2``, which is all that click can read.

    What follows a setting and begins like ``key=`` is a setting too; anything else, an option or a
    preset, ends the row. A file whose name looks like a setting is written ``./lr=0.1.toml``.
    """
    spread: list[str] = []
    in_row = False
    rest = iter(words)
    for word in rest:
        if word == "--":
            return [*spread, word, *rest]
        if in_row and ASSIGNMENT.match(word):
            spread += ["--set", word]
            continue
        in_row = word == "--set" or word.startswith("--set=")
        spread.append(word)
        if word == "--set":
            spread += itertools.islice(rest, 1)
    return spread


def fill_in_watch(words: Sequence[str], address: str) -> list[str]:
    """``serve --watch`` without an address, which click cannot read, as one with ``address``."""
    filled: list[str] = []
    for place, word in enumerate(words):
        filled.append(word)
        following = words[place + 1] if place + 1 < len(words) else ""
        if word == "--watch" and not re.search(r":\d+$", following):
            filled.append(address)
    return filled


def values_of(preset: str, settings: list[str] | None) -> dict[str, Any]:
    """The plain values of a preset or file, with ``--set`` applied."""
    from semisfl.settings import config, presets

    path = Path(preset)
    values = config.read(path) if _is_file(path) else presets.values_of(preset)
    return config.override(values, settings or [])


def name_of(preset: str) -> str:
    path = Path(preset)
    return path.stem if _is_file(path) else preset


def _is_file(path: Path) -> bool:
    return path.suffix == ".toml" or len(path.parts) > 1


@contextlib.contextmanager
def needs_network() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name and error.name.split(".")[0] in ("grpc", "msgpack", "cryptography"):
            raise ValueError(f"{EXTRA} (no module {error.name!r})") from error
        raise


def refuse_beside_resume(context: typer.Context) -> None:
    for name in ("preset", "out"):
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise ValueError(
                "--resume continues a run as it was set up; leave out PRESET and --out"
            )


def show_log() -> None:
    """A server and a device run for long and unattended: their log lines belong on stderr."""
    for handler in logging.getLogger("semisfl").handlers:
        handler.setLevel(logging.INFO)


def finite(value: float | None) -> float | None:
    """Of a number on the command line: neither infinite nor none at all."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value
