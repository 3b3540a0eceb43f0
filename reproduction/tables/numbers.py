"""Numbers of recorded runs as the tables show them: one run, several seeds, or means over them."""

from collections.abc import Iterable, Sequence
from statistics import fmean

from reproduction import records
from reproduction.records import run
from semisfl.runs.report import Group, Run, Spread, Summary, ToTarget, summarise
from semisfl.settings.lookup import note_of, title_of

METHODS = ("semisfl", "fedswitch-sl", "fedswitch", "fedmatch", "semifl", "fl2", "supervised")
SEEDS = ("", "-seed1", "-seed2")
UNKNOWN = "–"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def runs(path: str, seeds: Iterable[str] = SEEDS) -> list[Run]:
    """Return the runs whose names end in these seeds."""
    return [run(path + seed) for seed in seeds]


def every_seed(path: str) -> list[Run]:
    """Return the runs of the seeds that are recorded."""
    return runs(path, [seed for seed in SEEDS if records.exists(path + seed)])


def numbered(path: str, count: int) -> list[Run]:
    """Return seeds 0 to ``count`` - 1 of a comparison."""
    return runs(path, [f"-seed{seed}" for seed in range(count)])


def called(method: str) -> str:
    """Return a method's title, with a star if a note belongs to it."""
    return title_of(method) + ("\\*" if note_of(method) else "")


def summed(members: list[Run], target: float | None = None) -> Summary:
    """Return the means over runs, and the costs of reaching ``target`` percent."""
    return summarise(Group("", members), target)


def cost_of(members: list[Run], target: float) -> ToTarget:
    """Return what reaching ``target`` percent took, on average over the runs that reached it."""
    cost = summed(members, target).to_target
    assert cost is not None
    return cost


def known(value: float | None, digits: int = 1, unit: float = 1.0) -> str:
    """Return a number in ``unit``, or a dash for None."""
    return UNKNOWN if value is None else f"{value / unit:,.{digits}f}"


def accuracies(members: Iterable[Run]) -> list[float]:
    """Return each run's accuracy after its last round."""
    return [one.accuracy for one in members]


def on_test(members: Iterable[Run]) -> list[float]:
    """Return the accuracy on the test set of runs that are judged on validation images."""
    return [one.tested[-1].test_accuracy or 0.0 for one in members]


def each(values: Iterable[float | None], digits: int = 1) -> str:
    """Return one number per seed."""
    return ", ".join(known(value, digits) for value in values)


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Return mean and standard error; one value stands alone."""
    summary = Spread.of(values)
    error = "" if len(values) < 2 else f" ± {summary.stderr:.{digits}f}"
    return f"{summary.mean:.{digits}f}{error}"


def sent(members: Sequence[Run], unit: float = 1e9, digits: int = 0) -> str:
    """Return the mean of all bytes that the runs sent, in ``unit``."""
    return f"{fmean(one.rounds[-1].bytes_total or 0 for one in members) / unit:,.{digits}f}"


def percent(value: float | None) -> str:
    """Return a share in percent."""
    return UNKNOWN if value is None else f"{100 * value:.1f} %"
