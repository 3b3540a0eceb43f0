"""A metric is declared in one place, and every reader has it: also one of another package."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from reproduction.tables.results import metrics_table
from semisfl.metrics import MethodMetrics, declared
from semisfl.runs import plots, report
from semisfl.runs.declared import own_metrics
from semisfl.runs.start import train
from semisfl.watch.exporter import Exporter
from semisfl.watch.views import Runs
from tests import toy
from tests.packages import imported_anew
from tests.toy import own
from tests.watch.test_exporter import FLEET

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
DECLARATION = PAGE.partition("# mypackage/metrics.py\n")[2].partition("```")[0]
METHOD = """
from semisfl.methods.supervised import Supervised
from semisfl.settings.catalog import NamedMethod
from mypackage.metrics import MyMetrics

class Mine(Supervised):
    def round(self, round_index):
        return MyMetrics(**vars(super().round(round_index)), agreement=0.25 + 0.5 * round_index)
"""
ENTRY = """
from semisfl.settings.catalog import NamedMethod

ENTRY = NamedMethod(
    name="mine", title="Mine", code="mypackage.method:Mine", metrics="mypackage.metrics:MyMetrics"
)
WRONG = NamedMethod(name="wrong", title="Wrong", code="mypackage.method:Mine", metrics="nowhere:No")
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install the package that docs/api.md shows."""
    folder = tmp_path / "project" / "mypackage"
    folder.mkdir(parents=True)
    for name, text in (("__init__", ENTRY), ("metrics", DECLARATION), ("method", METHOD)):
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder.parent))
    with imported_anew("mypackage"):
        yield


def trained(path: Path) -> str:
    """Train the package's method with every sink, and return what Prometheus would read."""
    exporter = Exporter(FLEET)
    settings = toy.values("mypackage:ENTRY", "rounds=2", 'sinks=["tensorboard"]')
    train(settings, out=path, sinks=[exporter], **own())
    return generate_latest(exporter._registry).decode()


def charts(path: Path) -> dict[str, Any]:
    """Return the panels of the page by the key of their first line."""
    return {panel["lines"][0]["key"]: panel for panel in Runs([path]).listing()["panels"]}


@pytest.mark.usefixtures("package")
def test_a_metric_declared_by_another_package_reaches_every_reader(tmp_path: Path) -> None:
    exported = trained(tmp_path / "run")
    (metric,) = own_metrics("mypackage:ENTRY")
    assert metrics_table([metric]).splitlines()[2] == (
        "| `agreement` | share of images on which student and teacher agree | 0 to 1 "
        "| always there | all | `semisfl_agreement` |"
    )
    assert "semisfl_agreement 0.75" in exported
    assert "# HELP semisfl_agreement last round: share of images on which" in exported
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [event.value for event in events.Scalars("agreement")] == [0.25, 0.75]
    panel = charts(tmp_path / "run")["agreement"]
    assert (panel["title"], panel["scale"]) == ("Agreement of student and teacher", 100)
    runs = Runs([tmp_path / "run"])
    (run,) = runs.listing()["runs"]
    columns = runs.rounds({run["id"]: (0, 0)})["runs"][run["id"]]["columns"]
    assert columns["agreement"] == [0.25, 0.75]
    (group,) = report.group_runs(report.find_runs([tmp_path / "run"]))
    drawn = {axes.get_title(): axes for axes in plots.picture([group]).axes}
    (line,) = drawn["Agreement of student and teacher (%)"].get_lines()
    assert list(line.get_ydata()) == [25.0, 75.0]


def test_every_number_of_a_round_is_declared_and_has_a_place() -> None:
    """A number without a panel or a gauge would be seen by nobody."""
    for one in declared(MethodMetrics):
        if not one.key.startswith("coverage_by_"):
            assert one.meaning and one.panel and one.prometheus, one.key
