"""``semisfl replay``: what recorded runs would have cost over other connections, devices and codecs."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from semisfl.cli import output
from semisfl.cli.options import AllowMethod, Json, Target
from semisfl.cli.planning import DeviceProfile, Downlink, Latency, Uplink
from semisfl.cli.results import print_target
from semisfl.costs import LATENCY, PAPER_DOWN, PAPER_UP, PROFILE
from semisfl.files import save_picture
from semisfl.settings.counts import amount

if TYPE_CHECKING:
    from semisfl.costs.clock import World
    from semisfl.costs.replay import Replay
    from semisfl.costs.traffic import RoundTraffic
    from semisfl.runs.grouping import Group
    from semisfl.runs.report import Summary


def replay(
    runs: Annotated[list[Path], typer.Argument(help="Run directories, or folders of them.")],
    uplink: Uplink = PAPER_UP,
    downlink: Downlink = PAPER_DOWN,
    latency: Latency = LATENCY,
    profile: DeviceProfile = PROFILE,
    codec: Annotated[
        str | None,
        typer.Option(help="Count all traffic in this codec; default: the recorded codecs."),
    ] = None,
    target: Target = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Picture; default: replay.png in the run's folder, or here if several."),
    ] = None,
    allow_method: AllowMethod = None,
    json_: Json = False,
) -> None:
    """Compute the hours and bytes of recorded runs over other connections, devices and codecs.

    Nothing is trained: accuracies are the recorded ones, so the accuracy lost to a codec is not simulated.
    """
    from semisfl.costs.clock import World
    from semisfl.costs.replay import replay as replay_run
    from semisfl.runs import grouping, report
    from semisfl.settings import lookup

    if codec is not None:
        lookup.codec(codec)
    world = World.of(uplink, downlink, latency, profile)
    results = []
    for group in grouping.group_runs(grouping.find_runs(runs)):
        replays = [replay_run(run, world, codec) for run in group.runs]
        moved = replace(group, runs=[one.as_run() for one in replays])
        results.append((moved, report.summarise(moved, target), replays))
    if not json_:  # at once: drawing takes seconds
        _print(results, world, profile, codec, target)
    place = out or output.picture_beside(runs, "replay.png")
    from semisfl.costs import charts

    pairs = [(group, replays) for group, _, replays in results]
    picture = output.draw(place, lambda file: save_picture(charts.costs_picture(pairs), file))
    if json_:
        print(json.dumps(_as_json(results, world, codec, picture)))
    elif picture:
        print(f"curves: {picture}")


COMMANDS = {"replay": replay}
Results = Sequence[tuple["Group", "Summary", list["Replay"]]]


def _print(
    results: Results, world: "World", profile: str, codec: str | None, target: float | None
) -> None:
    from semisfl.costs.replay import shares

    table = output.table(
        "time over these connections and devices",
        (
            *("method", "seeds", "rounds", "accuracy %", "hours"),
            *("work", "send", "wait", "sent"),
        ),
    )
    for group, summary, replays in results:
        table.add_row(
            group.label,
            str(len(replays)),
            str(summary.rounds),
            str(summary.accuracy),
            output.known(summary.seconds, _hours),
            *(f"{share:.0%}" for share in shares(replays)),
            amount(summary.bytes or 0),
        )
    output.show(table)
    if target is not None:
        lines = [(group.label, summary) for group, summary, _ in results]
        print_target(f"to reach {target:g} %", lines, "hours", _hours)
    _print_traffic(results)
    for note in notes(results, codec):
        print(note)
    print(
        f"{world.described(profile)} Work, send and wait are shares of an active client's time. Sent includes "
        "rounds that had to be repeated."
    )


def _print_traffic(results: Results) -> None:
    """Print the bytes of each run that sends some by kind and direction, and how they differ by client."""
    from semisfl.costs.replay import bytes_by_kind

    each = [(group, replays, bytes_by_kind(replays)) for group, _, replays in results]
    kinds = sorted({kind for _, _, sent in each for kind in sent})
    if not kinds:
        return
    names = [kind.replace("_", "\n") for kind in kinds]
    table = output.table("what a run sends", ("method", *names, "client:\nleast", "\nmost"))
    for group, replays, sent in each:
        if not sent:
            continue
        by_client = sorted(_by_client(replays).values()) or [0]
        table.add_row(
            group.label,
            *(amount(sent.get(kind, 0) / len(replays)) for kind in kinds),
            *(amount(size / len(replays)) for size in (by_client[0], by_client[-1])),
        )
    output.show(table)


def _by_client(replays: Sequence["Replay"]) -> dict[int, int]:
    totals: dict[int, int] = {}
    for one in replays:
        for sent in one.traffic:
            for client, sizes in sent.clients.items():
                totals[client] = totals.get(client, 0) + sum(sizes.values())
    return totals


def notes(results: Results, codec: str | None) -> list[str]:
    """Return what these numbers leave out, one line each."""
    lines = [
        f"! {group.label}: {summary.remark}" for group, summary, _ in results if summary.remark
    ]

    def labels_with(wrong: Callable[["RoundTraffic"], bool]) -> str:
        labels = (
            group.label
            for group, _, replays in results
            if any(wrong(one) for replay in replays for one in replay.traffic)
        )
        return ", ".join(labels)

    if labels := labels_with(lambda one: not one.exact):
        lines.append(
            f"! {labels}: the files have totals only; bytes by client and kind are computed from the "
            "method's formula and the clients drawn"
        )
    if labels := labels_with(lambda one: not one.coded):
        lines.append(
            f"! {labels}: some bytes are not whole models or batches (for example in a method of another "
            "package) and stay as recorded"
        )
    if codec is not None:
        lines.append(
            f"! the accuracy lost to {codec} is not simulated: accuracies are those recorded with each "
            "run's own codecs"
        )
    return lines


def _hours(seconds: float) -> str:
    hours = seconds / 3600
    if hours >= 10:
        return f"{hours:,.1f}"
    return f"{hours:.2f}" if hours >= 0.01 or not hours else "< 0.01"


def _as_json(
    results: Results, world: "World", codec: str | None, picture: Path | None
) -> dict[str, Any]:
    from semisfl.costs.replay import bytes_by_kind, shares
    from semisfl.runs import report

    runs = []
    for _, summary, replays in results:
        computing, sending, waiting = shares(replays)
        runs.append(
            report.as_json(summary)
            | {
                "hours": (summary.seconds or 0.0) / 3600,
                "shares": {"computing": computing, "sending": sending, "waiting": waiting},
                "traffic": bytes_by_kind(replays),
                "rounds_of_runs": {str(one.run.path): _rounds(one) for one in replays},
            }
        )
    return {
        "results": runs,
        **world.as_json(),
        "codec": codec,
        "notes": notes(results, codec),
        "picture": str(picture) if picture else None,
    }


def _rounds(replay: "Replay") -> list[dict[str, Any]]:
    """Return bytes by kind, direction and client, and each client's seconds, round by round."""
    return [
        {
            "round": time.round,
            "seconds": time.seconds,
            "server": time.server,
            "exact": sent.exact,
            "clients": {
                str(client): {"bytes": dict(sizes), **asdict(time.clients[client])}
                for client, sizes in sent.clients.items()
            },
        }
        for time, sent in zip(replay.times, replay.traffic, strict=True)
    ]
