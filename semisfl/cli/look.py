"""``semisfl list``, ``show`` and ``partition``: look at presets, settings and data without training."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from semisfl.cli import console, drawing
from semisfl.cli.options import Json, Preset, Settings, chosen_preset, values_of
from semisfl.settings.counts import counted


def list_(json_: Json = False) -> None:
    """List presets, methods, models, data sets, codecs, aggregates and sinks."""
    from semisfl.settings import lookup
    from semisfl.settings.presets import PRESETS, VARIANTS

    methods = [_named(entry, "title", "summary", "note") for entry in lookup.METHODS.all().values()]
    known: dict[str, list[dict[str, Any]]] = {
        "presets": [_first_line(name, make) for name, make in PRESETS.items()],
        "variants": [_first_line(name, make) for name, make in VARIANTS.items()],
        "methods": methods,
        "models": _models(),
        "data": [_named(entry, "summary") for entry in lookup.DATA.all().values()],
        "codecs": [_named(entry, "summary") for entry in lookup.CODECS.all().values()],
        "aggregates": [_named(entry, "summary") for entry in lookup.AGGREGATES.all().values()],
        "sinks": [_named(entry, "summary") for entry in lookup.SINKS.all().values()],
    }
    if json_:
        print(json.dumps(known))
        return
    _print("presets", ("name", "summary"), known["presets"])
    _print("variants: PRESET+VARIANT", ("name", "summary"), known["variants"])
    _print("methods: --set method=NAME", ("name", "title", "summary"), known["methods"])
    noted = [method for method in known["methods"] if method["note"]]
    _print("notes on methods", ("name", "note"), noted)
    columns = ("name", "input", "classes", "features", "bottom", "top")
    _print("models and their parameters: --set model.name=NAME", columns, known["models"])
    _print("data: --set data.name=NAME, or a path to images", ("name", "summary"), known["data"])
    _print("codecs: --set wire.models=NAME", ("name", "summary"), known["codecs"])
    title = "aggregates: --set robust.aggregate=NAME"
    _print(title, ("name", "summary"), known["aggregates"])
    _print("sinks: --set 'sinks=[\"NAME\"]'", ("name", "summary"), known["sinks"])


def _named(entry: Any, *fields: str) -> dict[str, Any]:
    """Return the name of a catalog entry and some of its fields."""
    return {field: getattr(entry, field) for field in ("name", *fields)}


def _first_line(name: str, function: Any) -> dict[str, Any]:
    return {"name": name, "summary": (function.__doc__ or "").strip().partition("\n")[0]}


def _models() -> list[dict[str, Any]]:
    """Return the named models, cut before the first flatten as usual; counted without torch."""
    from semisfl.models.shapes import place
    from semisfl.models.zoo import MODELS
    from semisfl.settings.layer_kinds import Flatten

    described = []
    for name, model in MODELS.items():
        layers = place(model.table(), model.shape, model.classes)
        cut = next(i for i, one in enumerate(layers) if isinstance(one.layer, Flatten))
        described.append(
            {
                "name": name,
                "input": "x".join(map(str, model.shape)),
                "classes": model.classes,
                "features": math.prod(layers[cut].takes),
                "bottom": sum(one.parameters for one in layers[:cut]),
                "top": sum(one.parameters for one in layers[cut:]),
            }
        )
    return described


def _print(title: str, columns: Sequence[str], entries: list[dict[str, Any]]) -> None:
    text = sum(not isinstance(entries[0][column], int) for column in columns)
    table = console.table(title, columns, text=text)
    for entry in entries:
        cells = (entry[column] for column in columns)
        table.add_row(*(f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in cells))
    console.out.print(table)


def show(preset: Preset = "", settings: Settings = None, json_: Json = False) -> None:
    """Print a configuration with a comment per setting; save it as FILE.toml for `run FILE.toml`."""
    from semisfl.settings import config as configs
    from semisfl.settings.toml import commented_toml

    config = configs.parse(values_of(chosen_preset(preset, settings), settings))
    print(config.model_dump_json() if json_ else commented_toml(config), end="\n" if json_ else "")


def partition(
    preset: Preset = "",
    out: Annotated[Path, typer.Option(help="Picture to write.")] = Path("who.png"),
    settings: Settings = None,
    json_: Json = False,
) -> None:
    """Draw which images the server and every client hold, by class."""
    from semisfl.data import holdings
    from semisfl.runs.run_data import load_data
    from semisfl.settings import config as configs

    console.check_file(out)
    preset = chosen_preset(preset, settings)
    data, held = load_data(configs.parse(values_of(preset, settings)))
    labels = data.labels.numpy()
    sizes, validation = sorted(len(rows) for rows in held.clients), len(held.validation)
    unused = held.unused(len(labels))
    picture = drawing.picture_at(out)
    if picture:
        holdings.draw(holdings.count(held, labels, data.classes), picture)

    if json_:
        names = [{"name": name} for name in held.names] or [{}] * len(held.clients)
        table = holdings.count(held, labels, data.classes)
        server, *clients = (
            {
                **name,
                "images": sum(counts),
                "classes": {
                    kind: count
                    for kind, count in zip(table.classes, counts, strict=True)
                    if count or kind in data.classes
                },
            }
            for name, counts in zip([{}, *names], table.counts.tolist(), strict=True)
        )
        beside = {"validation": validation, "unused": unused}
        place = str(picture) if picture else None
        print(json.dumps({"server": server, "clients": clients, **beside, "picture": place}))
        return
    print(
        f"{data.name}: {counted(len(held.labeled), 'labelled image')} on the server; {counted(len(sizes), 'client')} with "
        f"{sizes[0]} to {sizes[-1]} (median {median(sizes):.10g}), {sum(sizes)} in all"
        + (f"; {validation} are for validation" if validation else "")
        + (f"; {unused} are not used" if unused else "")
    )
    if picture:
        print(f"picture: {picture}")


COMMANDS = {"list": list_, "show": show, "partition": partition}
