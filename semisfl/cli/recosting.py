"""``semisfl cost``: what recorded runs would have cost over other links, devices and codecs."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from semisfl.cli import console
from semisfl.cli.options import Json
from semisfl.cli.pricing import (
    LATENCY,
    PROFILE,
    DeviceProfile,
    Downlink,
    Latency,
    Uplink,
    plain_table,
    world_of,
)
from semisfl.cli.study import Target
from semisfl.costs import PAPER_DOWN, PAPER_UP

if TYPE_CHECKING:
    from semisfl.costs.clock import World
    from semisfl.costs.recost import Replay
    from semisfl.costs.traffic import Crossed
    from semisfl.runs.report import Group, Summary

UNKNOWN = "–"


def register(app: typer.Typer) -> None:
    app.command("cost")(cost)


def cost(
    runs: Annotated[
        list[Path], typer.Argument(help="Run directories or records, or folders of them.")
    ],
    uplink: Uplink = PAPER_UP,
    downlink: Downlink = PAPER_DOWN,
    latency: Latency = LATENCY,
    profile: DeviceProfile = PROFILE,
    codec: Annotated[
        str | None, typer.Option(help="All that crosses, in this codec; default: as recorded.")
    ] = None,
    target: Target = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Picture; default: cost.png in the folder given, or here if several."),
    ] = None,
    json_: Json = False,
) -> None:
    """Recorded runs over other links, devices and codecs: virtual hours and bytes, without training.

    Accuracies are the recorded ones: what a codec costs in accuracy is not simulated.
    """
    from semisfl.costs.recost import replay
    from semisfl.runs import report
    from semisfl.settings import lookup

    if codec is not None:
        lookup.codec(codec)
    world = world_of(uplink, downlink, latency, profile, 0)
    told = []
    for group in report.group_runs(report.find_runs(runs)):
        replays = [replay(run, world, codec) for run in group.runs]
        moved = replace(group, runs=[one.as_run() for one in replays])
        told.append((moved, report.summarise(moved, target), replays))
    if not json_:  # at once: drawing takes seconds
        _print(told, world, profile, codec, target)
    place = out or (runs[0] if len(runs) == 1 and runs[0].is_dir() else Path()) / "cost.png"
    picture = console.picture_at(place)
    if picture:
        from semisfl.costs import charts

        charts.draw_costs([(group, replays) for group, _, replays in told], picture)
    if json_:
        print(json.dumps(_as_json(told, world, codec, picture)))
    elif picture:
        print(f"curves: {picture}")


Told = Sequence[tuple["Group", "Summary", list["Replay"]]]


def _print(
    told: Told, world: "World", profile: str, codec: str | None, target: float | None
) -> None:
    from semisfl.costs.recost import shares

    table = plain_table(
        "in virtual hours, over these links and devices",
        (
            *("seeds", "rounds", "accuracy %", "hours"),
            *("compute", "send", "wait", "sent"),
        ),
    )
    for group, summary, replays in told:
        table.add_row(
            group.label,
            str(len(replays)),
            str(summary.rounds),
            str(summary.accuracy),
            _hours(summary.seconds),
            *(f"{share:.0%}" for share in shares(replays)),
            console.amount(summary.bytes or 0),
        )
    console.out.print(table)
    if target is not None:
        _print_target(told, target)
    _print_traffic(told)
    for note in notes(told, codec):
        print(note)
    print(
        f"Links: {world.up} Mbit/s up, {world.down} down, {1000 * world.latency:g} ms per message. "
        f"Devices: {profile} ({world.profile.about}). Compute, send, wait: of an active client's "
        "time. Sent includes rounds that had to be repeated."
    )


def _print_target(told: Told, target: float) -> None:
    table = plain_table(f"to reach {target:g} %", ("seeds that did", "rounds", "hours", "sent"))
    for group, summary, replays in told:
        reached = summary.to_target
        assert reached is not None
        table.add_row(
            group.label,
            f"{reached.reached} of {len(replays)}",
            UNKNOWN if reached.rounds is None else f"{reached.rounds:.0f}",
            _hours(reached.seconds),
            UNKNOWN if reached.bytes is None else console.amount(reached.bytes),
        )
    console.out.print(table)


def _print_traffic(told: Told) -> None:
    """A run's bytes by kind and direction, and how they differ by client."""
    from semisfl.costs.recost import traffic

    each = [traffic(replays) for _, _, replays in told]
    kinds = sorted({kind for one in each for kind in one})
    if not kinds:
        return
    names = [kind.replace("_", "\n") for kind in kinds]
    table = plain_table("what a run sends", (*names, "client:\nleast", "\nmost"))
    for (group, _, replays), sent in zip(told, each, strict=True):
        by_client = sorted(_by_client(replays).values()) or [0]
        table.add_row(
            group.label,
            *(console.amount(sent.get(kind, 0) / len(replays)) for kind in kinds),
            *(console.amount(size / len(replays)) for size in (by_client[0], by_client[-1])),
        )
    console.out.print(table)


