"""``semisfl plan`` and ``replay``: what a run would cost over chosen connections and devices, before or after it.

`plan` computes bytes and seconds from formulas, for each cut of the model and each method. `replay` takes the bytes of
rounds that were trained, and computes the seconds that they would have taken elsewhere. Nothing is trained.
`semisfl.costs` computes the numbers; here they are printed.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from semisfl.cli import output
from semisfl.cli.options import (
    AllowMethod,
    Data,
    Json,
    Preset,
    Settings,
    Target,
    chosen_preset,
    values_of,
    with_data,
)
from semisfl.cli.results import print_target
from semisfl.costs import LATENCY, PAPER_DOWN, PAPER_UP, PROFILE
from semisfl.files import save_picture
from semisfl.settings.counts import amount, plural

if TYPE_CHECKING:
    from semisfl.costs.plan import Line, Plan
    from semisfl.costs.replay import Replay
    from semisfl.runs.report import Group, Summary
    from semisfl.settings.config import Config

Uplink = Annotated[
    str,
    typer.Option(
        metavar="MBIT/S", help="A client's upload speed: 4, or 0.8-8 to draw one per round."
    ),
]
"""The upload speed of a client in Mbit/s: a number, or a range from which each round draws one."""
Downlink = Annotated[
    str, typer.Option(metavar="MBIT/S", help="A client's download speed, written like --uplink.")
]
"""The download speed of a client in Mbit/s, like `Uplink`."""
Latency = Annotated[
    float,
    typer.Option(
        min=0,
        metavar="MS",
        help="Milliseconds that every message takes in addition to its bytes.",
    ),
]
"""Milliseconds that each message takes beside the time of its bytes."""
DeviceProfile = Annotated[
    str,
    typer.Option(
        "--profile",
        metavar="NAME|FILE.toml",
        help="How fast devices compute: jetson-mix, jetson-tx2, phone, wire-only (no computing), or a file.",
    ),
]
"""How fast devices compute: a profile of `semisfl.costs.clock`, or a file with one."""


def plan(
    preset: Preset = "",
    data: Data = None,
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
    from semisfl.costs import charts, plan as plans, rounds
    from semisfl.costs.clock import World
    from semisfl.runs.compare import choose_methods
    from semisfl.settings import config as configs, lookup

    settings = with_data(settings, data)
    values = values_of(chosen_preset(preset, settings), settings)
    chosen = choose_methods(methods, values) if methods is not None else []
    # Each method is planned with its own settings from the same preset; it does not read those of the others.
    others = [lookup.method(name) for name in (values.get("method", "semisfl"), *chosen)]
    config = configs.parse(values, others)
    held = rounds.planned_images(config)
    world = World.of(uplink, downlink, latency, profile, config.seed)
    proposed = plans.make(
        config, held, world, lambda name: configs.parse({**values, "method": name}, others), chosen
    )
    if chosen:
        names = [lookup.method(name).name for name in chosen]
        kept = [line for line in proposed.methods if line.method in names]
        proposed = replace(proposed, methods=kept)
    if not json_:  # before the picture: drawing takes seconds
        if not chosen:
            print_cuts(proposed)
        print_methods(proposed)
        if not chosen:
            print("\n".join(advice(proposed)))
        print(
            f"{world.described(profile)} Codecs: {_codecs(config)}. Bytes are what a run counts. Seconds are means "
            f"of {plans.ROUNDS} drawn rounds of {plural(config.clients.active, 'client')} with {held.mean:,.0f} "
            f"images each; {USUAL}"
        )
        if origin := lookup.origin_of(str(config.model.weights)):
            print(f"weights: {origin}")
    picture = (
        None
        if chosen
        else output.draw(out, lambda file: save_picture(charts.plan_picture(proposed), file))
    )
    if json_:
        print(json.dumps(as_json(proposed, cuts=not chosen, picture=picture)))
    elif picture:
        print(f"picture: {picture}")


INEXACT = {
    "exact": "the files have totals only; bytes by client and kind are computed from the method's formula and the "
    "clients drawn",
    "coded": "some bytes are not whole models or batches (for example in a method of another package) and stay as "
    "recorded",
}
"""The remark for each attribute of a round's traffic that is false."""
USUAL = (
    "FedSwitch's clients are counted with a teacher, FedMatch's without the helpers of every "
    "tenth round."
)
"""The assumptions in the formulas of two methods."""


