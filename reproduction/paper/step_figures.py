"""Figures 3 to 6 and 12: the number of supervised steps per round, K_s, and the effect of adapting it."""

from dataclasses import replace

from reproduction.paper.grid import LABELS, Cell, Exhibit, Part, Value

STEPS = ("20", "50", "100")
# "A simple environment comprising 10 clients and 1 PS with K_u = 50", the CNN.
SMALL = ("clients.total=10", "clients.active=10", "clients.steps=50")
ASSUMED = (
    "The paper's small environment: 10 clients, K_u = 50, the CNN. Here it uses SVHN, IID, with all clients "
    "active. The paper's text names K_s = 20 and 100; 50 is assumed."
)


def _fixed(steps: str) -> Cell:
    return Cell(
        row=f"K_s = {steps}",
        column=steps,
        preset="svhn",
        changes=(*SMALL, "controller.kind=fixed", f"server.steps={steps}"),
    )


FIXED = tuple(_fixed(steps) for steps in STEPS)
ADAPTED = Cell(
    row="adapted (α = 2, β = 4)",
    column="100",
    preset="svhn",
    changes=(
        *SMALL,
        "server.steps=100",
        "controller.step_decay=2",
        "controller.min_steps_factor=4",
    ),
)


def _course(title: str, curve: str, cells: tuple[Cell, ...], measure: str = "accuracy") -> Part:
    return Part(
        title=title,
        rows="K_s",
        columns="first K_s",
        measure=measure,
        shown="curves",
        curves=(curve,),
        cells=cells,
    )


_PHASES = Exhibit(
    name="fig3",
    label="Figure 3",
    title="Loss in both training phases",
    parts=(
        _course("Semi-supervised loss, last round", "loss_semi", FIXED, "loss_semi"),
        _course("Supervised loss, last round", "loss_supervised", FIXED, "loss_supervised"),
    ),
    notes=(ASSUMED, "The paper does not give the settings of its curves."),
)
_STEPS = Exhibit(
    name="fig4",
    label="Figure 4",
    title="Model training with different K_s",
    parts=(
        Part(
            title="Rounds to equilibrium by K_s",
            rows="K_s",
            columns="K_s",
            measure="equilibrium",
            shown="lines",
            cells=tuple(replace(cell, row="SemiSFL, K_s fixed") for cell in FIXED),
        ),
        _course("Test accuracy (%) by K_s", "accuracy", FIXED),
    ),
    notes=(
        ASSUMED,
        "Equilibrium: the first 50 successive rounds over which the sum of both losses has a variance "
        "below 0.01.",
    ),
)
_REDUCTION = Exhibit(
    name="fig5",
    label="Figure 5",
    title="Loss reduction during training",
    parts=(
        Part(
            title="Δf_s and Δf_u with K_s = 20",
            rows="K_s",
            columns="K_s",
            measure="semi_faster_share",
            shown="curves",
            curves=("fall_supervised", "fall_semi"),
            cells=(FIXED[0],),
        ),
        _course("R_h with different K_s", "semi_faster_share", FIXED, "semi_faster_share"),
    ),
    notes=(
        ASSUMED,
        "A fall is the mean loss of ten rounds minus that of the next ten. R_h is the share of ten such "
        "falls in which the semi-supervised loss fell more. The tables have R_h of the last 100 rounds.",
    ),
)
_ADAPTING = Exhibit(
    name="fig6",
    label="Figure 6",
    title="Training with and without the algorithm that adapts K_s",
    parts=(
        _course("Sum of both losses, last round", "loss", (*FIXED, ADAPTED), "loss"),
        _course("Test accuracy (%)", "accuracy", (*FIXED, ADAPTED)),
    ),
    notes=(ASSUMED,),
)


def _by_labels(adapted: bool) -> tuple[Cell, ...]:
    changes = () if adapted else ("controller.kind=fixed",)
    return tuple(
        Cell(
            row="with adaptation" if adapted else "without",
            column=labels,
            preset="cifar10",
            changes=(f"data.labeled={labels}", *changes),
            paper=_published(labels, adapted),
        )
        for labels in LABELS
    )


def _published(labels: str, adapted: bool) -> Value | None:
    """Return the accuracy that the paper has for a number of labels, or None."""
    if labels == "250":
        return Value(82.9) if adapted else Value(82.9 - 10.8, derived=True)
    return Value(88.6) if labels == "4000" and adapted else None


_ADAPTATION = Exhibit(
    name="fig12",
    label="Figure 12",
    title="Impact of adapting K_s, CIFAR-10",
    parts=(
        Part(
            title="Test accuracy (%) by number of labels",
            rows="K_s",
            columns="labels",
            cells=(*_by_labels(True), *_by_labels(False)),
        ),
        Part(
            title="K_s over the rounds, median",
            rows="K_s",
            columns="labels",
            measure="supervised_steps",
            shown="boxes",
            cells=tuple(replace(cell, paper=None) for cell in _by_labels(True)),
        ),
    ),
    notes=(
        "The paper's text names 250 labels: there adaptation is worth 10.8 points, and K_s is mainly below "
        "30. The other counts are assumed. SemiSFL's numbers are those of Tables I and V. The value without "
        "adaptation is 82.9 - 10.8.",
    ),
)

FIGURES = (_PHASES, _STEPS, _REDUCTION, _ADAPTING, _ADAPTATION)
