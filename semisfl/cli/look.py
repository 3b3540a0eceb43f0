"""``semisfl list`` and ``show``: look at presets, settings and data without training.

Only `show --partition` loads torch, because it reads the images.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from semisfl.cli import output
from semisfl.cli.options import Data, Json, Preset, Settings, chosen_preset, values_of, with_data
from semisfl.settings.counts import plural

if TYPE_CHECKING:
    from semisfl.settings.config import Config


SECTIONS = {
    "presets": ("presets", ("name", "summary")),
    "variants": ("variants: PRESET+VARIANT", ("name", "summary")),
    "methods": ("methods: --set method=NAME", ("name", "title", "summary")),
    "notes": ("notes on methods", ("name", "note")),
    "models": (
        "models and their parameters: --set model.name=NAME",
        ("name", "input", "classes", "features", "bottom", "top"),
    ),
    "weights": (
        "weights: --set model.weights=NAME, or a file",
        ("name", "model", "summary", "licence"),
    ),
    "data": ("data: --set data.name=NAME, or a path to images", ("name", "summary")),
    "codecs": ("codecs: --set wire.models=NAME", ("name", "summary")),
    "aggregates": ("aggregates: --set robust.aggregate=NAME", ("name", "summary")),
    "sinks": ("sinks: --set 'sinks=[\"NAME\"]'", ("name", "summary")),
}
"""The title and the columns of each table of `semisfl list`, by the key of its entries in ``--json``."""


def list_(json_: Json = False) -> None:
    """List presets, methods, models, weights, data sets, codecs, aggregates and sinks."""
    from semisfl.settings import catalog
    from semisfl.settings.presets import PRESETS, VARIANTS

    known: dict[str, list[dict[str, Any]]] = {
        "presets": [_first_line(name, make) for name, make in PRESETS.items()],
        "variants": [_first_line(name, make) for name, make in VARIANTS.items()],
        "methods": _entries(catalog.METHODS, "title", "summary", "note"),
        "models": _models(),
        "weights": _entries(catalog.WEIGHTS, "model", "summary", "licence"),
        "data": _entries(catalog.DATA, "summary"),
        "codecs": _entries(catalog.CODECS, "summary"),
        "aggregates": _entries(catalog.AGGREGATES, "summary"),
        "sinks": _entries(catalog.SINKS, "summary"),
    }
    if json_:
        print(json.dumps(known))
        return
    known["notes"] = [method for method in known["methods"] if method["note"]]
    for section, (title, columns) in SECTIONS.items():
        _print(title, columns, known[section])


def _entries(table: Mapping[str, Any], *fields: str) -> list[dict[str, Any]]:
    """Return the names of a catalog's entries and some of their fields.

    Args:
        table: the entries of a catalog by name.
        fields: the attributes to return.
    """
    entries = table.values()
    return [{field: getattr(entry, field) for field in ("name", *fields)} for entry in entries]


def _first_line(name: str, function: Any) -> dict[str, Any]:
    """Return the name of a preset or variant, and the first line of its docstring as its summary."""
    return {"name": name, "summary": (function.__doc__ or "").strip().partition("\n")[0]}


def _models() -> list[dict[str, Any]]:
    """Return the named models at their usual cut; counted without torch."""
    from semisfl.models.shapes import place
    from semisfl.models.zoo import MODELS
    from semisfl.settings import catalog
    from semisfl.settings.layer_kinds import Flatten

    described = []
    for name, model in MODELS.items():
        layers = place(model.table(), model.shape, model.classes)
        usual = catalog.MODELS[name]
        cut = next(
            i
            for i, one in enumerate(layers, start=1)
            if (one.name == usual if usual else isinstance(one.layer, Flatten))
        )
        described.append(
            {
                "name": name,
                "input": "x".join(map(str, model.shape)),
                "classes": model.classes,
                "features": math.prod(layers[cut - 1].gives),
                "bottom": sum(one.parameters for one in layers[:cut]),
                "top": sum(one.parameters for one in layers[cut:]),
            }
        )
    return described


def _print(title: str, columns: Sequence[str], entries: list[dict[str, Any]]) -> None:
    """Print one table of `semisfl list`.

    Args:
        title: its title, which says how the entries are used.
        columns: the keys of the entries to show.
        entries: one dictionary per line.
    """
    text = sum(not isinstance(entries[0][column], int) for column in columns)
    table = output.table(title, columns, text=text)
    for entry in entries:
        cells = (entry[column] for column in columns)
        table.add_row(*(f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in cells))
    output.show(table)


def show(
    preset: Preset = "",
    data: Data = None,
    settings: Settings = None,
    partition: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.png",
            help="Instead, draw which images the server and each client hold, by class.",
        ),
    ] = None,
    json_: Json = False,
) -> None:
    """Print a configuration with a comment per setting; save it as FILE.toml for `run FILE.toml`.

    With --partition, load the images instead and show who would hold them.
    """
    from semisfl.settings import config as configs
    from semisfl.settings.toml import commented_toml

    settings = with_data(settings, data)
    values = values_of(chosen_preset(preset, settings), settings)
    config = configs.parse(values)
    if view := values.get("server", {}).get("labeled_view"):
        # Said although it is this method's own view: a comparison from the file has other methods.
        server = config.server.model_copy(update={"labeled_view": view})
        config = config.model_copy(update={"server": server})
    if partition is not None:
        _show_partition(config, partition, json_)
    elif json_:
        print(config.model_dump_json())
    else:
        print(commented_toml(config), end="")


def _show_partition(config: "Config", file: Path, as_json: bool) -> None:
    """Draw which images the server and each client hold, and print their numbers.

    Args:
        config: the configuration that names and divides the images.
        file: the picture to draw.
        as_json: print the images of each holder by class.
    """
    from semisfl.data import holdings
    from semisfl.runs.run_data import load_data

    data, partition = load_data(config)
    labels = data.labels.numpy()
    held = holdings.count(partition, labels, data.classes)
    picture = output.draw(file, lambda place: holdings.draw(held, place))
    validation, unused = len(partition.validation), partition.unused(len(labels))
    if as_json:
        server, *clients = (
            {
                "images": sum(counts),
                "classes": {
                    name: count
                    for name, count in zip(held.classes, counts, strict=True)
                    if count or name in data.classes
                },
            }
            for counts in held.counts.tolist()
        )
        if held.names:
            clients = [{"name": n} | one for n, one in zip(held.names, clients, strict=True)]
        more = {"validation": validation, "unused": unused, "picture": str(picture or "") or None}
        print(json.dumps({"server": server, "clients": clients, **more}))
        return
    sizes = sorted(len(rows) for rows in partition.clients)
    print(
        f"{data.name}: {plural(len(partition.labeled), 'labelled image')} on the server; "
        f"{plural(len(sizes), 'client')} with {sizes[0]} to {sizes[-1]} (median {median(sizes):.10g}), "
        f"{sum(sizes)} in all"
        + (f"; {validation} are for validation" if validation else "")
        + (f"; {unused} are not used" if unused else "")
    )
    if picture:
        print(f"picture: {picture}")