def print_cuts(plan: "Plan") -> None:
    """Print a table with a line for each cut of the model: what one client holds, computes and sends.

    Cuts that send the same, such as after a convolution and after its ReLU, share a line.
    """
    once, views = plan.chosen.once, plan.config.clients.views
    # Codecs of one size share a column.
    codecs = {size: codec for codec, size in plan.chosen.image_bytes.items()}.values()
    table = output.table(
        f"cuts of {plan.config.model.name} for {plan.cuts[0].title}: one client",
        ("cut", "bottom", "GFLOP", "memory", *codecs, "sent", "seconds")
        if once
        else ("cut", "bottom", "features", "GFLOP", "memory", "sent", "seconds", "a day"),
    )
    for group in plan.groups():
        line, inside = group[-1], [one.index for one in group]
        signs = "*" * (plan.chosen.index in inside) + "<" * (plan.best.index in inside)
        table.add_row(
            f"{'–'.join(dict.fromkeys((group[0].cut, line.cut)))} {signs}".strip(),
            amount(line.bottom_bytes),
            *(() if once else (amount(line.features_per_step),)),
            f"{line.client_flops / 1e9:,.{2 if once else 1}f}",
            amount(line.client_memory) + ("" if line.fits else " !"),
            *(f"{line.image_bytes[codec] / 1000:,.0f}" for codec in codecs),
            amount(line.total),
            f"{line.seconds:,.{0 if once else 1}f}",
            *(() if once else (f"{line.rounds_per_day:,.0f}",)),
        )
    output.show(table)
    print(
        f"GFLOP and the kB in each codec are for one image's {views['weak']} weak and {views['strong']} strong views. "
        "sent is all that a client sends and receives, once; seconds are those of the first round, in which all "
        "clients encode. "
        if once
        else "features and GFLOP are per iteration, sent and seconds per round; a day is so many rounds. ",
        "* is the configured cut, < the fastest; ! needs more memory than a device has\n",
        sep="",
    )


def print_methods(plan: "Plan") -> None:
    """Print a table with a line for each method at the configured cut: bytes and seconds of a round and of the run."""
    table = output.table(
        f"methods at cut {plan.methods[0].cut}",
        ("method", "down", "up", "seconds", "work", "send", "wait", "run", "hours"),
    )
    for line in plan.methods:
        table.add_row(
            line.title,
            amount(line.down),
            amount(line.up),
            f"{line.seconds:,.1f}",
            *(f"{part:,.1f}" for part in (line.computing, line.sending, line.waiting)),
            amount(plan.run_bytes(line)),
            f"{plan.run_hours(line):,.{2 if line.once else 1}f}",
        )
    output.show(table)
    alone = plan.config.rounds - plan.config.client_rounds
    print(
        f"down, up and seconds are {'those of the first round' if plan.chosen.once else 'per round'}; work, send and wait are where an average client spends them. "
        f"run and hours are of {plural(plan.config.rounds, 'round')} with {plural(plan.config.clients.active, 'active client')}"
        f"{f', the first {alone} without clients' if alone else ''}\n"
    )


def _codecs(config: "Config") -> str:
    """Return ``fp32``, or the codec of each kind of tensor."""
    wire = config.wire
    by_kind = ", ".join(f"{codec} {kind.replace('_', ' ')}" for kind, codec in wire)
    return wire.models if len(wire.codecs) == 1 else by_kind


