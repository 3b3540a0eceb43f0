"""``semisfl inspect``: what would run on a device."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from semisfl.cli.options import (
    DeviceCerts,
    Insecure,
    Json,
    Settings,
    client_credentials,
    values_of,
)
from semisfl.settings.policy import DIGEST

if TYPE_CHECKING:
    from semisfl.net.terms import Terms


def inspect(
    source: Annotated[
        str,
        typer.Argument(
            metavar="HOST:PORT|PRESET|FILE.toml",
            help="A server, or a preset or settings file that a server is to use.",
        ),
    ],
    certs: DeviceCerts = None,
    settings: Settings = None,
    labeled: Annotated[
        Path | None,
        typer.Option(help="The labelled images of `serve`; default: the data set of the preset."),
    ] = None,
    insecure_loopback: Insecure = False,
    allow_method: Annotated[
        list[str] | None,
        typer.Option(metavar="PACKAGE.MODULE:CLASS", help="As for `join`; may be repeated."),
    ] = None,
    json_: Json = False,
) -> None:
    """Show what would be computed on a device and sent from it, and the digest for `join --accept`.

    A server of `serve --model` is shown as `classify` would use it.
    """
    from semisfl.net.client.inspect import NoTerms
    from semisfl.net.client.shown_terms import text_of_terms

    if re.search(r":\d+$", source):
        try:
            terms = _of_server(source, certs, insecure_loopback, allow_method or [])
        except NoTerms:
            _show_served(source, certs, insecure_loopback, json_)
            return
    else:
        terms = planned_terms(source, settings, labeled)
    if json_:
        print(json.dumps({"digest": terms.digest, "terms": json.loads(terms.to_json())}))
    else:
        print(text_of_terms(terms))


def _of_server(
    address: str, certs: Path | None, insecure_loopback: bool, allow_methods: list[str]
) -> "Terms":
    from semisfl.net.client.inspect import read_terms

    return read_terms(
        address,
        client_credentials("inspect", certs, insecure_loopback),
        insecure_loopback=insecure_loopback,
        allow_methods=allow_methods,
    )


def _show_served(address: str, certs: Path | None, insecure_loopback: bool, as_json: bool) -> None:
    from semisfl.net.client.connection import Target
    from semisfl.use.model_client import read_model
    from semisfl.use.split_inference import text_of_model

    model = read_model(
        Target(address, client_credentials("inspect", certs, insecure_loopback), insecure_loopback)
    )
    if not model.downloadable:
        raise ValueError(f"{address} serves a top alone; devices need its bottom as a file")
    print(
        json.dumps({"digest": model.digest, "terms": model.terms()})
        if as_json
        else text_of_model(model)
    )


def planned_terms(preset: str, settings: list[str] | None, labeled: Path | None) -> "Terms":
    """Return the terms that `serve` would have for a folder ``labeled``, without a network.

    Without a folder, images have the shape and the classes of the preset's data set.
    """
    from semisfl.costs.about_images import planned
    from semisfl.net.terms import Terms
    from semisfl.runs.run_data import check_classes, load_images
    from semisfl.settings import config

    options = config.parse(values_of(preset, settings))
    if labeled is not None:
        data = load_images(str(labeled), options)
        check_classes(data)
        return Terms(options, data.shape, len(data.classes), data.mean, data.std)
    images = planned(options)
    halves = (0.5,) * images.shape[0]  # as images of a folder are normalised
    return Terms(options, images.shape, images.classes, halves, halves)


def checked_digests(accept: list[str] | None) -> list[str]:
    """Return the digests of ``--accept``; raise `ValueError` for anything else."""
    for digest in accept or []:
        if not re.fullmatch(DIGEST, digest):
            raise ValueError(
                f"--accept {digest!r:.80} is no digest; `semisfl inspect` prints it: sha256: and 64 digits"
            )
    return accept or []
