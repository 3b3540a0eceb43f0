"""Declare a metric: its meaning, its unit, and the chart that shows it.

The declaration is the only place that knows a metric: readers such as the page, pictures and the exporter go through
`declared` and `panels_of`, so a metric of another package is shown like those of this one.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

LOSS = "loss_"
"""Before the name of a loss."""


@dataclass(frozen=True)
class Axis:
    """The x axis of a chart: a metric times ``scale`` plus ``first``, or the running sum of that.

    ``key`` is a metric of every round, and ``title`` names the axis with its unit.
    """

    title: str
    key: str
    scale: float = 1.0
    first: float = 0.0
    summed: bool = False


AXES = (
    Axis("rounds", "round", first=1.0),
    Axis("GB sent", "bytes_total", 1e-9),
    Axis("minutes", "seconds", 1 / 60, summed=True),
)


@dataclass(frozen=True)
class Panel:
    """One chart over rounds. Metrics that name the same panel are its lines."""

    title: str
    unit: str = ""
    scale: float = 1.0
    """Multiplies the values: 100 shows a share in percent."""
    in_picture: bool = True
    """Whether `semisfl report` draws it; the page draws every panel."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """The declaration of one key of ``metrics.jsonl``."""

    key: str
    meaning: str = ""
    unit: str = ""
    missing: str = "always there"
    """When a round has no value."""
    methods: str = "all"
    """Titles of the methods that report it, as docs/watching.md writes them."""
    section: str = "Training"
    """The heading of docs/watching.md under which it stands."""
    panel: Panel | None = None
    line: str = ""
    """Its name within the panel; empty: the whole, of which the others are parts."""
    gauge: str | None = ""
    """Its name for Prometheus after ``semisfl_``; empty: the key, or a term of ``loss``; None: it has no gauge."""

    @property
    def prometheus(self) -> str | None:
        """Return the full name for Prometheus, with its labels in braces."""
        if self.gauge == "" and self.key.startswith(LOSS):
            return "semisfl_loss{term}"
        return None if self.gauge is None else f"semisfl_{self.gauge or self.key}"


def metric(meaning: str, **about: Any) -> Any:
    """Return a dataclass field that is a metric; ``about`` has further values of `Metric`."""
    default = {"default_factory": dict} if about.pop("by_name", False) else {"default": None}
    return field(**default, metadata={"metric": {"meaning": meaning, **about}})


def declared(kind: type) -> list[Metric]:
    """Return the metrics among the fields of a class, in their order."""
    return [
        Metric(**{"key": item.name, **item.metadata["metric"]})
        for item in fields(kind)
        if "metric" in item.metadata
    ]


def panels_of(metrics: Iterable[Metric]) -> dict[Panel, list[Metric]]:
    """Return the lines of every panel that a metric names."""
    panels: dict[Panel, list[Metric]] = {}
    for one in metrics:
        if one.panel is not None:
            panels.setdefault(one.panel, []).append(one)
    return panels
