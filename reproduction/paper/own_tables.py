"""Tables that the paper does not have: the effect of its choices, and short comparisons."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from reproduction.paper.cost_figures import UNITS, VIRTUAL_HOURS, to_reach
from reproduction.paper.grid import (
    METHODS,
    SETS,
    WITH_CLIENTS,
    Cell,
    Exhibit,
    Part,
    Value,
    dirichlet,
)

CHOICES = {
    "default": (),
    "semisfl.client_teacher=frozen": ("semisfl.client_teacher=frozen",),
    "controller.kind=raw": ("controller.kind=raw",),
}
# The choices are compared in these settings; the number is the paper's accuracy.
PLACES = {
    "IID, 250 labels": (("data.labeled=250",), 82.9),
    "Dir(0.05)": (dirichlet("0.05"), 82.3),
    "Dir(0.1)": (dirichlet("0.1"), 83.8),
}


def _choices() -> Exhibit:
    cells = [
        Cell(
            row=choice,
            column=place,
            preset="cifar10",
            changes=(*settings, *changes),
            paper=Value(paper),
        )
        for place, (settings, paper) in PLACES.items()
        for choice, changes in CHOICES.items()
    ]
    cells += [
        Cell(
            row="as_in_paper",
            column=place,
            preset="cifar10+as_in_paper",
            changes=settings,
            paper=Value(paper),
        )
        for place, (settings, paper) in PLACES.items()
    ]
    return Exhibit(
        name="choices",
        label="",
        title="CIFAR-10, SemiSFL: the paper's choices and its published code's",
        parts=(
            Part(
                title="Test accuracy (%), CIFAR-10, SemiSFL",
                rows="choice",
                columns="where",
                cells=tuple(cells),
            ),
        ),
    )


def _short(
    name: str,
    title: str,
    rounds: int,
    presets: Sequence[str],
    methods: Sequence[str] = tuple(METHODS),
    changes: tuple[str, ...] = dirichlet("0.1"),
    targets: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> Exhibit:
    """Return a comparison of methods after a few rounds, and of their costs to reach ``targets``."""
    cells = tuple(
        Cell(
            row=METHODS[method],
            column=SETS.get(preset, preset),
            preset=preset,
            method=method,
            changes=changes,
            rounds=rounds,
        )
        for preset in presets
        for method in methods
    )
    sending = [method for method in methods if method in WITH_CLIENTS]
    parts = [
        Part(title=f"Test accuracy (%) after {rounds} rounds", columns="data set", cells=cells)
    ]
    parts += [
        to_reach(measure, preset, wanted, sending, changes=changes, rounds=rounds)
        for preset, wanted in targets.items()
        for measure in UNITS
    ]
    notes = (VIRTUAL_HOURS,) if targets else ()
    return Exhibit(name=name, label="", title=title, parts=tuple(parts), notes=notes)


TABLES = (
    _choices(),
    _short(
        "short",
        "All six methods, Dirichlet(0.1), 200 rounds",
        200,
        ("cifar10", "svhn"),
        targets={"cifar10": (70, 75), "svhn": (75, 80)},
    ),
    _short(
        "vgg",
        "The presets with VGG13 and VGG16, IID, 60 rounds",
        60,
        ("stl10", "image100"),
        methods=("supervised", "fedswitch-sl", "semisfl"),
        changes=(),
        targets={"stl10": (80, 82), "image100": (30, 33)},
    ),
    _short("digits", "The embedded digits, all six methods", 30, ("digits",)),
)
