"""``semisfl plan``: what training would cost, before it starts."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from semisfl.cli import output, plan_report
from semisfl.cli.options import Json, Preset, Settings, chosen_preset, values_of
from semisfl.costs import LATENCY, PAPER_DOWN, PAPER_UP, PROFILE
from semisfl.files import save_picture

if TYPE_CHECKING:
    from semisfl.costs.plan import Plan

Uplink = Annotated[
    str,
    typer.Option(
        metavar="MBIT/S", help="A client's upload speed: 4, or 0.8-8 to draw one per round."
    ),
]
Downlink = Annotated[
    str, typer.Option(metavar="MBIT/S", help="A client's download speed, written like --uplink.")
]
Latency = Annotated[
    float,
    typer.Option(
        min=0,
        metavar="MS",
        help="Milliseconds that every message takes in addition to its bytes.",
    ),
]
DeviceProfile = Annotated[
    str,
    typer.Option(
        "--profile",
        metavar="NAME|FILE.toml",
        help="How fast devices compute: jetson-mix, jetson-tx2, phone, wire-only (no computing), or a file.",
    ),
]


def plan(
    preset: Preset = "",
    settings: Settings = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Compare only these methods, separated by commas, or all; no cuts, no picture."
        ),
    ] = None,
    uplink: Uplink = PAPER_UP,
    downlink: Downlink = PAPER_DOWN,
    latency: Latency = LATENCY,
    profile: DeviceProfile = PROFILE,
    out: Annotated[Path, typer.Option(help="Picture to write.")] = Path("plan.png"),
    json_: Json = False,
) -> None:
    """Estimate bytes and time of every method and every cut of the model; name the best cut.

    The default connection speeds are the paper's. The speed of its devices is assumed (docs/costs.md).
    """
    from semisfl.costs import about_images
    from semisfl.costs import plan as plans
    from semisfl.costs.clock import World
    from semisfl.runs.compare import choose_methods
    from semisfl.settings import config as configs

    preset = chosen_preset(preset, settings)
    values = values_of(preset, settings)
    config = configs.parse(values)
    chosen = choose_methods(methods) if methods is not None else None
    held = about_images.planned(config)
    world = World.of(uplink, downlink, latency, profile, config.seed)
    proposed = plans.make(
        config, held, world, lambda name: configs.parse({**values, "method": name}), chosen or ()
    )
    if chosen is not None:
        proposed = _only(proposed, chosen)
    if not json_:  # before the picture: drawing takes seconds
        if chosen is None:
            plan_report.print_cuts(proposed)
        plan_report.print_methods(proposed)
        if chosen is None:
            print("\n".join(plan_report.advice(proposed)))
        print(plan_report.assumptions(proposed, held.mean, profile))
    picture = None
    if chosen is None:
        from semisfl.costs import charts

        picture = output.draw(out, lambda file: save_picture(charts.plan_picture(proposed), file))
    if json_:
        print(json.dumps(plan_report.as_json(proposed, cuts=chosen is None, picture=picture)))
    elif picture:
        print(f"picture: {picture}")


COMMANDS = {"plan": plan}


def _only(proposed: "Plan", methods: Sequence[str]) -> "Plan":
    """Return the plan with these methods alone."""
    from semisfl.settings import lookup

    known = {line.method: line for line in proposed.methods}
    names = {name: lookup.method(name).name for name in methods}
    if unknown := [name for name in methods if names[name] not in known]:
        raise ValueError(f"--methods {unknown[0]}: this method has no cost formula; leave it out")
    return replace(proposed, methods=[known[names[name]] for name in methods])
