"""What a table or figure is made of: parts (a table, a panel) of cells, each a run and a number."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from semisfl.settings import config, presets
from semisfl.settings.config import Config

ROUNDS = 1000
"""Of every run in the paper."""
SEEDS = 10
"""Of every number in the paper."""

Shown = Literal["bars", "lines", "curves", "boxes", "holders"]


@dataclass(frozen=True)
class Value:
    """A number of the paper, with its standard error where one is given."""

    mean: float
    stderr: float | None = None
    derived: bool = False
    """Whether it was worked out from other numbers of the paper."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One place of a table, or one curve: a configuration, to be run with several seeds."""

    row: str
    column: str
    preset: str
    method: str = "semisfl"
    changes: tuple[str, ...] = ()
    """``key=value``, as of ``--set``."""
    paper: Value | None = None
    target: float | None = None
    """The accuracy that a cost is counted up to, in percent."""
    rounds: int = ROUNDS
    """Unless others are asked for."""

    def config(self, rounds: int | None = None, seed: int = 0, more: Sequence[str] = ()) -> Config:
        changes = [f"method={self.method}", f"rounds={rounds or self.rounds}", f"seed={seed}"]
        values = presets.values_of(self.preset)
        return config.parse(config.override(values, [*self.changes, *more, *changes]))


@dataclass(frozen=True, kw_only=True)
class Part:
    """A table, or a panel of a figure."""

    title: str
    cells: tuple[Cell, ...]
    measure: str = "accuracy"
    """What is read off each run, a key of `semisfl.paper.measures.MEASURES`."""
    rows: str = "method"
    columns: str = ""
    """What the rows and the columns stand for."""
    shown: Shown = "bars"
    curves: tuple[str, ...] = ("accuracy",)
    """With ``shown = "curves"``: keys of `semisfl.paper.measures.CURVES`."""


@dataclass(frozen=True, kw_only=True)
class Exhibit:
    """A table or figure: of the paper, or a record of our own."""

    name: str
    """As the command line has it: table3, fig8."""
    label: str
    """As the paper numbers it; empty: it is none of the paper's."""
    title: str
    parts: tuple[Part, ...] = ()
    """None: an illustration, which no run stands behind."""
    notes: tuple[str, ...] = ()
    """What had to be assumed, and what in the paper does not agree with itself."""

    @property
    def heading(self) -> str:
        return f"{self.label}: {self.title}" if self.label else self.title

    @property
    def cells(self) -> list[Cell]:
        """Those that runs stand behind; parts that share a run have a cell each."""
        return [cell for part in self.parts if part.shown != "holders" for cell in part.cells]


# --- what several grids share ---------------------------------------------------------------------

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


def dirichlet(alpha: str) -> tuple[str, ...]:
    return ("data.partition.kind=dirichlet", f"data.partition.alpha={alpha}")
