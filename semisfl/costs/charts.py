"""Draw a plan: bytes and seconds of a round by cut, beside the methods that exchange whole models."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from semisfl.costs.plan import Line, Plan, group_name
from semisfl.settings.counts import plural

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MEGA = 1e6


def plan_picture(plan: Plan) -> "Figure":
    """Return a figure of a round's bytes and seconds by cut; full-model methods are horizontal lines."""
    from matplotlib.figure import Figure  # heavy, and only wanted here

    groups = plan.groups()
    figure = Figure(figsize=(max(9.0, 4.0 + 0.42 * len(groups)), 7.6), layout="constrained")
    (sent, taken), once = figure.subplots(2, 1, sharex=True), plan.chosen.once
    lines = [group[-1] for group in groups]
    models = [
        sum(size for kind, size in line.kinds.items() if kind[:5] in ("model", "teach")) / MEGA
        for line in lines
    ]
    total = [line.total / MEGA for line in lines]
    exchanged = [sum_of_all - part for sum_of_all, part in zip(total, models, strict=True)]
    _bars(
        sent,
        total,
        {"bottom models": models, "features" if once else "features and gradients": exchanged},
    )
    _levels(sent, plan, [line.total / MEGA for line in plan.full])
    sent.set_ylabel("MB per client, once" if once else "MB per client and round")
    _bars(
        taken,
        [line.seconds for line in lines],
        {
            "a client sending": [line.sending for line in lines],
            "a client computing": [line.computing for line in lines],
        },
    )
    _levels(taken, plan, [line.seconds for line in plan.full])
    taken.set_ylabel("seconds of the first round" if once else "seconds per round")
    taken.set_xticks(range(len(groups)), [_label(plan, group) for group in groups])
    taken.tick_params(axis="x", labelsize=8)
    if len(groups) > 6:
        for label in taken.get_xticklabels():
            label.set(rotation=50, ha="right", rotation_mode="anchor")
    world, config = plan.world, plan.config
    sent.set_title(
        f"{lines[0].title} on {config.model.name} by cut: {plural(config.clients.active, 'client')}, "
        f"{plural(config.clients.steps, 'step')} per round, {world.up} Mbit/s up, {world.down} down",
        fontsize=10,
    )
    return figure


def _label(plan: Plan, group: Sequence[Line]) -> str:
    """Return the name of cuts that send the same, marked if the configured or the fastest cut is among them."""
    marks = {" (configured)": plan.chosen, " (fastest)": plan.best}
    return group_name(group) + "".join(mark for mark, line in marks.items() if line in group)


def _bars(axes: "Axes", total: Sequence[float], parts: dict[str, list[float]]) -> None:
    """Draw a bar per cut on a logarithmic axis, with a marker for each part of it."""
    places = range(len(total))
    axes.bar(places, total, color="#c9d4e5", label="in all")
    for (name, values), marker in zip(parts.items(), ("o", "s"), strict=True):
        axes.plot(places, values, marker, ms=5, label=name)
    axes.set_yscale("log")
    axes.grid(axis="y", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _levels(axes: "Axes", plan: Plan, values: Sequence[float]) -> None:
    """Draw a horizontal line per full-model method, which no cut changes; equal methods share one."""
    at: dict[float, list[str]] = {}
    for line, value in zip(plan.full, values, strict=True):
        at.setdefault(float(f"{value:.2g}"), []).append(line.title)
    for number, (value, titles) in enumerate(at.items()):
        style = ("--", ":", "-.")[number % 3]
        axes.axhline(value, ls=style, lw=1.3, color="black", label=", ".join(titles))
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
