"""Run every attack against every aggregation rule, and tabulate the accuracy lost."""

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from reproduction.poisoning.attacks import ATTACKS, TARGET, attackers_of, poisoned_fleet, stamped
from semisfl.cli import output
from semisfl.engine.inference import outputs
from semisfl.files import append_whole
from semisfl.runs import checkpoint
from semisfl.runs.experiment import Experiment, assemble
from semisfl.runs.loop import run_rounds
from semisfl.runs.run_data import divide, load_images
from semisfl.settings import catalog, config as configs
from semisfl.settings.config import Config, ConfigError
from semisfl.settings.plain_values import words_of

log = logging.getLogger(__name__)

DIGITS = Path(__file__).parent / "digits.toml"
"""The settings of the recorded grids."""
LIMITED = "+limited"
"""Suffix of a rule's name: features are limited too (``robust.features``)."""
NOBODY = "nobody"
"""The attack of a run without attackers."""


@dataclass(frozen=True)
class AttackRun:
    """One run of the grid: an attack, a rule, the share of attackers and a seed."""

    attack: str
    rule: str
    share: float
    seed: int


@dataclass(frozen=True)
class Outcome(AttackRun):
    """One run of the grid with its results."""

    accuracy: float
    accuracy_student: float | None
    backdoor: float
    """Percentage of stamped test images of other classes that the model assigns to the target."""
    attackers: tuple[int, ...]
    held_back: dict[str, int]
    """The number of rounds in which each client was held back."""
    settings: str | None = None
    """The digest of the run's configuration; None in files of earlier versions."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Outcome":
        """Return the outcome of a line's values, which may have a name of their group too."""
        known = {key: value for key, value in values.items() if key != "name"}
        return cls(**{**known, "attackers": tuple(values["attackers"])})


def choose(names: str, known: Iterable[str]) -> list[str]:
    """Return the names in ``a,b``, or all known ones for ``all``. Raises ConfigError for an unknown one."""
    every = list(known)
    chosen = every if names == "all" else words_of(names)
    if unknown := set(chosen) - set(every):
        raise ConfigError(f"{unknown} are not known; use all or some of {', '.join(every)}")
    return chosen


def rules() -> list[str]:
    """Return every aggregate, alone and with limited features."""
    names = catalog.AGGREGATES
    return [*names, *(name + LIMITED for name in names)]


def listed(
    attacks: Sequence[str], chosen: Sequence[str], shares: Sequence[float], seeds: Sequence[int]
) -> list[AttackRun]:
    """Return the runs of a grid; with a share of 0 there is one run for all attacks.

    The plain mean without attackers, from which losses count, is there in any case.
    """
    grid: list[AttackRun] = []
    for seed in seeds:
        if 0 not in shares or "mean" not in chosen:
            grid.append(AttackRun(NOBODY, "mean", 0.0, seed))
        for share in dict.fromkeys(shares):
            for attack in attacks if share else [NOBODY]:
                grid += [AttackRun(attack, rule, share, seed) for rule in chosen]
    return grid


def under(values: dict[str, Any], job: AttackRun) -> Config:
    """Return the configuration of one run."""
    aggregate = job.rule.removesuffix(LIMITED)
    features = "limited" if job.rule.endswith(LIMITED) else "as_sent"
    robust = {**values.get("robust", {}), "aggregate": aggregate, "features": features}
    return configs.parse({**values, "seed": job.seed, "robust": robust})


