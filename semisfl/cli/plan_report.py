"""The tables, sentences and JSON of ``semisfl plan``."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from semisfl.cli import output
from semisfl.settings.counts import amount, counted

if TYPE_CHECKING:
    from semisfl.costs.plan import Line, Plan
    from semisfl.settings.config import Config

USUAL = (
    "FedSwitch's clients are counted with a teacher, FedMatch's without the helpers of every "
    "tenth round."
)


def print_cuts(plan: "Plan") -> None:
    """Print a table with a line for every cut of the model."""
    table = output.table(
        f"cuts of {plan.config.model.name} for {plan.cuts[0].title}: one client",
        ("cut", "bottom", "features", "GFLOP", "memory", "sent", "seconds", "a day"),
    )
    for group in plan.groups():
        line = group[-1]
        table.add_row(
            _marked(plan, group),
            amount(line.bottom_bytes),
            amount(line.features_per_step),
            f"{line.client_flops / 1e9:,.1f}",
            amount(line.client_memory) + ("" if line.fits else " !"),
            amount(line.total),
            f"{line.seconds:,.1f}",
            f"{line.rounds_per_day:,.0f}",
        )
    output.show(table)
    print(
        "features and GFLOP are per iteration, sent and seconds per round; a day is so many rounds. * is the "
        "configured cut, < the fastest; ! needs more memory than a device has\n"
    )


def print_methods(plan: "Plan") -> None:
    """Print a table with a line for every method."""
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
            f"{plan.run_hours(line):,.1f}",
        )
    output.show(table)
    alone = plan.config.rounds - plan.config.client_rounds
    print(
        "down, up and seconds are per round; work, send and wait are where an average client spends them. "
        f"run and hours are of {counted(plan.config.rounds, 'round')} with {counted(plan.config.clients.active, 'active client')}"
        f"{f', the first {alone} without clients' if alone else ''}\n"
    )
    line = next((one for one in plan.methods if one.method == plan.config.method), plan.methods[0])
    print(f"The server of {line.title} computes for {line.server_seconds:,.1f} s of a round.\n")


def assumptions(plan: "Plan", images: float, profile: str) -> str:
    """Return the connections, devices and codecs that the numbers hold for."""
    from semisfl.costs.plan import ROUNDS

    clients = counted(plan.config.clients.active, "client")
    return (
        f"{plan.world.described(profile)} Codecs: {_codecs(plan.config)}. Bytes are what a run counts. Seconds are "
        f"means of {ROUNDS} drawn rounds of {clients} with {images:,.0f} images each; {USUAL}"
    )


def _codecs(config: "Config") -> str:
    """Return ``fp32``, or the codec of each kind of tensor."""
    wire = config.wire
    if len(wire.codecs) == 1:
        return wire.models
    used = wire.model_dump()
    return ", ".join(f"{codec} {kind.replace('_', ' ')}" for kind, codec in used.items())


def advice(plan: "Plan") -> list[str]:
    """Return the conclusions of a plan, one sentence each."""
    best, chosen, smallest = plan.best, plan.chosen, plan.smallest
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
    """Return a comparison such as ``1.6 times more than``."""
    above = value > other
    ratio = value / other if above else other / value
    if ratio < 1.05:
        return "about as much as" if more == "more" else "about as long as"
    return f"{ratio:.1f} times {more if above else less} than"


def _marked(plan: "Plan", group: Sequence["Line"]) -> str:
    from semisfl.costs.plan import group_name

    inside = {line.index for line in group}
    marks = {"*": plan.chosen.index, "<": plan.best.index}
    signs = "".join(mark for mark, index in marks.items() if index in inside)
    return f"{group_name(group)} {signs}".strip()


def as_json(plan: "Plan", *, cuts: bool, picture: Path | None) -> dict[str, Any]:
    """Return the plan for ``--json``; without ``cuts``, the methods alone."""

    def plain(line: "Line") -> dict[str, Any]:
        fitting = line.rounds_per_day if line.seconds else None
        run = {"run_bytes": plan.run_bytes(line), "run_hours": plan.run_hours(line)}
        return asdict(line) | {"total": line.total, "rounds_per_day": fitting} | run

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
        "advice": advice(plan),
        "picture": str(picture) if picture else None,
    }
