"""Read runs, and group those that differ in nothing but their seed. Imports nothing that trains."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from semisfl.metrics import RoundMetrics
from semisfl.runs.labels import alike_but_for_seed, flatten
from semisfl.runs.limits import Standing, limits_of, met
from semisfl.runs.reading import (
    holds_run,
    no_run,
    read_config,
    read_holdings,
    read_rounds,
    runs_inside,
)

log = logging.getLogger(__name__)


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
        return self.complete or self.stopped_by is not None

    @property
    def diverged(self) -> bool:
        """Return whether losses or weights are NaN or out of bounds after its last round."""
        return bool(self.rounds and self.rounds[-1].diverged)

    @property
    def tested(self) -> list[RoundMetrics]:
        return [metrics for metrics in self.rounds if metrics.accuracy is not None]

    @property
    def accuracy(self) -> float:
        """Return the accuracy of its last test; only a tested run has one."""
        accuracy = self.tested[-1].accuracy
        assert accuracy is not None
        return accuracy


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but their seed and got equally far, so that means are fair."""

    label: str
    runs: list[Run]
    left_out: list[Run] = field(default_factory=list)
    """Runs of the same settings that got less far, or repeat a seed."""
    remark: str = ""
    """Says what is unfinished about the group; empty if nothing is."""
    finished: bool = True
    variant: str = ""
    """The name of the settings that its runs have in common, if a comparison gave them one."""

    @property
    def method(self) -> str:
        return str(self.runs[0].config["method"])

    @property
    def judged_on(self) -> str:
        return judged_on(self.runs[0].config)


def judged_on(config: Mapping[str, Any]) -> str:
    """Return the kind of images on which a run's ``accuracy`` is measured."""
    return "validation" if config.get("data", {}).get("validation") is not None else "test"


def read_run(path: Path) -> Run:
    """Return the run of a run directory."""
    return Run(path, read_config(path), read_rounds(path, RoundMetrics.from_dict))


def find_runs(paths: Sequence[Path]) -> list[Run]:
    """Return the runs at ``paths``; a folder that is no run stands for the runs directly inside it."""
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
    """Group runs by configuration; a label names the method and the settings that differ.

    Finished and unfinished runs are never averaged together: see `_fair`.
    """
    groups = []
    apart = [
        one
        for label, places in alike_but_for_seed([run.config for run in runs])
        for images, those in _by_images(label, [runs[place] for place in places])
        for one in _by_partition(images, those)
    ]
    for label, alike in apart:
        if any(run.tested for run in alike):
            groups.append(_fair(label, alike))
        else:
            paths = ", ".join(str(run.path) for run in alike)
            log.warning("%s is left out: no round was tested yet in %s", label, paths)
    return groups


def _by_images(label: str, runs: list[Run]) -> list[tuple[str, list[Run]]]:
    """Separate runs on different images: settings do not name those that a program passed to `train`."""
    by: dict[str, list[Run]] = {}
    if len(runs) > 1:
        for run in runs:
            by.setdefault(str(read_holdings(run.path).get("images", "")), []).append(run)
    if len(by.keys() - {""}) < 2:  # older runs do not say
        return [(label, runs)]
    return [(f"{label} images={digest[:8] or 'unknown'}", those) for digest, those in by.items()]


def _by_partition(label: str, runs: list[Run]) -> list[tuple[str, list[Run]]]:
    """Separate runs of one seed for which a program divided the images differently.

    Where every run has a seed of its own, the partitions may follow from the seeds.
    """
    by: dict[str, list[Run]] = {}
    own = flatten(runs[0].config).get("data.partition.kind") == "own"
    if own and len(set(map(_seed, runs))) < len(runs):
        for run in runs:
            held = read_holdings(run.path)
            by.setdefault(str([held.get("server"), held.get("clients")]), []).append(run)
    if len(by) < 2:
        return [(label, runs)]
    return [(f"{label} partition of {those[0].path.name}", those) for those in by.values()]


def _fair(label: str, runs: list[Run]) -> Group:
    """Return a group with one run per seed: the finished runs.

    If none is finished, it has all tested runs up to the last round in which all of them were tested.
    """
    once = _one_for_each_seed(runs)
    finished = [run for run in once if run.finished and run.tested]
    used = finished or _up_to_the_same(once)
    remarks = []
    paths = {run.path for run in used}
    if again := [run for run in runs if run not in once]:
        which = ", ".join(f"{run.path} (seed {_seed(run)})" for run in again)
        remarks.append(f"{len(again)} of {len(runs)} runs left out as there twice: {which}")
    if begun := [run for run in once if run.path not in paths]:
        which = ", ".join(f"{run.path} ({_progress(run)})" for run in begun)
        remarks.append(f"{len(begun)} of {len(runs)} runs left out as unfinished: {which}")
    ended = [run for run in finished if not run.complete]
    if ended:
        how = ", ".join(f"{run.path} (stop.{run.stopped_by}, {_progress(run)})" for run in ended)
        remarks.append(f"{len(ended)} of {len(runs)} runs ended by a limit: {how}")
    if bad := [str(run.path) for run in used if run.diverged]:
        remarks.append(f"{len(bad)} of {len(used)} runs diverged: {', '.join(bad)}")
    if not finished:
        remarks.append(f"no run is finished; numbers are those after {_progress(used[0])}")
    return Group(label, used, [*again, *begun], "; ".join(remarks), bool(finished))


def _one_for_each_seed(runs: Sequence[Run]) -> list[Run]:
    """Return one run per seed: the one that got furthest, or the first of equals."""
    best: dict[object, Run] = {}
    for run in sorted(runs, key=lambda run: (not run.tested, not run.finished, -len(run.tested))):
        best.setdefault(_seed(run), run)
    return [run for run in runs if run is best[_seed(run)]]


def _seed(run: Run) -> object:
    return run.config.get("seed", 0)


def _up_to_the_same(runs: Sequence[Run]) -> list[Run]:
    """Cut runs after the last round in which all were tested; without one, return the run that got furthest."""
    tested = [run for run in runs if run.tested]
    common = set.intersection(*({metrics.round for metrics in run.tested} for run in tested))
    if not common:
        tested = [max(tested, key=lambda run: run.tested[-1].round)]
        common = {tested[0].tested[-1].round}
    last = max(common)
    return [replace(run, rounds=[one for one in run.rounds if one.round <= last]) for run in tested]


def _progress(run: Run) -> str:
    done = run.rounds[-1].round + 1 if run.rounds else 0
    return f"round {done} of {run.config['rounds']}"
