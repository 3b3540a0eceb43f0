"""Options that several commands share, and what they stand for."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

Preset = Annotated[
    str, typer.Argument(metavar="[PRESET|FILE.toml]", help="A preset of `semisfl list`, or a file.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE...", help="Change settings, e.g. --set rounds=10 seed=1."
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for a machine to read.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, results only.")]

EXTRA = "this needs the network packages: pip install 'semisfl[network]'"


def values_of(preset: str, settings: list[str] | None) -> dict[str, Any]:
    """The plain values of a preset or file, with ``--set`` applied."""
    from semisfl import config, presets

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
