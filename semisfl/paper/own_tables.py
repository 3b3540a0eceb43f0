"""Tables that the paper does not have: what its choices are worth, and short comparisons."""

from semisfl.paper.grid import METHODS, SETS, Cell, Exhibit, Part, Value, dirichlet

CHOICES = {
    "default": (),
    "teacher.client=ema": ("teacher.client=ema",),
    "controller.kind=raw": ("controller.kind=raw",),
    "both of these": ("teacher.client=ema", "controller.kind=raw"),
}
# Where the choices are tried: settings, and the paper's accuracy.
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
        title="CIFAR-10, SemiSFL: the paper's choices in place of its published code's",
        parts=(
            Part(
                title="Test accuracy (%), CIFAR-10, SemiSFL",
                rows="choice",
                columns="where",
                cells=tuple(cells),
            ),
        ),
    )


def _short(name: str, title: str, rounds: int, presets: tuple[str, ...]) -> Exhibit:
    cells = tuple(
        Cell(
            row=METHODS[method],
            column=SETS.get(preset, preset),
            preset=preset,
            method=method,
            changes=dirichlet("0.1"),
            rounds=rounds,
        )
        for preset in presets
        for method in METHODS
    )
    part = Part(title=f"Test accuracy (%) after {rounds} rounds", columns="data set", cells=cells)
    return Exhibit(name=name, label="", title=title, parts=(part,))


TABLES = (
    _choices(),
    _short("short", "All six methods, Dirichlet(0.1), 200 rounds", 200, ("cifar10", "svhn")),
    _short("digits", "The embedded digits, all six methods", 30, ("digits",)),
)