def advice(plan: "Plan") -> list[str]:
    """Return the conclusions of a plan, one sentence each.

    They name the fastest cut, the cut with the fewest bytes, and how the configured method compares with methods that send
    whole models, or with a bottom that is trained.
    """
    best, chosen, smallest = plan.best, plan.chosen, plan.smallest
    if chosen.once:
        return [
            f"Fewest bytes: {smallest.cut} ({amount(smallest.total)} per client). The configured cut, {chosen.cut}: "
            f"{amount(chosen.total)} per client, {amount(plan.run_bytes(chosen))} in all.",
            f"A run that trains this bottom on the clients would send {amount(plan.trained_bytes)}.",
            "Earlier cuts show more of the images: `semisfl leakage` measures it.",
        ]
    sentences = [
        f"Best cut for these connections and devices: {best.cut} ({best.seconds:,.1f} s per round, "
        f"{best.rounds_per_day:,.0f} rounds a day, {amount(best.total)} per client)."
    ]
    if best.index != chosen.index:
        sentences.append(f"The configured cut, {chosen.cut}, takes {chosen.seconds:,.1f} s.")
    if smallest.index != best.index:
        sentences.append(f"Fewest bytes: {smallest.cut} ({amount(smallest.total)} per client).")
    if not plan.full:
        return sentences
    rival = min(plan.full, key=lambda line: line.total)
    quickest = min(plan.full, key=lambda line: line.seconds)
    sentences.append(
        f"{rival.title} exchanges whole models and sends {_times(rival.total, smallest.total, 'more', 'less')} "
        f"{smallest.title} at {smallest.cut}; {quickest.title} takes "
        f"{_times(quickest.seconds, best.seconds, 'longer', 'less time')} the best cut."
    )
    steps = plan.break_even_steps(smallest, rival)
    sentences.append(
        f"At cut {smallest.cut}, {rival.title} sends less from clients.steps = {steps:,} on; this plan "
        f"has {plan.config.clients.steps:,}."
    )
    return sentences


def _times(value: float, other: float, more: str, less: str) -> str:
    """Return a comparison of two numbers such as ``1.6 times more than``.

    Args:
        value: the number that is compared.
        other: what it is compared with.
        more: the word for a larger value.
        less: the word for a smaller value.
    """
    above = value > other
    ratio = value / other if above else other / value
    if ratio < 1.05:  # within what the assumptions on devices can decide
        return "about as much as" if more == "more" else "about as long as"
    return f"{ratio:.1f} times {more if above else less} than"


def as_json(plan: "Plan", *, cuts: bool, picture: Path | None) -> dict[str, Any]:
    """Return the plan for ``--json``.

    Args:
        plan: the costs of cuts and methods.
        cuts: whether to return the cuts and the advice too.
        picture: the picture that was drawn, if any.
    """

    def plain(line: "Line") -> dict[str, Any]:
        """Return the costs of one method at one cut as plain values."""
        return asdict(line) | {
            "total": line.total,
            "rounds_per_day": line.rounds_per_day if line.seconds else None,
            "run_bytes": plan.run_bytes(line),
            "run_hours": plan.run_hours(line),
        }

    common = {
        "rounds": plan.config.rounds,
        **plan.world.as_json(),
        "wire": plan.config.wire.model_dump(),
        "methods": [plain(line) for line in plan.methods],
    }
    if not cuts:
        return common
    return common | {
        "cuts": [plain(line) for line in plan.cuts],
        "best": plan.best.cut,
        "configured": plan.chosen.cut,
        "fewest_bytes": plan.smallest.cut,
        "trained_bytes": plan.trained_bytes,
        "advice": advice(plan),
        "picture": str(picture) if picture else None,
    }


# --- replay ----------------------------------------------------------------------------------------


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
    from semisfl.costs import replay as replays
    from semisfl.costs.clock import World
    from semisfl.runs import plots, report
    from semisfl.settings import lookup

    if codec is not None:
        lookup.codec(codec)
    world = World.of(uplink, downlink, latency, profile)
    results = []
    for group in report.group_runs(report.find_runs(runs)):
        replayed = [replays.replay(run, world, codec) for run in group.runs]
        moved = replace(group, runs=[one.as_run() for one in replayed])
        # A report takes the replayed runs like any others, with their new bytes and seconds.
        shares, sent = replays.shares(replayed), replays.bytes_by_kind(replayed)
        results.append(Replayed(moved, report.summarise(moved, target), replayed, shares, sent))
    if not json_:  # at once: drawing takes seconds
        _print_time(results, target)
        _print_traffic([one for one in results if one.traffic])
        for note in _notes(results, codec):
            print(note)
        print(
            f"{world.described(profile)} Work, send and wait are shares of an active client's time. Sent includes "
            "rounds that had to be repeated."
        )
    place = out or output.picture_beside(runs, "replay.png")
    drawn = [one.group for one in results]
    picture = output.draw(place, lambda file: save_picture(plots.picture(drawn, plots.COSTS), file))
    if json_:
        answer = {
            "results": [asdict(one.summary) | one.as_json() for one in results],
            **world.as_json(),
            "codec": codec,
            "notes": _notes(results, codec),
            "picture": str(picture) if picture else None,
        }
        print(json.dumps(answer, default=str))
    elif picture:
        print(f"curves: {picture}")


