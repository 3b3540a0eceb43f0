"""Tables I to III: the methods against each other."""

from reproduction.paper.grid import METHODS, SETS, SKEWS, Cell, Exhibit, Part, Value, dirichlet

# Accuracy in percent and its standard error over ten trials, in the order of the columns.
OVERALL = {
    "supervised": ((73.6, 0.2), (75.1, 0.5), (81.9, 0.2), (26.1, 0.7)),
    "semifl": ((88.1, 0.7), (86.8, 1.2), (90.7, 2.5), (65.4, 2.0)),
    "fedmatch": ((88.4, 0.6), (86.1, 1.1), (77.5, 1.1), (29.6, 1.7)),
    "fedswitch": ((89.0, 0.5), (87.9, 1.0), (91.5, 0.3), (60.3, 1.5)),
    "fedswitch-sl": ((89.1, 0.4), (87.5, 0.8), (90.1, 0.4), (61.1, 1.4)),
    "semisfl": ((91.4, 0.4), (88.6, 0.2), (92.8, 0.3), (66.6, 0.3)),
}
SKEWED_SETS = {
    "semifl": ((80.5, 0.7), (78.9, 0.9), (50.8, 1.7)),
    "fedmatch": ((84.1, 0.6), (79.7, 1.0), (29.1, 1.7)),
    "fedswitch": ((82.9, 0.5), (79.4, 0.6), (48.9, 1.8)),
    "fedswitch-sl": ((83.0, 0.7), (79.2, 0.7), (49.3, 1.6)),
    "semisfl": ((87.2, 0.2), (83.8, 0.2), (56.1, 0.4)),
}
SKEWED_CIFAR10 = {
    "semifl": ((84.9, 0.9), (83.1, 1.3), (78.9, 0.9), (76.5, 1.1)),
    "fedmatch": ((85.9, 1.0), (84.4, 1.1), (79.7, 1.0), (76.6, 1.4)),
    "fedswitch": ((86.2, 1.0), (83.8, 1.1), (79.4, 0.6), (77.3, 1.0)),
    "fedswitch-sl": ((86.4, 1.0), (84.1, 0.7), (79.2, 0.7), (77.2, 1.1)),
    "semisfl": ((87.9, 0.2), (86.8, 0.2), (83.8, 0.2), (82.3, 0.1)),
}


def _table1() -> Exhibit:
    cells = [
        Cell(row=METHODS[method], column=title, preset=name, method=method, paper=Value(*value))
        for method, values in OVERALL.items()
        for (name, title), value in zip(SETS.items(), values, strict=True)
    ]
    return Exhibit(
        name="table1",
        label="Table I",
        title="Overall test accuracy (%), IID",
        parts=(Part(title="Test accuracy (%), IID", columns="data set", cells=tuple(cells)),),
    )


def _table2() -> Exhibit:
    names = ("svhn", "cifar10", "image100")
    cells = [
        Cell(
            row=METHODS[method],
            column=SETS[name],
            preset=name,
            method=method,
            changes=dirichlet("0.1"),
            paper=Value(*value),
        )
        for method, values in SKEWED_SETS.items()
        for name, value in zip(names, values, strict=True)
    ]
    return Exhibit(
        name="table2",
        label="Table II",
        title="Test accuracy (%) on different data sets, Dirichlet(0.1)",
        parts=(
            Part(title="Test accuracy (%), Dirichlet(0.1)", columns="data set", cells=tuple(cells)),
        ),
    )


def cifar10_by_skew() -> tuple[Cell, ...]:
    """Return the cells of Table III; Figure 10 shows the same runs as curves."""
    return tuple(
        Cell(
            row=METHODS[method],
            column=f"Dir({alpha})",
            preset="cifar10",
            method=method,
            changes=dirichlet(alpha),
            paper=Value(*value),
        )
        for method, values in SKEWED_CIFAR10.items()
        for alpha, value in zip(SKEWS, values, strict=True)
    )


def _table3() -> Exhibit:
    return Exhibit(
        name="table3",
        label="Table III",
        title="Test accuracy (%) on CIFAR-10 with different data distributions",
        parts=(
            Part(
                title="Test accuracy (%), CIFAR-10",
                columns="distribution",
                cells=cifar10_by_skew(),
            ),
        ),
    )


TABLES = (_table1(), _table2(), _table3())
