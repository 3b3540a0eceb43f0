"""Report runs: group those that differ in nothing but their seed, and sum up accuracies, costs and differences.

The steps are `find_runs`, `group_runs`, `summarise` for the lines of a table, `differences` for pairs of groups over
their common seeds, and `write_table` for a file. Accuracies are in percent, their differences in points.


Imports nothing that trains.
"""

import csv
import io
import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from statistics import NormalDist, fmean, stdev
from typing import Any

from semisfl.files import write_whole
from semisfl.metrics import RoundMetrics
from semisfl.runs.reading import (
    Standing,
    holds_run,
    limits_of,
    met,
    no_run,
    read_config,
    read_holdings,
    read_rounds,
    read_title,
    runs_inside,
)
from semisfl.settings.lookup import note_of, title_of
from semisfl.settings.plain_values import flatten

log = logging.getLogger(__name__)

MOST_DIFFERENCES = 4
"""More settings would not fit a cell of a table or a legend."""
UNSEEN = ("runtime.checkpoint_every", "runtime.evaluate_every", "runtime.best_by")
"""Settings that change no number of a round."""


@dataclass(frozen=True)
class Run:
    """A run as it was read."""

    path: Path
    config: dict[str, Any]
    rounds: list[RoundMetrics]

    @property
    def complete(self) -> bool:
        """Return whether all its rounds are done."""
        return bool(self.rounds) and self.rounds[-1].round + 1 >= self.config["rounds"]

    @property
    def stopped_by(self) -> str | None:
        """Return the key of ``stop`` that is met, or None."""
        return met(limits_of(self.config), Standing.after(self.rounds)) if self.rounds else None

    @property
    def finished(self) -> bool:
        """Return whether it has nothing left to do: all rounds are done, a limit is met, or it diverged."""
        return self.complete or self.diverged or self.stopped_by is not None

    @property
    def diverged(self) -> bool:
        """Return whether losses or weights are not finite after its last round."""
        return bool(self.rounds and self.rounds[-1].diverged)

    @property
    def tested(self) -> list[RoundMetrics]:
        """Return the rounds that were tested."""
        return [metrics for metrics in self.rounds if metrics.accuracy is not None]

    @property
    def accuracy(self) -> float:
        """Return the accuracy of its last test, in percent; only a tested run has one."""
        accuracy = self.tested[-1].accuracy
        assert accuracy is not None
        return accuracy

    def accuracy_on(self, images: str) -> float | None:
        """Return the accuracy of its last test on ``test`` or ``validation`` images; None if it did not read these."""
        here = images == judged_on(self.config)
        return self.accuracy if here else self.tested[-1].test_accuracy

    @property
    def seed(self) -> object:
        """Return the seed, by which runs of two groups are paired."""
        return self.config.get("seed", 0)

    @property
    def progress(self) -> str:
        """Return how far it got, in words."""
        done = self.rounds[-1].round + 1 if self.rounds else 0
        return f"round {done} of {self.config['rounds']}"


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but their seed and got equally far, so that means are fair."""

    name: str
    """The title of their method, and the name of their variant if a comparison gave them one."""
    runs: list[Run]
    differs: Mapping[str, str] = field(default_factory=dict)
    """The settings that tell these runs from the other groups of their method."""
    left_out: list[Run] = field(default_factory=list)
    """Runs of the same settings that got less far, or repeat a seed."""
    remark: str = ""
    """Says what is unfinished about the group; empty if nothing is."""
    finished: bool = True

    @property
    def label(self) -> str:
        """Return its name in a table or legend."""
        return label_of(self.name, self.differs)

    @property
    def method(self) -> str:
        """Return the name of the method that its runs have in common."""
        return str(self.runs[0].config["method"])

    @property
    def judged_on(self) -> str:
        """Return the kind of images on which its accuracies are measured: ``test`` or ``validation``."""
        return judged_on(self.runs[0].config)


def label_of(name: str, differs: Mapping[str, str]) -> str:
    """Return a name and the settings that differ: at most `MOST_DIFFERENCES` of them, and a mark that there are more."""
    shown = [f"{key}={value}" for key, value in differs.items()]
    more = ["…"] if len(shown) > MOST_DIFFERENCES else []
    return " ".join([name, *shown[:MOST_DIFFERENCES], *more])


def judged_on(config: Mapping[str, Any]) -> str:
    """Return the kind of images on which a run's ``accuracy`` is measured: ``test`` or ``validation``.

    ``config`` are the plain values of its configuration.
    """
    return "validation" if config.get("data", {}).get("validation") is not None else "test"


def read_run(path: Path) -> Run:
    """Return the run of a run directory."""
    return Run(path, read_config(path), read_rounds(path, RoundMetrics.from_dict))


def find_runs(paths: Sequence[Path]) -> list[Run]:
    """Return the runs at ``paths``, each once; a folder that is no run stands for the runs directly inside it.

    Raises ValueError for a path without runs, and if no run has a tested round yet.
    """
    runs: dict[Path, Run] = {}
    for path in paths:
        inside = [path] if holds_run(path) else runs_inside(path)
        if not inside:
            raise no_run(str(path))
        for place in inside:
            runs.setdefault(place.resolve(), read_run(place))
    if not any(run.tested for run in runs.values()):
        raise ValueError(
            f"no round was tested yet in {', '.join(str(run.path) for run in runs.values())}; "
            "wait for a round or continue with `semisfl run --resume`"
        )
    return list(runs.values())


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Group runs by configuration, in the order of each group's first run.

    Runs on different images that a program passed are in groups of their own. Finished and unfinished runs are never
    averaged together: a group has its finished runs, or else the run that got furthest; the others are its
    ``left_out``. A group without a tested round is left out, with a warning.
    """
    # Settings do not name the images that a program passed to `train`: their digest tells them apart.
    configs = [
        run.config | {"images": digest[:8]}
        if (digest := read_holdings(run.path).get("images"))
        else run.config
        for run in runs
    ]
    groups = []
    for differs, places in alike_but_for_seed(configs):
        alike = [runs[place] for place in places]
        name = read_title(alike[0].path, alike[0].config["method"])
        if any(run.tested for run in alike):
            groups.append(_fair(name, differs, alike))
        else:
            paths = ", ".join(str(run.path) for run in alike)
            log.warning(
                "%s is left out: no round was tested yet in %s", label_of(name, differs), paths
            )
    return groups