class Replayed(NamedTuple):
    """The replays of runs that differ only in seed."""

    group: "Group"
    """The runs, with the bytes and seconds of their replays."""
    summary: "Summary"
    replays: list["Replay"]
    shares: tuple[float, float, float]
    """The shares of an active client's time: computing, sending, waiting."""
    traffic: dict[str, int]
    """Bytes by kind and direction, over all runs, rounds and clients."""

    def as_json(self) -> dict[str, Any]:
        """Return the costs, also round by round, with the bytes and seconds of each client."""
        return {
            "hours": (self.summary.seconds or 0.0) / 3600,
            "shares": dict(zip(("computing", "sending", "waiting"), self.shares, strict=True)),
            "traffic": self.traffic,
            "rounds_of_runs": {
                str(replay.run.path): [
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
                for replay in self.replays
            },
        }


def _print_time(results: Sequence[Replayed], target: float | None) -> None:
    """Print the hours of replayed runs, and what their clients spend them on.

    Args:
        results: the replays of each group of runs.
        target: an accuracy in percent whose cost is printed too; None: none.
    """
    columns = ("method", "seeds", "rounds", "accuracy %", "hours", "work", "send", "wait", "sent")
    table = output.table("time over these connections and devices", columns)
    for one in results:
        table.add_row(
            one.group.label,
            str(len(one.replays)),
            str(one.summary.rounds),
            str(one.summary.accuracy),
            output.known(one.summary.seconds, _hours),
            *(f"{share:.0%}" for share in one.shares),
            amount(one.summary.bytes),
        )
    output.show(table)
    if target is not None:
        lines = [(one.group.label, one.summary) for one in results]
        print_target(f"to reach {target:g} %", lines, "hours", _hours)


def _hours(seconds: float) -> str:
    """Return seconds as hours, with at most two digits behind the point."""
    hours = seconds / 3600
    if hours >= 10:
        return f"{hours:,.1f}"
    return f"{hours:.2f}" if hours >= 0.01 or not hours else "< 0.01"


def _print_traffic(results: Sequence[Replayed]) -> None:
    """Print the mean bytes of a run by kind and direction, and those of the clients with the least and the most."""
    if not results:
        return
    kinds = sorted({kind for one in results for kind in one.traffic})
    names = [kind.replace("_", "\n") for kind in kinds]
    table = output.table("what a run sends", ("method", *names, "client:\nleast", "\nmost"))
    for one in results:
        by_client: Counter[int] = Counter()
        for sent in (sent for replay in one.replays for sent in replay.traffic):
            by_client.update(
                {client: sum(sizes.values()) for client, sizes in sent.clients.items()}
            )
        sizes = [one.traffic.get(kind, 0) for kind in kinds]
        sizes += [min(by_client.values()), max(by_client.values())]
        table.add_row(one.group.label, *(amount(size / len(one.replays)) for size in sizes))
    output.show(table)


def _notes(results: Sequence[Replayed], codec: str | None) -> list[str]:
    """Return what these numbers leave out, one line each.

    Args:
        results: the replays of each group of runs.
        codec: the codec that all traffic was counted in; None: the recorded ones.
    """
    lines = [f"! {one.group.label}: {one.summary.remark}" for one in results if one.summary.remark]
    for attribute, text in INEXACT.items():
        labels = [
            one.group.label
            for one in results
            if not all(
                getattr(sent, attribute) for replay in one.replays for sent in replay.traffic
            )
        ]
        if labels:
            lines.append(f"! {', '.join(labels)}: {text}")
    if codec is not None:
        lines.append(
            f"! the accuracy lost to {codec} is not simulated: accuracies are those recorded with each "
            "run's own codecs"
        )
    return lines
