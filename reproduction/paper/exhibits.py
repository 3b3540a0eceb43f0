"""Every table and figure of the paper, and tables of our own, by name."""

from reproduction.paper import (
    ablations,
    cost_figures,
    data_figures,
    methods_tables,
    own_tables,
    step_figures,
)
from reproduction.paper.grid import Exhibit
from semisfl.settings.config import ConfigError

ILLUSTRATIONS = (
    Exhibit(name="fig1", label="Figure 1", title="Illustration of clustering regularization"),
    Exhibit(name="fig2", label="Figure 2", title="System workflow"),
)
_TABLES = (*methods_tables.TABLES, *ablations.TABLES)
_FIGURES = (
    *ILLUSTRATIONS,
    *step_figures.FIGURES,
    *cost_figures.FIGURES,
    *data_figures.FIGURES,
    *ablations.FIGURES,
)
EXHIBITS = {
    exhibit.name: exhibit
    for exhibit in (
        *_TABLES,
        *sorted(_FIGURES, key=lambda one: int(one.name.removeprefix("fig"))),
        *own_tables.TABLES,
    )
}


def choose(names: list[str]) -> list[Exhibit]:
    """Return the named exhibits, or with ``all`` every one that is made from runs or from data."""
    if names == ["all"]:
        return [exhibit for exhibit in EXHIBITS.values() if exhibit.parts]
    for name in names:
        if name not in EXHIBITS:
            raise ConfigError(
                f"{name!r} is no known table or figure; use all, or some of {', '.join(EXHIBITS)}"
            )
        if not EXHIBITS[name].parts:
            exhibit = EXHIBITS[name]
            raise ConfigError(
                f"{exhibit.label} ({exhibit.title}) is an illustration without runs; choose another"
            )
    return [EXHIBITS[name] for name in dict.fromkeys(names)]
