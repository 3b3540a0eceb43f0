"""Numbers of the records in results/ for tables in the docs: one, several seeds, or means over them."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean

from semisfl.paper.document import table_lines
from semisfl.runs.grouping import Group, Run, read_run
from semisfl.runs.reading import SUFFIX
from semisfl.runs.report import Summary, summarise
from semisfl.settings.lookup import note_of, title_of

RESULTS, DOCS = Path("results"), Path("docs")
METHODS = ("semisfl", "fedswitch-sl", "fedswitch", "fedmatch", "semifl", "fl2", "supervised")
SEEDS = ("", "-seed1", "-seed2")
UNKNOWN = "–"


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join(table_lines(head, lines))


def run(name: str) -> Run:
    """Return the run of the record ``results/NAME.run.json``."""
    return read_run(RESULTS / f"{name}{SUFFIX}")


def runs(name: str, seeds: Iterable[str] = SEEDS) -> list[Run]:
    """Return the runs whose names end in these seeds."""
    return [run(name + seed) for seed in seeds]


def every_seed(name: str) -> list[Run]:
    """Return the runs of the seeds that are recorded."""
    return runs(name, [seed for seed in SEEDS if (RESULTS / f"{name}{seed}{SUFFIX}").exists()])


def numbered(name: str, count: int) -> list[Run]:
    """Return seeds 0 to ``count`` - 1 of a comparison."""
    return runs(name, [f"-seed{seed}" for seed in range(count)])


def called(method: str) -> str:
    return title_of(method) + ("\\*" if note_of(method) else "")


def summed(members: list[Run], target: float | None = None) -> Summary:
    return summarise(Group("", members), target)


def accuracies(members: Iterable[Run]) -> list[float]:
    """Return each run's accuracy after its last round."""
    return [one.accuracy for one in members]


def on_test(members: Iterable[Run]) -> list[float]:
    """Return the accuracy on the test set of runs that are judged on validation images."""
    return [one.tested[-1].test_accuracy or 0.0 for one in members]


def each(values: Iterable[float | None], digits: int = 1) -> str:
    """Return one number per seed."""
    return ", ".join(UNKNOWN if value is None else f"{value:,.{digits}f}" for value in values)


def sent(members: Sequence[Run], unit: float = 1e9, digits: int = 0) -> str:
    return f"{fmean(one.rounds[-1].bytes_total or 0 for one in members) / unit:,.{digits}f}"


def percent(value: float | None) -> str:
    return UNKNOWN if value is None else f"{100 * value:.1f} %"
