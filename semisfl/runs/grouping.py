"""Read runs, and group those that differ in nothing but their seed. Imports nothing that trains."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from semisfl.metrics import RoundMetrics
from semisfl.runs.limits import Standing, limits_of, met
from semisfl.runs.reading import (
    holds_run,
    no_run,
    read_config,
    read_holdings,
    read_rounds,
    runs_inside,
)
from semisfl.settings.lookup import title_of

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

    @property
    def seed(self) -> object:
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
        return str(self.runs[0].config["method"])

    @property
    def judged_on(self) -> str:
        return judged_on(self.runs[0].config)


def label_of(name: str, differs: Mapping[str, str]) -> str:
    """Return a name and the settings that differ, a few of them."""
    shown = [f"{key}={value}" for key, value in differs.items()]
    more = ["…"] if len(shown) > MOST_DIFFERENCES else []
    return " ".join([name, *shown[:MOST_DIFFERENCES], *more])


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
    """Group runs by configuration. Finished and unfinished runs are never averaged together: see `_fair`."""
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
        name = title_of(alike[0].config["method"])
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
    """Return the settings that may change a run's numbers, but not its seed, as text by dotted key."""
    values = flatten(config)
    if values.get("fleet.kind") == "cluster":  # ranks of torchrun give what one process does
        values["fleet.kind"] = "local"
    hidden = ("seed", *UNSEEN)
    return {
        key: str(value)
        for key, value in values.items()
        if key not in hidden and not key.startswith("sinks")
    }


def flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested values by dotted key, also those of lists: ``layers[0].kind``."""
    pairs: dict[str, Any] = {}
    for key, value in values.items():
        inner: Iterable[tuple[str, Any]] = ()
        if isinstance(value, Mapping):
            inner = ((f"{key}.{name}", one) for name, one in value.items())
        elif isinstance(value, list | tuple):
            inner = ((f"{key}[{index}]", one) for index, one in enumerate(value))
        else:
            pairs[key] = value
        pairs |= flatten(dict(inner))
    return pairs


def _fair(name: str, differs: Mapping[str, str], runs: list[Run]) -> Group:
    """Return a group with one run per seed: the finished runs.

    If none is finished, it has all tested runs up to the last round in which all of them were tested.
    """
    best: dict[object, Run] = {}
    for run in sorted(runs, key=lambda run: (not run.tested, not run.finished, -len(run.tested))):
        best.setdefault(run.seed, run)
    again = [run for run in runs if run is not best[run.seed]]
    once = [run for run in runs if run is best[run.seed]]
    finished = [run for run in once if run.finished and run.tested]
    used = finished or _up_to_the_same(once)
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


def _up_to_the_same(runs: Sequence[Run]) -> list[Run]:
    """Cut runs after the last round in which all were tested; without one, return the run that got furthest."""
    tested = [run for run in runs if run.tested]
    common = set.intersection(*({metrics.round for metrics in run.tested} for run in tested))
    if not common:
        tested = [max(tested, key=lambda run: run.tested[-1].round)]
        common = {tested[0].tested[-1].round}
    last = max(common)
    return [replace(run, rounds=[one for one in run.rounds if one.round <= last]) for run in tested]
