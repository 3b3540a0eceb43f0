"""Options that several commands share, and how a preset with ``--set`` becomes plain values.

Each type here is the annotation of a command's parameter: typer takes the option's name, type, limits and help from it,
for example ``settings: Settings = None``. An option of one command alone is written where the command is.
"""

import itertools
import json
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
"""The preset or the settings file that a command starts from. Empty: `chosen_preset` chooses one."""
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE...",
        help="Change settings: --set rounds=10 seed=1. May be repeated.",
    ),
]
"""Assignments ``key=value`` that change settings, each a dotted key and a TOML value; None if there is none."""
Data = Annotated[
    str | None,
    typer.Option(
        "--data",
        metavar="PATH|NAME",
        help="The images: a folder, a CSV file or a set of `semisfl list`; the same as --set data.name=PATH.",
    ),
]
"""The images of a run, as `with_data` puts them among the settings."""
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
"""The device that computes, as `semisfl.engine.hardware.Hardware` takes it."""
Json = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
"""Print one JSON object on stdout instead of tables and sentences."""
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print results only, no progress.")]
"""Print no progress; warnings and errors are still printed."""
Jobs = Annotated[
    int,
    typer.Option(
        "--jobs",
        min=1,
        help="Runs to train at the same time, one process each; with Ray, runs that share a GPU.",
    ),
]
"""The number of runs to train at the same time."""
Engine = Annotated[
    str | None,
    typer.Option(
        metavar="ray[=ADDRESS]", help="Train on a Ray cluster, or with Ray on this machine."
    ),
]
"""The place where several runs are trained: None is this machine."""

AllowMethod = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PACKAGE.MODULE:CLASS",
        help="Import this method or sink if the run names it; may be repeated.",
        callback=lambda names: _allowed(names),
    ),
]
"""Code of other packages that a run directory or settings file may name. Without it a file of somebody else could
import any module.
"""
Tables = Annotated[
    list[Path] | None,
    typer.Option(
        "--table",
        metavar="FILE.csv|FILE.tex",
        help="Also write the results as CSV or LaTeX; may be repeated.",
        callback=lambda places: _tables(places),
    ),
]
"""Files to write tables of results to; the suffix chooses the form."""
Target = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=100,
        help="Also print the cost of reaching this accuracy, in percent.",
    ),
]
"""An accuracy in percent, whose cost in rounds, bytes and time is reported too."""
Insecure = Annotated[
    bool,
    typer.Option("--insecure-loopback", help="Use no TLS; only on a loopback address, for tests."),
]
"""Talk without TLS. The network code allows that on a loopback address only."""
ServerCerts = Annotated[
    Path | None, typer.Option(help="The authority's folder, with server.crt and server.key.")
]
"""The folder that `semisfl certs init` and `certs server` filled."""
DeviceCerts = Annotated[
    Path | None, typer.Option(help="This device's folder: authority.crt, client.crt, client.key.")
]
"""A device's folder: its key of `semisfl certs request`, and what `semisfl certs sign` made. The certificate has its name."""
PolicyFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE.toml", help="Limits that this device enforces on the server."),
]
"""A file with limits that this device enforces, whatever the server asks for (`semisfl.settings.policy`)."""
Accept = Annotated[
    list[str] | None,
    typer.Option(
        metavar="DIGEST",
        help="Accept the terms with this digest of `semisfl inspect`; may be repeated.",
    ),
]
"""Digests of terms that the owner of this device has read and accepted."""

EXIT_CODES = {"setup": 2, "refused": 4, "revoked": 5, "policy": 6}
"""The exit code of a device for each kind of reason why it cannot take part; 0: finished, or stopped."""

ASSIGNMENT = re.compile(r"\s*[A-Za-z_][A-Za-z0-9_.-]*\s*=")
"""The beginning of a word that is a setting: a dotted key and an equals sign."""


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
    """Return the plain values of a preset or file, changed by ``--set``; `semisfl.settings.config.parse` checks them.

    Args:
        preset: a name of `semisfl list`, or a path: a word with the suffix .toml or with a slash in it.
        settings: assignments ``key=value``; of several for one key the last counts.
    """
    from semisfl.settings import config, presets

    path = Path(preset)
    if path.suffix == ".toml" or len(path.parts) > 1:
        return config.override(config.read(path), settings or [])
    return presets.complete(preset, config.override(presets.values_of(preset), settings or []))


def with_data(settings: list[str] | None, data: str | None) -> list[str]:
    """Return the assignments of ``--set`` and that of ``--data``, which names the images of the run."""
    named = [] if data is None else [f"data.name={json.dumps(data, ensure_ascii=False)}"]
    return [*(settings or ()), *named]


def chosen_preset(
    preset: str, settings: list[str] | None, data: str | None = None, *, quiet: bool = False
) -> str:
    """Return the preset to use: the one named, else the default for the images that are used.

    The default is ``images`` if the images are a path to somebody's own, and ``digits`` otherwise. A line on stderr says
    that ``images`` was chosen, and one what the preset ``photos`` would do where the images look like photographs.

    Args:
        preset: the preset on the command line, or an empty text.
        settings: assignments, of which ``data.name`` names the images.
        data: the path of the images, where another option names it.
        quiet: do not print the line.
    """
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
        from semisfl.data.folder import holds_photographs

        if holds_photographs(Path(str(name)).expanduser()):
            console.say(
                "for photographs, the preset photos starts from ImageNet's weights and encodes each image once; "
                "semisfl show photos explains it"
            )
    return preset


def warn_of_unread(config: "Config", settings: Sequence[str] | None) -> None:
    """Warn of settings in ``--set`` that the run's method does not read: they belong to the section of another method.

    Such a setting is no mistake, because a comparison has settings for all its methods, but it changes nothing.
    """
    for key in (one.partition("=")[0].strip() for one in settings or ()):
        if not hasattr(config, key.partition(".")[0]):
            console.say(f"method {config.method} does not read {key}", "warning")


def require_certs(command: str, certs: Path | None, insecure_loopback: bool) -> None:
    """Raise `ValueError` unless a device's folder of certificates is named, or TLS is switched off."""
    if certs is None and not insecure_loopback:
        raise ValueError(
            f"{command} needs --certs DIR, this device's folder of `semisfl certs request`"
        )


def client_credentials(
    command: str, certs: Path | None, insecure_loopback: bool
) -> "Credentials | None":
    """Return the credentials in the folder ``--certs``; None if there is none, as ``--insecure-loopback`` allows.

    Args:
        command: the command's name, for the error.
        certs: the value of ``--certs``.
        insecure_loopback: whether the command talks without TLS.
    """
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
    """Allow the classes of ``--allow-method`` to be imported, as ``package.module:Class``, and return them."""
    from semisfl.settings import lookup

    lookup.allow_code(names or ())
    return names


def _tables(places: Sequence[Path] | None) -> Sequence[Path]:
    """Return the files of ``--table``; raise `ValueError` before the work if a suffix is not known."""
    for place in places or ():
        if place.suffix not in (".csv", ".tex"):
            raise ValueError(f"--table {place}: the name must end in .csv or .tex")
    return places or ()
