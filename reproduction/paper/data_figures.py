"""Figures 9 to 11: each client's data, training under each distribution, and the number of labels."""

from dataclasses import replace

from reproduction.paper.grid import LABELS, METHODS, SKEWS, Cell, Exhibit, Part, Value, dirichlet
from reproduction.paper.methods_tables import cifar10_by_skew

# The accuracies by number of labels that the paper's text gives.
PUBLISHED = {
    ("fedswitch-sl", "4000"): 87.9,
    ("fedswitch-sl", "250"): 63.0,
    ("semisfl", "250"): 82.9,
    ("semisfl", "4000"): 88.6,
}

_HOLDERS = Exhibit(
    name="fig9",
    label="Figure 9",
    title="Data distribution of each client with different non-IID levels",
    parts=tuple(
        Part(
            title=f"Dir({alpha})",
            measure="holders",
            shown="holders",
            cells=(
                Cell(
                    row="clients",
                    column=f"Dir({alpha})",
                    preset="cifar10",
                    changes=dirichlet(alpha),
                ),
            ),
        )
        for alpha in SKEWS
    ),
    notes=(
        "Computed from the seed and the 5,000 images of each class; nothing is trained for it.",
    ),
)

_CURVES = Exhibit(
    name="fig10",
    label="Figure 10",
    title="Training process on different data distributions, CIFAR-10",
    parts=tuple(
        Part(
            title=f"Dir({alpha})",
            columns="distribution",
            shown="curves",
            cells=tuple(cell for cell in cifar10_by_skew() if cell.column == f"Dir({alpha})"),
        )
        for alpha in SKEWS
    ),
    notes=("The runs of Table III.",),
)


def _by_labels(methods: tuple[str, ...]) -> tuple[Cell, ...]:
    return tuple(
        Cell(
            row=METHODS[method],
            column=labels,
            preset="cifar10",
            method=method,
            changes=(f"data.labeled={labels}",),
            paper=Value(value) if (value := PUBLISHED.get((method, labels))) else None,
        )
        for method in methods
        for labels in LABELS
    )


def _reliability(measure: str, title: str) -> Part:
    cells = tuple(replace(cell, paper=None) for cell in _by_labels(("fedswitch", "semisfl")))
    return Part(title=title, columns="labels", measure=measure, shown="lines", cells=cells)


_LABELS = Exhibit(
    name="fig11",
    label="Figure 11",
    title="Accuracy and reliability of pseudo-labels by the number of labels, CIFAR-10",
    parts=(
        Part(
            title="Test accuracy (%) by number of labels",
            columns="labels",
            shown="lines",
            cells=_by_labels(("fedswitch", "fedswitch-sl", "semisfl")),
        ),
        _reliability("mask_rate", "Mask rate (%): unlabelled images left unused"),
        _reliability("impurity", "Impurity (%): wrong labels among those used"),
    ),
    notes=(
        "The paper's text names 4,000, 500 and 250 labels and FedSwitch-SL, FedSwitch and SemiSFL. The "
        "counts between are assumed. For FedSwitch-SL with 4,000 labels the text has 87.9, but Table I has "
        "87.5. SemiSFL's numbers are those of Tables I and V.",
    ),
)

FIGURES = (_HOLDERS, _CURVES, _LABELS)
