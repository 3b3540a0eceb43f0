"""Options that several commands share."""

import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from semisfl.cli import console

if TYPE_CHECKING:
    from semisfl.net.tls.credentials import Credentials
    from semisfl.settings.config import Config

Preset = Annotated[
    str,
    typer.Argument(
        metavar="[PRESET|FILE.toml]",
        help="A preset of `semisfl list`, or a settings file; default: images if the data are a path to "
        "your own, else digits.",
        show_default=False,
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE...",
        help="Change settings: --set rounds=10 seed=1. May be repeated.",
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print results only, no progress.")]
Jobs = Annotated[
    int,
    typer.Option(
        "--jobs",
        min=1,
        help="Runs to train at the same time, one process each; with Ray, runs that share a GPU.",
    ),
]
Engine = Annotated[
    str | None,
    typer.Option(
        metavar="ray[=ADDRESS]", help="Train on a Ray cluster, or with Ray on this machine."
    ),
]

AllowMethod = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PACKAGE.MODULE:CLASS",
        help="Import this method or sink if the run names it; may be repeated.",
        callback=lambda names: _allowed(names),
    ),
]
Tables = Annotated[
    list[Path] | None,
    typer.Option(
        "--table",
        metavar="FILE.csv|FILE.tex",
        help="Also write the results as CSV or LaTeX; may be repeated.",
        callback=lambda places: _tables(places),
    ),
]
Target = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=100,
        help="Also print the cost of reaching this accuracy, in percent.",
    ),
]
Insecure = Annotated[
    bool,
    typer.Option("--insecure-loopback", help="Use no TLS; only on a loopback address, for tests."),
]
ServerCerts = Annotated[
    Path | None, typer.Option(help="The authority's folder, with server.crt and server.key.")
]
DeviceCerts = Annotated[
    Path | None, typer.Option(help="This device's folder: authority.crt, client.crt, client.key.")
]
PolicyFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE.toml", help="Limits that this device enforces on the server."),
]
Accept = Annotated[
    list[str] | None,
    typer.Option(
        metavar="DIGEST",
        help="Accept the terms with this digest of `semisfl inspect`; may be repeated.",
    ),
]

EXIT_CODES = {"setup": 2, "refused": 4, "revoked": 5, "policy": 6}
"""Exit codes of devices for each reason why they cannot take part; 0: finished, or stopped by a signal."""

ASSIGNMENT = re.compile(r"\s*[A-Za-z_][A-Za-z0-9_.-]*\s*=")


def spread_settings(words: Sequence[str]) -> list[str]:
    """Return ``--set a=1 b=2`` as ``--set a=1 --set b=2``, which click can read.

    A word that follows a setting and begins like ``key=`` is a setting too. Anything else ends the
    list. Write a file whose name looks like a setting as ``./lr=0.1.toml``.
    """
    spread: list[str] = []
    in_settings = False
    rest = iter(words)
    for word in rest:
        if word == "--":
            return [*spread, word, *rest]
        if in_settings and ASSIGNMENT.match(word):
            spread += ["--set", word]
            continue
        in_settings = word == "--set" or word.startswith("--set=")
        spread.append(word)
        if word == "--set":
            spread += itertools.islice(rest, 1)
    return spread


def values_of(preset: str, settings: list[str] | None) -> dict[str, Any]:
    """Return the plain values of a preset or file, changed by ``--set``."""
    from semisfl.settings import config, presets

    path = Path(preset)
    is_file = path.suffix == ".toml" or len(path.parts) > 1
    values = config.read(path) if is_file else presets.values_of(preset)
    return presets.completed(preset, config.override(values, settings or []))


def chosen_preset(
    preset: str, settings: list[str] | None, data: str | None = None, *, quiet: bool = False
) -> str:
    """Return the preset, or the default for the images that ``data`` or ``--set data.name`` names."""
    from semisfl.settings import config, presets

    if preset:
        return preset
    changes = config.override({"data": {}}, settings or [])["data"]
    name = data or (changes.get("name") if isinstance(changes, dict) else None)
    preset = presets.default_for(None if name is None else str(name))
    if preset == "images" and not quiet:
        console.say(
            f"preset images, for your own images in {name}; semisfl show images explains it"
        )
    return preset


def warn_of_unread(config: "Config", settings: Sequence[str] | None) -> None:
    """Name the settings of ``--set`` that only other methods read: the method's configuration has no such section."""
    for key in (one.partition("=")[0].strip() for one in settings or ()):
        if not hasattr(config, key.partition(".")[0]):
            console.say(f"method {config.method} does not read {key}", "warning")


def require_certs(command: str, certs: Path | None, insecure_loopback: bool) -> None:
    if certs is None and not insecure_loopback:
        raise ValueError(
            f"{command} needs --certs DIR, the folder that `semisfl certs client` made for this device"
        )


def client_credentials(
    command: str, certs: Path | None, insecure_loopback: bool
) -> "Credentials | None":
    """Return the credentials in ``--certs``; None if there is none, as ``--insecure-loopback`` allows."""
    from semisfl.net.tls.credentials import load_client_credentials

    require_certs(command, certs, insecure_loopback)
    return None if certs is None else load_client_credentials(certs)


def refuse_beside_resume(preset: str, out: Path | None) -> None:
    """Raise `ValueError` if a preset or a directory is named beside ``--resume``."""
    if preset or out is not None:
        raise ValueError(
            "--resume continues a run with its own settings; leave out PRESET and --out"
        )


def _allowed(names: list[str] | None) -> list[str] | None:
    from semisfl.settings import lookup

    lookup.allow_code(names or ())
    return names


def _tables(places: Sequence[Path] | None) -> Sequence[Path]:
    for place in places or ():
        if place.suffix not in (".csv", ".tex"):
            raise ValueError(f"--table {place}: the name must end in .csv or .tex")
    return places or ()