def alike_but_for_seed(
    configs: Sequence[Mapping[str, Any]],
) -> list[tuple[dict[str, str], list[int]]]:
    """Return groups of configurations that differ only in their seed, in the order of the first of each group.

    Each group is the settings that tell it from the other groups of its method, by dotted key (values that at most
    half of these groups have), and its places in ``configs``.
    """
    by: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for place, config in enumerate(configs):
        by.setdefault(tuple(sorted(_settings(config).items())), []).append(place)
    settings = [dict(key) for key in by]
    groups = []
    for own, places in zip(settings, by.values(), strict=True):
        rivals = [one for one in settings if one["method"] == own["method"]]
        keys = dict.fromkeys(key for one in (own, *rivals) for key in one)
        values = {key: [one.get(key, "none") for one in rivals] for key in keys}
        differs = {
            key: own.get(key, "none")
            for key in keys
            if len(rivals) > 1 and 2 * values[key].count(own.get(key, "none")) <= len(rivals)
        }
        groups.append((differs, places))
    return groups


def _settings(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings that may change a run's numbers, without its seed, as text by dotted key."""
    values = flatten(config)
    if values.get("fleet.kind") == "cluster":  # ranks of torchrun give what one process does
        values["fleet.kind"] = "local"
    hidden = ("seed", *UNSEEN)
    return {
        key: str(value)
        for key, value in values.items()
        if key not in hidden and not key.startswith("sinks")
    }


def _fair(name: str, differs: Mapping[str, str], runs: list[Run]) -> Group:
    """Return a group with one finished run per seed; if none is finished, with the run that got furthest."""
    best: dict[object, Run] = {}
    for run in sorted(runs, key=lambda run: (not run.tested, not run.finished, -len(run.tested))):
        best.setdefault(run.seed, run)
    again = [run for run in runs if run is not best[run.seed]]
    once = [run for run in runs if run is best[run.seed]]
    finished = [run for run in once if run.finished and run.tested]
    used = finished
    if not finished:
        furthest = max(once, key=lambda run: len(run.tested))
        tested = [one for one in furthest.rounds if one.round <= furthest.tested[-1].round]
        used = [replace(furthest, rounds=tested)]
    paths = {run.path for run in used}
    begun = [run for run in once if run.path not in paths]
    limited = [run for run in finished if not run.complete and not run.diverged]
    diverged = [run for run in used if run.diverged]
    remarks = [
        f"{len(some)} of {len(runs)} runs {what}: {', '.join(map(how, some))}"
        for some, what, how in (
            (again, "left out as there twice", lambda run: f"{run.path} (seed {run.seed})"),
            (begun, "left out as unfinished", lambda run: f"{run.path} ({run.progress})"),
            (
                limited,
                "ended by a limit",
                lambda run: f"{run.path} (stop.{run.stopped_by}, {run.progress})",
            ),
            (diverged, "diverged", lambda run: str(run.path)),
        )
        if some
    ]
    if not finished:
        remarks.append(f"no run is finished; numbers are those after {used[0].progress}")
    return Group(name, used, differs, [*again, *begun], "; ".join(remarks), bool(finished))


# --- summaries -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spread:
    """A mean and its standard error over seeds; the error is None for a single value."""

    mean: float
    stderr: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Return the mean of at least one value and its standard error: s / √n."""
        error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
        return cls(fmean(values), error)

    def __str__(self) -> str:
        return f"{self.mean:.1f}" + (f" ± {self.stderr:.1f}" if self.stderr is not None else "")


@dataclass(frozen=True)
class ToTarget:
    """The cost of reaching an accuracy: means over the runs that reached it; None if none did."""

    reached: int
    """The number of runs that reached it."""
    rounds: float | None
    bytes: float | None
    seconds: float | None


@dataclass(frozen=True)
class Summary:
    """The results of a group: one line of a table. Accuracies are in percent."""

    label: str
    method: str
    runs: list[Path]
    left_out: list[Path]
    remark: str
    rounds: int
    judged_on: str
    """The images that ``accuracy`` and ``best`` are measured on: ``test`` or ``validation``."""
    accuracy: Spread
    best: Spread
    test: Spread | None
    """Accuracy on the test set after the last round; None if a run judged on validation images has not ended."""
    bytes: float
    seconds: float | None
    """None: the metrics do not say, as those of some published records."""
    to_target: ToTarget | None


def accuracy_of(kinds: Iterable[str]) -> str:
    """Return the name of an accuracy for a title; ``kinds`` are the images that it is measured on.

    It is "test accuracy" or "validation accuracy", or just "accuracy" if there are both kinds.
    """
    known = set(kinds)
    return f"{known.pop()} accuracy" if len(known) == 1 else "accuracy"


def summarise(group: Group, target: float | None = None) -> Summary:
    """Return the means of a group; with ``target``, an accuracy in percent, also the cost of reaching it."""
    return Summary(
        label=group.label,
        method=group.method,
        runs=[run.path for run in group.runs],
        left_out=[run.path for run in group.left_out],
        remark=group.remark,
        rounds=max(run.rounds[-1].round + 1 for run in group.runs),
        judged_on=group.judged_on,
        accuracy=Spread.of([run.accuracy for run in group.runs]),
        test=_spread_on(group, "test"),
        best=Spread.of([Standing.after(run.rounds).best or 0.0 for run in group.runs]),
        bytes=fmean(Standing.after(run.rounds).bytes for run in group.runs),
        seconds=fmean(Standing.after(run.rounds).seconds for run in group.runs) or None,
        to_target=_to_target(group, target) if target is not None else None,
    )


def _spread_on(group: Group, images: str) -> Spread | None:
    """Return the mean accuracy on images of one kind; None if a run has not read them yet."""
    known = [one for run in group.runs if (one := run.accuracy_on(images)) is not None]
    return Spread.of(known) if len(known) == len(group.runs) else None


def rounds_to(run: Run, target: float) -> list[RoundMetrics] | None:
    """Return the rounds up to the first good one whose accuracy is ``target`` percent or more; None if none is."""
    for count, metrics in enumerate(run.rounds, 1):
        there = metrics.accuracy is not None and metrics.accuracy >= target
        if there and not metrics.diverged:
            return run.rounds[:count]
    return None


def _to_target(group: Group, target: float) -> ToTarget:
    """Return what reaching ``target`` percent took, on average over the runs that reached it."""
    reached = [rounds for run in group.runs if (rounds := rounds_to(run, target)) is not None]
    if not reached:
        return ToTarget(0, None, None, None)
    return ToTarget(
        len(reached),
        fmean(rounds[-1].round + 1 for rounds in reached),
        fmean(Standing.after(rounds).bytes for rounds in reached),
        fmean(Standing.after(rounds).seconds for rounds in reached) or None,
    )


# --- differences ---------------------------------------------------------------------------------

QUANTILES = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)
"""The 97.5 % quantile of Student's t for 1, 2, ... degrees of freedom."""


@dataclass(frozen=True)
class Difference:
    """The accuracy of ``first`` minus that of ``second``, over the seeds that both have, in points."""

    first: str
    second: str
    seeds: int
    mean: float
    interval: tuple[float, float] | None
    """The 95 % interval of the mean; None for a single seed."""
    wins: int
    """Seeds with which ``first`` is better."""
    judged_on: str
    """The images of these accuracies: ``test``, or ``validation`` if a run has not read the test images yet."""


def differences(groups: Sequence[Group]) -> list[Difference]:
    """Return the difference of every two finished groups that share a seed and are judged on the same images.

    Runs are paired by their seed, which also decides who holds what, so the interval is that of a paired t-test. Test
    accuracies are taken if all runs have them, else those that rounds were judged by.
    """
    pairs = []
    for first, second in combinations(groups, 2):
        if _images(first) != _images(second) or not (first.finished and second.finished):
            continue
        on_test = all(_spread_on(group, "test") for group in (first, second))
        kind = "test" if on_test else first.judged_on
        one, other = _by_seed(first, kind), _by_seed(second, kind)
        values = [one[seed] - other[seed] for seed in one if seed in other]
        if not values:
            continue
        mean, interval = fmean(values), None
        if (count := len(values)) > 1:
            half = quantile(count - 1) * stdev(values) / math.sqrt(count)
            interval = mean - half, mean + half
        wins = sum(value > 0 for value in values)
        pairs.append(Difference(first.label, second.label, count, mean, interval, wins, kind))
    return pairs


def _images(group: Group) -> tuple[str, str]:
    """Return what a group is judged on: the kind of images, and the data set by name, wherever it lies."""
    return group.judged_on, Path(group.runs[0].config.get("data", {}).get("name", "")).name


def _by_seed(group: Group, images: str) -> dict[object, float]:
    """Return the accuracy of each seed's last test, on ``test`` or ``validation`` images."""
    pairs = [(run.seed, run.accuracy_on(images)) for run in group.runs]
    return {seed: accuracy for seed, accuracy in pairs if accuracy is not None}


def quantile(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t for 1 or more degrees of freedom.

    It is exact to four digits up to nine degrees, and beyond them an expansion around the normal quantile.
    """
    if freedom <= len(QUANTILES):
        return QUANTILES[freedom - 1]
    z = NormalDist().inv_cdf(0.975)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))


# --- tables in files -----------------------------------------------------------------------------

Cells = list[list[object]]
"""The lines of a table; the first has the titles."""


def write_table(
    place: Path,
    results: Sequence[tuple[Group, Summary]],
    pairs: Sequence[Difference],
    target: float | None = None,
) -> list[Path]:
    """Write the table of groups with their summaries and that of ``pairs``; return the files.

    A .tex file holds both. Another file is CSV and holds the first table; the second has "-differences" in its name,
    and a third, with a line for each run, "-seeds". Numbers have at most four decimals. ``target`` is that of the
    summaries.
    """
    summaries = [summary for _, summary in results]
    if place.suffix == ".tex":
        texts = {place: latex(summaries, pairs)}
    else:
        texts = {place: _csv(_results(summaries))}
        seeds = _seeds([group for group, _ in results], target)
        texts[place.with_name(f"{place.stem}-seeds.csv")] = _csv(seeds)
        if pairs:
            texts[place.with_name(f"{place.stem}-differences.csv")] = _csv(_differences(pairs))
    for file, text in texts.items():
        write_whole(file, text.encode())
    return list(texts)


def _results(summaries: Sequence[Summary]) -> list[dict[str, object]]:
    """Return a line of the table for each group: its cells by the title of their column."""
    lines = []
    for one in summaries:
        line: dict[str, object] = {"label": one.label, "method": one.method}
        line |= {"seeds": len(one.runs), "rounds": one.rounds, "judged_on": one.judged_on}
        for name, spread in (("accuracy", one.accuracy), ("best", one.best), ("test", one.test)):
            line |= {name: spread and spread.mean, f"{name}_stderr": spread and spread.stderr}
        line |= {"bytes": one.bytes, "seconds": one.seconds}
        cost = vars(one.to_target) if one.to_target else {}
        lines.append(line | {f"target_{name}": value for name, value in cost.items()})
    return lines


def _seeds(groups: Sequence[Group], target: float | None) -> list[dict[str, object]]:
    """Return a line of the table for each run of each group, with its seed and directory."""
    return [
        {"run": run.path, "seed": run.seed}
        | {
            key: value
            for key, value in line.items()
            if not key.endswith(("seeds", "_stderr", "_reached"))
        }
        for group in groups
        for run in group.runs
        for line in _results([summarise(replace(group, runs=[run]), target)])
    ]


def _differences(pairs: Sequence[Difference]) -> list[dict[str, object]]:
    """Return a line of the table for each pair of groups; a single seed has no interval."""
    return [
        {"first": pair.first, "second": pair.second, "seeds": pair.seeds}
        | {"judged_on": pair.judged_on, "difference": pair.mean}
        | dict(zip(("low", "high"), pair.interval or (None, None), strict=True))
        | {"wins": pair.wins}
        for pair in pairs
    ]


def _csv(lines: Sequence[Mapping[str, object]]) -> str:
    """Return lines with the same columns as CSV, with numbers of at most four decimals; None is an empty cell."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    for line in lines:
        writer.writerow({k: round(v, 4) if isinstance(v, float) else v for k, v in line.items()})
    return text.getvalue()


def latex(summaries: Sequence[Summary], pairs: Sequence[Difference]) -> str:
    """Return ``tabular`` environments, for ``\\input`` with the package booktabs.

    The first has a line per group; the second, if there are ``pairs``, a line per difference. A method with a note in
    the catalog has a star, and the note as a comment.
    """
    validated = any(summary.judged_on == "validation" for summary in summaries)
    judged = accuracy_of(summary.judged_on for summary in summaries)
    test_title = ["test, \\%"] if validated else []
    lines: Cells = [["method", "seeds", f"{judged}, \\%", *test_title, "best, \\%"]]
    for one in summaries:
        test = [_spread(one.test)] if validated else []
        name = escaped(one.label) + ("*" if note_of(one.method) else "")
        lines.append([name, len(one.runs), _spread(one.accuracy), *test, _spread(one.best)])
    notes = {one.method: note for one in summaries if (note := note_of(one.method))}
    text = _tabular(lines)
    text += "".join(f"% * {title_of(method)}: {note}\n" for method, note in notes.items())
    if pairs:
        judged = accuracy_of(pair.judged_on for pair in pairs)
        lines = [["difference", "seeds", f"points of {judged}", "95 \\% interval", "wins"]]
        for pair in pairs:
            name = f"{escaped(pair.first)} $-$ {escaped(pair.second)}"
            ends = "--" if pair.interval is None else "[${:.1f}$, ${:.1f}$]".format(*pair.interval)
            lines.append([name, pair.seeds, f"${pair.mean:.1f}$", ends, pair.wins])
        text += "\n" + _tabular(lines)
    return text


def _tabular(lines: Cells) -> str:
    """Return a table of LaTeX, whose first line has the titles and whose first column has text."""
    head, *body = [" & ".join(map(str, line)) + r" \\" for line in lines]
    columns = "l" + "r" * (len(lines[0]) - 1)
    text = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", head, r"\midrule", *body]
    return "\n".join([*text, r"\bottomrule", r"\end{tabular}"]) + "\n"


def _spread(value: Spread | None) -> str:
    """Return a mean with its standard error in LaTeX's mathematics; a dash if there is none."""
    if value is None:
        return "--"
    error = "" if value.stderr is None else rf" \pm {value.stderr:.1f}"
    return f"${value.mean:.1f}{error}$"


def escaped(text: str) -> str:
    """Return text with the special characters of LaTeX escaped."""
    words = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return re.sub(r"[\\~^&%$#_{}]", lambda match: words.get(match[0], f"\\{match[0]}"), text)
