"""``semisfl spoilers``: what attackers among the clients cost, under which rule."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from semisfl.cli import console
from semisfl.cli.options import Device, Json, Preset, Quiet, Settings, name_of, values_of


def register(app: typer.Typer) -> None:
    app.command("spoilers")(spoilers)


def spoilers(
    preset: Preset = "digits",
    attacks: Annotated[str, typer.Option(help="Attacks, comma between; or all.")] = "all",
    rules: Annotated[
        str,
        typer.Option(
            help="Rules of `semisfl list`, with +limited for robust.features=limited; or all."
        ),
    ] = "mean,clipped_mean+limited",
    shares: Annotated[
        str, typer.Option(help="Shares of the clients that attack, comma between.")
    ] = "0,0.2",
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each: seed, seed + 1, ...")] = 1,
    settings: Settings = None,
    out: Annotated[
        Path | None, typer.Option(help="A line per run; those that are there are not repeated.")
    ] = None,
    device: Device = "auto",
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train with attackers among the simulated clients; points of accuracy lost by attack and rule."""
    from semisfl.attacks import spoiling
    from semisfl.attacks.poisoning import ATTACKS
    from semisfl.cli.signals import StopSignals

    values = values_of(preset, settings)
    first = int(values.get("seed", 0))
    jobs = spoiling.listed(
        spoiling.choose(attacks, ATTACKS, "attack"),
        spoiling.choose(rules, spoiling.rules(), "rule"),
        [_share(word) for word in shares.split(",")],
        range(first, first + seeds),
    )
    place = out or Path("runs") / f"spoilers-{name_of(preset)}.jsonl"
    place.parent.mkdir(parents=True, exist_ok=True)
    with StopSignals() as signals, signals.running():
        outcomes = spoiling.carry_out(
            values,
            jobs,
            place,
            device=device,
            stop=signals.flag,
            tell=(lambda line: None) if quiet else console.say,
        )
    table = list(spoiling.lost(outcomes))
    if json_:
        rows = [{"attack": a, "share": s, "lost": by_rule} for a, s, by_rule in table]
        print(json.dumps({"runs": [vars(outcome) for outcome in outcomes], "lost": rows}))
        return
    chosen = list(dict.fromkeys(job.rule for job in jobs))
    shown = Table(
        title="points of accuracy lost to attackers",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
    )
    shown.add_column("attack")
    for heading in ("share", *chosen):
        shown.add_column(heading, justify="right", no_wrap=True)
    for attack, share, by_rule in table:
        cells = [f"{by_rule[rule]:+.1f}" if rule in by_rule else "–" for rule in chosen]
        shown.add_row(attack, f"{share:.0%}", *cells)
    console.out.print(shown)
    if len(outcomes) < len(jobs):
        print(f"stopped after {len(outcomes)} of {len(jobs)} runs; the same command continues")
    print(f"runs: {place}")


def _share(word: str) -> float:
    try:
        share = float(word)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise ValueError(f"--shares {word!r} is not a share of clients from 0 to below 1, e.g. 0.2")
    return share