def _by_client(replays: Sequence["Replay"]) -> dict[int, int]:
    totals: dict[int, int] = {}
    for one in replays:
        for crossed in one.crossed:
            for client, sizes in crossed.clients.items():
                totals[client] = totals.get(client, 0) + sum(sizes.values())
    return totals


def notes(told: Told, codec: str | None) -> list[str]:
    """What these numbers do not know."""
    said = [f"! {group.label}: {summary.remark}" for group, summary, _ in told if summary.remark]

    def of(wrong: Callable[["Crossed"], bool]) -> str:
        found = (
            group.label
            for group, _, replays in told
            if any(wrong(one) for replay in replays for one in replay.crossed)
        )
        return ", ".join(found)

    if labels := of(lambda one: not one.exact):
        said.append(
            f"! {labels}: the files have totals only; bytes by client and kind are worked out from the "
            "method's formula and from who was drawn"
        )
    if labels := of(lambda one: not one.coded):
        said.append(
            f"! {labels}: some bytes are no whole models or batches (rows left out, a "
            "model of one's own) and stay as recorded"
        )
    if codec is not None:
        said.append(
            f"! what {codec} costs in accuracy is not simulated: the accuracies are those recorded with "
            "each run's own codecs"
        )
    return said


def _hours(seconds: float | None) -> str:
    if seconds is None:
        return UNKNOWN
    hours = seconds / 3600
    if hours >= 10:
        return f"{hours:,.1f}"
    return f"{hours:.2f}" if hours >= 0.01 or not hours else "< 0.01"


def _as_json(told: Told, world: "World", codec: str | None, picture: Path | None) -> dict[str, Any]:
    from semisfl.costs.recost import shares, traffic
    from semisfl.runs import report

    results = []
    for _, summary, replays in told:
        computing, sending, waiting = shares(replays)
        results.append(
            report.as_json(summary)
            | {
                "hours": (summary.seconds or 0.0) / 3600,
                "shares": {"computing": computing, "sending": sending, "waiting": waiting},
                "traffic": traffic(replays),
                "rounds_of_runs": {str(one.run.path): _rounds(one) for one in replays},
            }
        )
    return {
        "results": results,
        "links": {"up": asdict(world.up), "down": asdict(world.down), "latency": world.latency},
        "profile": world.profile.model_dump(mode="json"),
        "codec": codec,
        "notes": notes(told, codec),
        "picture": str(picture) if picture else None,
    }


def _rounds(replay: "Replay") -> list[dict[str, Any]]:
    """Bytes by kind, direction and client, and where each client's seconds went, round by round."""
    return [
        {
            "round": time.round,
            "seconds": time.seconds,
            "server": time.server,
            "exact": crossed.exact,
            "clients": {
                str(client): {"bytes": dict(sizes), **asdict(time.clients[client])}
                for client, sizes in crossed.clients.items()
            },
        }
        for time, crossed in zip(replay.times, replay.crossed, strict=True)
    ]
