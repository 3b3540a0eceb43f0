"""``semisfl plan`` (of which ``costs`` is a part): what training would cost, before it is begun."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from semisfl.cli import console
from semisfl.cli.options import Json, Preset, Settings, finite, values_of
from semisfl.costs import PAPER_DOWN, PAPER_UP

if TYPE_CHECKING:
    from semisfl.costs.clock import World
    from semisfl.costs.plan import Line, Plan
    from semisfl.settings.config import Config

Uplink = Annotated[
    str, typer.Option(metavar="MBIT/S", help="A client's speed up; 0.8-8: drawn each round.")
]
Downlink = Annotated[str, typer.Option(metavar="MBIT/S", help="A client's speed down, likewise.")]
Latency = Annotated[
    float,
    typer.Option(
        min=0,
        metavar="MS",
        help="Milliseconds per message, besides its bytes.",
        callback=finite,
    ),
]
DeviceProfile = Annotated[
    str,
    typer.Option(
        "--profile",
        metavar="NAME|FILE.toml",
        help="How fast devices compute: jetson-mix, jetson-tx2, phone, wire-only, or a file.",
    ),
]
LATENCY, PROFILE = 5.0, "jetson-mix"

USUAL = (
    "methods that switch are counted with the teacher, FedMatch without the helpers of every "
    "fedmatch.refresh-th round."
)


def register(app: typer.Typer) -> None:
    app.command("plan")(plan)
    app.command("costs")(costs)


def plan(
    preset: Preset = "digits",
    settings: Settings = None,
    uplink: Uplink = PAPER_UP,
    downlink: Downlink = PAPER_DOWN,
    latency: Latency = LATENCY,
    profile: DeviceProfile = PROFILE,
    out: Annotated[Path, typer.Option(help="Picture to write.")] = Path("plan.png"),
    json_: Json = False,
) -> None:
    """What each cut of the model and each method would cost; the best cut for these links and devices.

    The default speeds are the paper's; what its devices compute is assumed (docs/costs.md).
    """
    from semisfl.costs import about_images
    from semisfl.costs import plan as plans
    from semisfl.settings import config as configs

    config = configs.parse(values_of(preset, settings))
    held = about_images.planned(config)
    made = plans.make(config, held, world_of(uplink, downlink, latency, profile, config.seed))
    if not json_:  # at once: drawing takes seconds
        _print_plan(made, held.mean, profile)
    picture = console.picture_at(out)
    if picture:
        from semisfl.costs import charts

        charts.draw_plan(made, picture)
    if json_:
        print(json.dumps(_as_json(made, picture)))
    elif picture:
        print(f"picture: {picture}")


def costs(
    preset: Preset = "digits",
    settings: Settings = None,
    up: Annotated[
        float, typer.Option(help="A client's Mbit/s up.", min=1e-3, callback=finite)
    ] = 4.4,
    down: Annotated[
        float, typer.Option(help="A client's Mbit/s down.", min=1e-3, callback=finite)
    ] = 15.0,
    json_: Json = False,
) -> None:
    """Of a plan, what each method would send and the time the wire alone takes for it.

    The default rates are the middle of the paper's links (0.8 to 8 up, 10 to 20 down).
    """
    from semisfl.costs import about_images
    from semisfl.costs.plan import method_costs
    from semisfl.settings import config as configs

    config = configs.parse(values_of(preset, settings))
    held = about_images.planned(config)
    rows = method_costs(config, held.shape, held.classes, up, down, held.mean)
    if json_:
        print(
            json.dumps({"up_mbps": up, "down_mbps": down, "rounds": config.rounds, "costs": rows})
        )
        return
    table = Table("method", "down", "up", "s per round", "whole run", "hours")
    for row in rows:
        table.add_row(
            row["method"],
            console.amount(row["down_bytes"]),
            console.amount(row["up_bytes"]),
            f"{row['round_seconds']:.1f}",
            console.amount(row["run_bytes"]),
            f"{row['run_hours']:.1f}",
        )
    console.out.print(table)
    clients = config.clients
    print(
        f"down and up: one client, one round, {_codecs(config)}. Whole run: {config.rounds} rounds of "
        f"{clients.active} active clients. Time: the wire alone, at {up:g} Mbit/s up and {down:g} down; "
        f"{USUAL} `semisfl plan` also has cuts and devices."
    )


def world_of(uplink: str, downlink: str, latency: float, profile: str, seed: int) -> "World":
    from semisfl.costs import profiles
    from semisfl.costs.clock import Range, World

    up, down = Range.parse(uplink, "--uplink"), Range.parse(downlink, "--downlink")
    return World(up, down, latency / 1000, profiles.load(profile), seed)


def _codecs(config: "Config") -> str:
    """``fp32``, or which codec for what."""
    wire = config.wire
    used = wire.model_dump(exclude={"teacher_once"})
    told = ", ".join(f"{codec} {what.replace('_', ' ')}" for what, codec in used.items())
    if len(wire.codecs) == 1:
        told = wire.models
    return told + (", teacher features once per image" if wire.teacher_once else "")


# --- telling ----------------------------------------------------------------------------------------


def _print_plan(made: "Plan", images: float, profile: str) -> None:
    from semisfl.costs.plan import ROUNDS

    config, world = made.config, made.world
    title = made.cuts[0].title
    table = plain_table(
        f"cuts of {config.model.name} for {title}: one client",
        ("bottom", "features", "GFLOP", "memory", "sent", "seconds", "rounds a day"),
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
        "features and GFLOP: per iteration; sent and seconds: per round. * configured, < fastest, ! more "
        "memory than a device has"
    )
    print()
    table = plain_table(
        f"methods at cut {made.methods[0].cut}",
        ("down", "up", "seconds", "compute", "send", "wait", "whole run", "hours"),
    )
    for line in made.methods:
        table.add_row(
            line.title,
            console.amount(line.down),
            console.amount(line.up),
            f"{line.seconds:,.1f}",
            *(f"{part:,.1f}" for part in (line.computing, line.sending, line.waiting)),
            console.amount(line.total * config.clients.active * config.rounds),
            f"{line.seconds * config.rounds / 3600:,.1f}",
        )
    console.out.print(table)
    print("down, up, seconds and where an average client spends them: per round")
    print()
    for sentence in advice(made):
        print(sentence)
    print(
        f"Links: {world.up} Mbit/s up, {world.down} down, {1000 * world.latency:g} ms per message. "
        f"Devices: {profile} ({world.profile.about}). On the wire: {_codecs(config)}. Bytes as a run "
        f"counts them; seconds are means of {ROUNDS} drawn rounds of {config.clients.active} "
        f"clients with {images:,.0f} images each; {USUAL}"
    )


def advice(made: "Plan") -> list[str]:
    """The plan's conclusions, a sentence each."""
    best, chosen, smallest = made.best, made.chosen, made.smallest
    told = [
        f"Best cut for these links and devices: {best.cut} ({best.seconds:,.1f} s per round, "
        f"{best.rounds_per_day:,.0f} rounds a day, {console.amount(best.total)} per client)."
    ]
    if best.index != chosen.index:
        told.append(f"The configured cut, {chosen.cut}, takes {chosen.seconds:,.1f} s.")
    if smallest.index != best.index:
        told.append(f"Fewest bytes: {smallest.cut} ({console.amount(smallest.total)} per client).")
    if not made.full:
        return told
    rival = min(made.full, key=lambda line: line.total)
    quickest = min(made.full, key=lambda line: line.seconds)
    told.append(
        f"{rival.title}, whole models, sends {_times(rival.total, smallest.total, 'more', 'less')} "
        f"{smallest.title} at {smallest.cut}; {quickest.title} takes "
        f"{_times(quickest.seconds, best.seconds, 'longer', 'less time')} the best cut."
    )
    steps = made.break_even_steps(smallest, rival)
    told.append(
        f"At cut {smallest.cut}, {rival.title} sends less from {steps:,} steps per round on; here "
        f"clients.steps = {made.config.clients.steps}."
    )
    return told


def _times(value: float, other: float, more: str, less: str) -> str:
    """``1.6 times more than``, before what it is compared with."""
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


def plain_table(title: str, columns: Sequence[str]) -> Table:
    table = Table(
        title=title, title_justify="left", box=None, pad_edge=False, collapse_padding=True
    )
    table.add_column("", overflow="fold", no_wrap=console.is_narrow())
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _as_json(made: "Plan", picture: Path | None) -> dict[str, Any]:
    def plain(line: "Line") -> dict[str, Any]:
        fitting = line.rounds_per_day if line.seconds else None
        return asdict(line) | {"total": line.total, "rounds_per_day": fitting}

    world = made.world
    return {
        "rounds": made.config.rounds,
        "links": {"up": asdict(world.up), "down": asdict(world.down), "latency": world.latency},
        "profile": world.profile.model_dump(mode="json"),
        "wire": made.config.wire.model_dump(),
        "cuts": [plain(line) for line in made.cuts],
        "methods": [plain(line) for line in made.methods],
        "best": made.best.cut,
        "configured": made.chosen.cut,
        "fewest_bytes": made.smallest.cut,
        "advice": advice(made),
        "picture": str(picture) if picture else None,
    }
