"""The grids are complete, can be run, and have the paper's numbers."""

import pytest

from reproduction.paper.exhibits import EXHIBITS
from reproduction.paper.grid import STAND_INS, Cell
from reproduction.paper.index import identity as identity_of
from reproduction.paper.measures import CURVES, MEASURES
from semisfl.settings.config import Config

PAPER = [f"table{number}" for number in range(1, 6)] + [f"fig{number}" for number in range(3, 14)]


def identity(config: Config) -> str:
    return identity_of(config.model_dump(mode="json", exclude_none=True))


def cell(exhibit: str, row: str, column: str, part: int = 0) -> Cell:
    (only,) = (
        one for one in EXHIBITS[exhibit].parts[part].cells if (one.row, one.column) == (row, column)
    )
    return only


def test_every_table_and_figure_of_the_paper_is_there_in_its_order() -> None:
    assert list(EXHIBITS)[: len(PAPER)] == PAPER
    labels = [EXHIBITS[name].label for name in PAPER]
    assert labels[:5] == [f"Table {number}" for number in ("I", "II", "III", "IV", "V")]
    assert labels[5:] == [f"Figure {number}" for number in range(3, 14)]


@pytest.mark.parametrize("name", EXHIBITS)
def test_every_cell_is_a_valid_configuration_with_its_own_row_and_column(name: str) -> None:
    for part in EXHIBITS[name].parts:
        assert part.measure in (*MEASURES, "holders") and set(part.curves) <= CURVES.keys()
        places = {(one.row, one.column) for one in part.cells}
        assert len(places) == len(part.cells)
        for one in part.cells:
            changes = STAND_INS[one.preset].changes if one.preset in STAND_INS else ()
            assert identity(one.config()) != (identity(one.config(more=changes)) if changes else "")


def test_numbers_and_settings_of_the_paper() -> None:
    """Check one cell of each table against the paper by hand."""
    overall = cell("table1", "FedSwitch-SL", "IMAGE-100")
    assert (overall.paper.mean, overall.paper.stderr) == (61.1, 1.4)  # type: ignore[union-attr]
    config = overall.config()
    assert (config.data.name, config.model.name, config.data.partition.kind, config.rounds) == (
        *("image100", "vgg16", "iid", 1000),
    )
    skewed = cell("table2", "FedMatch", "SVHN")
    assert skewed.paper is not None and skewed.paper.mean == 84.1
    assert skewed.config().data.partition.alpha == 0.1
    steep = cell("table3", "SemiFL", "Dir(0.05)")
    assert steep.paper is not None and (steep.paper.mean, steep.paper.stderr) == (76.5, 1.1)
    assert steep.config().data.partition.alpha == 0.05
    head = cell("table4", "No Proj Head", "Dir(0.5)")
    assert head.paper is not None and head.paper.mean == 82.3
    assert head.config().model.projector == "none"
    few = cell("table5", "α = 4.0", "β = 12", part=2)
    assert few.paper is not None and few.paper.mean == 75.3
    assert few.config().controller.step_decay == 4 and few.config().data.labeled == 250
    assert few.config().controller.min_steps_factor == 12


def test_an_identity_depends_only_on_settings_that_the_method_reads() -> None:
    one = cell("table1", "SemiSFL", "CIFAR-10")
    base = identity(one.config())
    for same in ("runtime.checkpoint_every=7", "stop.target=80", "data.partition.alpha=0.3"):
        assert identity(one.config(more=[same])) == base, same
    assert identity(one.config(more=["fedmatch.lambda_i=0.5"])) == base
    changed = (
        "semisfl.queue=single",
        "clients.steps=7",
        "wire.models=int8",
        "robust.class_share=0.5",
    )
    for other in (*changed, "runtime.precision=fp32"):
        assert identity(one.config(more=[other])) != base, other
    frozen = ["semisfl.client_teacher=frozen"]
    assert identity(one.config(more=frozen)) != base
    rival = cell("table1", "FedSwitch-SL", "CIFAR-10")
    assert identity(rival.config(more=frozen)) == identity(rival.config())
