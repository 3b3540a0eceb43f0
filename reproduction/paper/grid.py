"""The structure of a table or figure: parts (tables or panels) of cells. A cell is a run and a number."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from semisfl.settings import config, presets
from semisfl.settings.config import Config

ROUNDS = 1000
"""Rounds of every run in the paper."""
AS_RECORDED = ("fedmatch.mean_over=confident", "fedmatch.lambda_a=0.01")
"""FedMatch's settings in its recorded runs. Today's defaults are others, and were not run at this length."""

Shown = Literal["bars", "lines", "curves", "boxes", "holders"]


@dataclass(frozen=True)
class Value:
    """A number of the paper, with its standard error if the paper has one."""

    mean: float
    stderr: float | None = None
    derived: bool = False
    """Whether it was computed from other numbers of the paper."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell of a table, or one curve: a configuration that is run with several seeds."""

    row: str
    column: str
    preset: str
    method: str = "semisfl"
    changes: tuple[str, ...] = ()
    """Changes as for ``--set``: ``key=value``."""
    paper: Value | None = None
    target: float | None = None
    """Costs are counted until this accuracy is reached, in percent."""
    rounds: int = ROUNDS
    """The default number of rounds."""

    def config(self, rounds: int | None = None, seed: int = 0, more: Sequence[str] = ()) -> Config:
        """Return the cell's configuration with a seed, and with other rounds or more changes."""
        changes = [f"method={self.method}", f"rounds={rounds or self.rounds}", f"seed={seed}"]
        values = presets.values_of(self.preset)
        recorded = AS_RECORDED if self.method == "fedmatch" else ()
        return config.parse(config.override(values, [*recorded, *self.changes, *more, *changes]))


@dataclass(frozen=True, kw_only=True)
class Part:
    """A table, or a panel of a figure."""

    title: str
    cells: tuple[Cell, ...]
    measure: str = "accuracy"
    """The number read from each run: a key of `reproduction.paper.measures.MEASURES`."""
    rows: str = "method"
    columns: str = ""
    """Headings of the rows and of the columns."""
    shown: Shown = "bars"
    curves: tuple[str, ...] = ("accuracy",)
    """The curves to draw if ``shown = "curves"``: keys of `reproduction.paper.measures.CURVES`."""


@dataclass(frozen=True, kw_only=True)
class Exhibit:
    """A table or figure, of the paper or of our own."""

    name: str
    """Its name on the command line: table3, fig8."""
    label: str
    """Its label in the paper; empty if it is our own."""
    title: str
    parts: tuple[Part, ...]
    notes: tuple[str, ...] = ()
    """Assumptions, and contradictions in the paper."""

    @property
    def heading(self) -> str:
        """Return label and title."""
        return f"{self.label}: {self.title}" if self.label else self.title

    @property
    def cells(self) -> list[Cell]:
        """Return the cells that need runs; parts that share a run have a cell each."""
        return [cell for part in self.parts if part.shown != "holders" for cell in part.cells]


# --- shared by several grids ----------------------------------------------------------------------

METHODS = {
    "supervised": "Supervised-only",
    "semifl": "SemiFL",
    "fedmatch": "FedMatch",
    "fedswitch": "FedSwitch",
    "fedswitch-sl": "FedSwitch-SL",
    "semisfl": "SemiSFL",
}
WITH_CLIENTS = tuple(name for name in METHODS if name != "supervised")
SETS = {"svhn": "SVHN", "cifar10": "CIFAR-10", "stl10": "STL-10", "image100": "IMAGE-100"}
SKEWS = ("1.0", "0.5", "0.1", "0.05")
LABELS = ("250", "500", "1000", "2000", "4000")


@dataclass(frozen=True)
class StandIn:
    """Data used in place of the paper's."""

    called: str
    """The description shown beside every number measured on it."""
    changes: tuple[str, ...]
    """Changes to the paper's settings: ``key=value``."""


STAND_INS = {
    "stl10": StandIn(
        "STL-10 with 4,903 labels and no monkey in the test; in place of its unlabelled images "
        "mini-ImageNet resized to 96×96",
        ("data.labeled=4903", "data.unlabeled=miniimagenet"),
    ),
    "image100": StandIn(
        "mini-ImageNet: 100 other classes, 84×84", ("data.name=miniimagenet", "data.labeled=5000")
    ),
}


def set_title(preset: str) -> str:
    """Return the title of a preset's data set."""
    return SETS.get(preset.partition("+")[0], preset)


def dirichlet(alpha: str) -> tuple[str, ...]:
    """Return the changes for a Dirichlet partition with ``alpha``."""
    return ("data.partition.kind=dirichlet", f"data.partition.alpha={alpha}")