def run_grid(
    values: dict[str, Any],
    jobs: Sequence[AttackRun],
    out: Path,
    *,
    device: str,
    tell: Callable[[str], None] = log.info,
) -> list[Outcome]:
    """Train the runs that ``out`` has no line for, append one line each, and return all outcomes.

    Raise `ConfigError` if ``out`` has a line of one of the runs with other settings.
    """
    done = {_job(outcome): outcome for outcome in read(out)}
    for job in jobs:
        if job in done and done[job].settings not in (None, _digest(under(values, job))):
            raise ConfigError(f"{out} holds runs with other settings; choose another --out")
    left = [job for job in jobs if job not in done]
    data = load_images(under(values, jobs[0]).data.name, under(values, jobs[0])) if left else None
    # Pretraining has no clients, so it is the same for every attack and rule: once per seed is enough.
    pretrained: dict[int, dict[str, Any]] = {}
    for number, job in enumerate(left, 1):
        assert data is not None
        config = under(values, job)
        attack = ATTACKS[next(iter(ATTACKS)) if job.attack == NOBODY else job.attack]
        experiment = assemble(
            config,
            data,
            divide(config, data),
            device=device,
            make_fleet=poisoned_fleet(attack, job.share),
        )
        alone = config.server.pretrain_rounds
        if job.seed not in pretrained:
            for index in range(alone):
                experiment.method.round(index)
            pretrained[job.seed] = checkpoint.snapshot(experiment.state_dict())
        experiment.load_state_dict(pretrained[job.seed])
        result = run_rounds(experiment, first=alone)
        done[job] = outcome = _outcome(job, experiment, result.rounds)
        append_whole(out, (json.dumps(asdict(outcome)) + "\n").encode())
        tell(
            f"{number} of {len(left)}: {job.attack} {job.share:.0%} {job.rule}: {outcome.accuracy:.1f} %"
        )
    return [done[job] for job in jobs if job in done]


def _digest(config: Config) -> str:
    return hashlib.sha256(config.model_dump_json().encode()).hexdigest()[:16]


def _job(outcome: Outcome) -> AttackRun:
    return AttackRun(outcome.attack, outcome.rule, outcome.share, outcome.seed)


def read(path: Path) -> list[Outcome]:
    """Return the outcomes in a file; none if it does not exist."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    return [Outcome.of(json.loads(line)) for line in lines]


def _outcome(job: AttackRun, experiment: Experiment, rounds: Sequence[dict[str, Any]]) -> Outcome:
    held_back: dict[str, int] = {}
    for metrics in rounds:
        for client in metrics.get("held_back", {}):
            held_back[client] = held_back.get(client, 0) + 1
    config, last = experiment.config, rounds[-1]
    return Outcome(
        **asdict(job),
        accuracy=last["accuracy"],
        accuracy_student=last.get("accuracy_student"),
        backdoor=backdoor_rate(experiment),
        attackers=tuple(sorted(attackers_of(job.seed, config.clients.total, job.share))),
        held_back=held_back,
        settings=_digest(config),
    )


def backdoor_rate(experiment: Experiment) -> float:
    """Return the percentage of stamped test images that the model assigns to the target class."""
    others = experiment.test_images[experiment.test_labels != TARGET]

    def prepare(images: torch.Tensor) -> torch.Tensor:
        return experiment.normalizer(stamped(images, 255), experiment.hardware.dtype)

    with experiment.hardware.arithmetic():
        chosen = torch.cat(
            [logits.argmax(1) for logits in outputs(experiment.model, others, prepare)]
        )
    return 100 * float((chosen == TARGET).float().mean())


Losses = dict[tuple[str, float], dict[str, list[float]]]
"""Points of accuracy lost, one value per seed, by (attack, share) and then by rule."""


def losses(outcomes: Sequence[Outcome]) -> Losses:
    """Return the points lost against the same seed with the plain mean and no attackers.

    They include what the rule costs without attackers.
    """
    clean = {o.seed: o.accuracy for o in outcomes if o.attack == NOBODY and o.rule == "mean"}
    points: Losses = {}
    for outcome in outcomes:
        if outcome.seed in clean:
            by_rule = points.setdefault((outcome.attack, outcome.share), {})
            by_rule.setdefault(outcome.rule, []).append(clean[outcome.seed] - outcome.accuracy)
    return points


def show(outcomes: Sequence[Outcome]) -> None:
    """Print the points of accuracy lost by attack and rule, averaged over seeds."""
    rules = list(dict.fromkeys(outcome.rule for outcome in outcomes))
    table = output.table("points of accuracy lost to attackers", ("attack", "share", *rules))
    for (attack, share), by_rule in losses(outcomes).items():
        cells = [
            output.known(by_rule.get(rule), lambda points: f"{fmean(points):+.1f}")
            for rule in rules
        ]
        table.add_row(attack, f"{share:.0%}", *cells)
    output.show(table)
