"""``semisfl plan``: what training would cost, before it starts."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from semisfl.cli import console, server_sizes
from semisfl.cli.options import Json, Preset, Settings, chosen_preset, finite, values_of
from semisfl.costs import PAPER_DOWN, PAPER_UP

if TYPE_CHECKING:
    from semisfl.costs.clock import World
    from semisfl.costs.plan import Line, Plan
    from semisfl.settings.config import Config

Uplink = Annotated[
    str,
    typer.Option(
        metavar="MBIT/S", help="A client's upload speed: 4, or 0.8-8 to draw one per round."
    ),
]
Downlink = Annotated[
    str, typer.Option(metavar="MBIT/S", help="A client's download speed, written likewise.")
]
Latency = Annotated[
    float,
    typer.Option(
        min=0,
        metavar="MS",
        help="Milliseconds that every message takes in addition to its bytes.",
        callback=finite,
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
LATENCY, PROFILE = 5.0, "jetson-mix"

USUAL = (
    "FedSwitch's clients are counted with a teacher, FedMatch's without the helpers of every "
    "tenth round."
)


def plan(
    preset: Preset = "",
    settings: Settings = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Compare only these methods, comma between, or all; no cuts, no picture."
        ),
    ] = None,
    uplink: Uplink = PAPER_UP,
    downlink: Downlink = PAPER_DOWN,
    latency: Latency = LATENCY,
    profile: DeviceProfile = PROFILE,
    devices: Annotated[
        int | None,
        typer.Option(min=1, help="Print only what one server needs for so many connected devices."),
    ] = None,
    active: Annotated[
        int | None, typer.Option(min=1, help="With --devices: how many take part in a round.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Picture to write.")] = Path("plan.png"),
    json_: Json = False,
) -> None:
    """Estimate bytes and time of every method and every cut of the model; name the best cut.

    The default link speeds are the paper's. The speed of its devices is assumed (docs/costs.md).
    """
    from semisfl.costs import about_images
    from semisfl.costs import plan as plans
    from semisfl.runs.compare import choose_methods
    from semisfl.settings import config as configs

    preset = chosen_preset(preset, settings)
    values = values_of(preset, settings)
    config = configs.parse(values)
    chosen = choose_methods(methods) if methods is not None else None
    held = about_images.planned(config)
    world = world_of(uplink, downlink, latency, profile, config.seed)
    if devices is not None:
        server_sizes.tell(_crowd(values, devices, active), held, world, json_)
        return
    if active is not None:
        raise ValueError(
            f"--active {active} needs --devices; else use --set clients.active={active}"
        )
    made = plans.make(
        config,
        held,
        world,
        lambda name: configs.parse({**values, "method": name}),
    )
    if chosen is not None:
        made = _only(made, chosen)
    if not json_:  # before the picture: drawing takes seconds
        if chosen is None:
            _print_cuts(made)
        _print_methods(made)
        if chosen is None:
            print("\n".join(advice(made)))
        print(_assumptions(made, held.mean, profile))
    picture = console.picture_at(out) if chosen is None else None
    if picture:
        from semisfl.costs import charts

        try:
            charts.draw_plan(made, picture)
        except OSError as error:  # the numbers are worth more than their picture
            console.say(f"warning: no picture: {picture}: {error.strerror or error}; choose --out")
            picture = None
    if json_:
        print(json.dumps(_as_json(made, cuts=chosen is None, picture=picture)))
    elif picture:
        print(f"picture: {picture}")


COMMANDS = {"plan": plan}


def _crowd(values: dict[str, Any], devices: int, active: int | None) -> "Config":
    """Return the configuration of a server with so many devices."""
    from semisfl.settings.config import override, parse

    some = [] if active is None else [f"clients.active={active}"]
    return parse(override(values, [f"clients.total={devices}", *some]))


def world_of(uplink: str, downlink: str, latency: float, profile: str, seed: int) -> "World":
    from semisfl.costs import profiles
    from semisfl.costs.clock import Range, World

    up, down = Range.parse(uplink, "--uplink"), Range.parse(downlink, "--downlink")
    return World(up, down, latency / 1000, profiles.load(profile), seed)


def _only(made: "Plan", methods: Sequence[str]) -> "Plan":
    """Return the plan with these methods alone."""
    known = {line.method: line for line in made.methods}
    if unknown := [name for name in methods if name not in known]:
        raise ValueError(f"--methods {unknown[0]}: this method has no cost formula; leave it out")
    return replace(made, methods=[known[name] for name in methods])


def _codecs(config: "Config") -> str:
    """Return ``fp32``, or the codec of each kind of tensor."""
    wire = config.wire
    used = wire.model_dump(exclude={"teacher_once"})
    text = ", ".join(f"{codec} {what.replace('_', ' ')}" for what, codec in used.items())
    if len(wire.codecs) == 1:
        text = wire.models
    return text + (", teacher features once per image" if wire.teacher_once else "")


# --- printing ---------------------------------------------------------------------------------------


def _print_cuts(made: "Plan") -> None:
    table = console.table(
        f"cuts of {made.config.model.name} for {made.cuts[0].title}: one client",
        ("cut", "bottom", "features", "GFLOP", "memory", "sent", "seconds", "rounds a day"),
    )
    for group in made.groups():
        line = group[-1]
        table.add_row(
            _marked(made, group),
            console.amount(line.bottom_bytes),
            console.amount(line.features_per_step),
            f"{line.client_flops / 1e9:,.1f}",
            console.amount(line.client_memory) + ("" if line.fits else " !"),
            console.amount(line.total),
            f"{line.seconds:,.1f}",
            f"{line.rounds_per_day:,.0f}",
        )
    console.out.print(table)
    print(
        "features and GFLOP are per iteration, sent and seconds per round. * is the configured cut, < the "
        "fastest; ! needs more memory than a device has\n"
    )


def _print_methods(made: "Plan") -> None:
    table = console.table(
        f"methods at cut {made.methods[0].cut}",
        ("method", "down", "up", "seconds", "compute", "send", "wait", "whole run", "hours"),
    )
    for line in made.methods:
        table.add_row(
            line.title,
            console.amount(line.down),
            console.amount(line.up),
            f"{line.seconds:,.1f}",
            *(f"{part:,.1f}" for part in (line.computing, line.sending, line.waiting)),
            console.amount(made.run_bytes(line)),
            f"{made.run_hours(line):,.1f}",
        )
    console.out.print(table)
    print(
        "down, up and seconds are per round; compute, send and wait are where an average client spends "
        f"them. The whole run has {made.config.rounds} rounds of {made.config.clients.active} active clients\n"
    )
    line = next((one for one in made.methods if one.method == made.config.method), made.methods[0])
    print(
        f"The server of {line.title} computes for {line.server_seconds:,.1f} s of a round and needs at least "
        f"{console.amount(line.server_memory)} of memory, and {console.amount(line.server_disk)} of disk for "
        "its checkpoints.\n"
    )


def _assumptions(made: "Plan", images: float, profile: str) -> str:
    from semisfl.costs.plan import ROUNDS

    world, clients = made.world, made.config.clients
    return (
        f"Links: {world.up} Mbit/s up, {world.down} down, {1000 * world.latency:g} ms per message. "
        f"Devices: {profile} ({world.profile.about}). Codecs: {_codecs(made.config)}. Bytes are what a run "
        f"counts. Seconds are means of {ROUNDS} drawn rounds of {clients.active} clients with {images:,.0f} "
        f"images each; {USUAL}"
    )


def advice(made: "Plan") -> list[str]:
    """Return the conclusions of a plan, one sentence each."""
    best, chosen, smallest = made.best, made.chosen, made.smallest
    sentences = [
        f"Best cut for these links and devices: {best.cut} ({best.seconds:,.1f} s per round, "
        f"{best.rounds_per_day:,.0f} rounds a day, {console.amount(best.total)} per client)."
    ]
    if best.index != chosen.index:
        sentences.append(f"The configured cut, {chosen.cut}, takes {chosen.seconds:,.1f} s.")
    if smallest.index != best.index:
        sentences.append(
            f"Fewest bytes: {smallest.cut} ({console.amount(smallest.total)} per client)."
        )
    if not made.full:
        return sentences
    rival = min(made.full, key=lambda line: line.total)
    quickest = min(made.full, key=lambda line: line.seconds)
    sentences.append(
        f"{rival.title} exchanges whole models and sends {_times(rival.total, smallest.total, 'more', 'less')} "
        f"{smallest.title} at {smallest.cut}; {quickest.title} takes "
        f"{_times(quickest.seconds, best.seconds, 'longer', 'less time')} the best cut."
    )
    steps = made.break_even_steps(smallest, rival)
    sentences.append(
        f"At cut {smallest.cut}, {rival.title} sends less from {steps:,} steps per round on; this plan "
        f"has clients.steps = {made.config.clients.steps}."
    )
    return sentences


def _times(value: float, other: float, more: str, less: str) -> str:
    """Return a comparison such as ``1.6 times more than``."""
    above = value > other
    ratio = value / other if above else other / value
    if ratio < 1.05:
        return "about as much as" if more == "more" else "about as long as"
    return f"{ratio:.1f} times {more if above else less} than"


def _marked(made: "Plan", group: Sequence["Line"]) -> str:
    from semisfl.costs.plan import group_name

    inside = {line.index for line in group}
    marks = {"*": made.chosen.index, "<": made.best.index}
    shown = "".join(mark for mark, index in marks.items() if index in inside)
    return f"{group_name(group)} {shown}".strip()


def _as_json(made: "Plan", *, cuts: bool, picture: Path | None) -> dict[str, Any]:
    def plain(line: "Line") -> dict[str, Any]:
        fitting = line.rounds_per_day if line.seconds else None
        run = {"run_bytes": made.run_bytes(line), "run_hours": made.run_hours(line)}
        return asdict(line) | {"total": line.total, "rounds_per_day": fitting} | run

    world = made.world
    common = {
        "rounds": made.config.rounds,
        "links": {"up": asdict(world.up), "down": asdict(world.down), "latency": world.latency},
        "profile": world.profile.model_dump(mode="json"),
        "wire": made.config.wire.model_dump(),
        "methods": [plain(line) for line in made.methods],
    }
    if not cuts:
        return common
    return common | {
        "cuts": [plain(line) for line in made.cuts],
        "best": made.best.cut,
        "configured": made.chosen.cut,
        "fewest_bytes": made.smallest.cut,
        "advice": advice(made),
        "picture": str(picture) if picture else None,
    }
