"""Attacks of some devices on a run over mutual TLS, under the default of ``serve`` or the plain mean.

    python -m reproduction.poisoning.network_grid FILE.jsonl --clients 3,5,10 --attacks A,B --rules serve,mean --seeds 0,1,2
    python -m reproduction.poisoning.network_grid FILE.jsonl --method semifl --attacks large_variance,tiny_variance

Each line of the file is one run: its accuracy, and who was held back, struck or shut out. Runs that the
file has are not repeated.
"""

import itertools
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import typer
from torch import Tensor

from reproduction.poisoning import attacks as poisoning
from reproduction.poisoning.attacks import Attack, PoisonedBlock, Weights, attackers_of
from reproduction.poisoning.grid import DIGITS
from semisfl.files import append_whole
from semisfl.fleet.base import ClientResult
from semisfl.fleet.block import ClientBlock
from semisfl.net.client import member
from semisfl.runs.loop import run_rounds
from semisfl.runs.run_data import load_data
from semisfl.settings import config as configs, presets
from semisfl.settings.config import Config, parse
from semisfl.settings.plain_values import words_of
from tests.net.harness import Network, certificates

ATTACKS = (
    *("scaled_bottom", "scaled_bottom_late", "zero_bottom", "stale_bottom", "reordered_bottom"),
    *("drift", "scaled_features", "negated_features_late", "one_class", "swapped_classes"),
    *("alternating_update", "repeated_update", "mirrored_drift"),
)


def _statistics(change: Callable[[Tensor], Tensor]) -> Callable[[Weights], Tensor]:
    """Return an attack that changes running variances and leaves other tensors as they are."""
    return lambda w: change(w.trained) if w.name.endswith("running_var") else w.trained


def _into_first_layer(w: Weights) -> Tensor:
    """Return the first layer's weights nearer to zero, by the length of the whole first update, and no other change."""
    if w.name.endswith("running_mean"):
        return w.trained
    known = w.known
    layers = [name for name, value in known.received.items() if value.dim() > 1]
    if w.name != layers[0]:
        return w.received
    changes = [change for name, change in known.learnt.items() if "running" not in name]
    length = torch.cat([change.float().flatten() for change in changes]).norm()
    return w.received * (1 - 3 * length / w.received.norm())


OTHERS = {
    attack.name: attack
    for attack in (
        Attack(
            "large_variance",
            "variances times 9",
            None,
            _statistics(lambda v: 9 * v),
            variances=True,
        ),
        Attack(
            "tiny_variance",
            "one variance of 1e-12",
            None,
            _statistics(lambda v: torch.where(torch.arange(len(v)) == 0, 1e-12, v)),
            variances=True,
        ),
        Attack("first_layer", "all its update in the first layer", None, _into_first_layer),
    )
}
"""Attacks that the grid of `python -m reproduction poisoning` does not have: two on models with BatchNorm."""
ATTACKERS = {3: 1, 5: 1, 10: 2}
"""How many attack of so many clients."""
RULES: dict[str, dict[str, Any]] = {
    "serve": {},
    "mean": {"robust": {"aggregate": "mean", "features": "as_sent"}},
}
CLAIM = 1e6
"""Batches that an attacker says its statistics are of; SemiFL's server weighs them by it under the mean."""


class ClaimingBlock(PoisonedBlock):
    """A device that attacks and claims to have very many images."""

    def train(self, *work: Any, **how: Any) -> list[ClientResult]:
        results = super().train(*work, **how)
        return [
            replace(result, numbers={**result.numbers, "batches": CLAIM})
            if result.client in self.attackers and "batches" in result.numbers
            else result
            for result in results
        ]


def digits(
    clients: int,
    seed: int = 0,
    rule: str = "serve",
    method: str = "semisfl",
    *,
    attackers: int = 1,
    rounds: int | None = None,
) -> Config:
    """Return the run of reproduction/pages/poisoning.md; its quorum are the honest devices.

    With a quorum of all, an attacker pauses the run by values for which it is shut out.
    """
    values = configs.read(DIGITS)
    counts = {"total": clients, "active": clients}
    network = {"quorum": clients - attackers}
    changes = {"seed": seed, "clients": counts, "network": network, **RULES[rule]}
    if method != "semisfl":
        # With BatchNorm; and early enough that FedMatch chooses helpers twice.
        layers = []
        for layer in values["model"]["layers"]:
            layers += [layer, {"kind": "batchnorm"}] if layer["kind"] == "conv" else [layer]
        changes |= {"method": method, "rounds": 24, "server": {"pretrain_rounds": 8}}
        changes |= {"model": {"layers": layers}, "runtime": {"evaluate_every": 24}}
    if rounds is not None:
        changes |= {"rounds": rounds, "runtime": {"evaluate_every": rounds}}
    return parse(presets.limit_influence(presets.merge(values, changes)))


def attacked_run(
    config: Config, attack: str | None, folder: Path, count: int | None = None
) -> dict[str, Any]:
    """Train over the network with ``count`` attackers, or without an attack; return what came of it."""
    total = config.clients.total
    count = (ATTACKERS[total] if count is None else count) if attack else 0
    attackers = attackers_of(config.seed, total, count / total)
    data, partition = load_data(config)
    net = Network(config, data, partition, certificates=folder)
    if attack:
        member.ClientBlock = partial(  # type: ignore[attr-defined, assignment]
            ClaimingBlock,
            attack=OTHERS.get(attack) or poisoning.ATTACKS[attack],
            attackers=attackers,
        )
    try:
        net.join_all()
        result = run_rounds(net.experiment)
        honest = [f"client-{index}" for index in range(total) if index not in attackers]
        strikes = net.strikes
        return {
            "method": config.method,
            "clients": total,
            "attack": attack or "nobody",
            "seed": config.seed,
            "accuracy": result.accuracy,
            "rounds": len(result.rounds),
            "attackers": sorted(attackers),
            "held_back": dict(
                Counter(c for row in result.rounds for c in row.get("held_back") or {})
            ),
            "struck": strikes,
            "honest_struck": sorted(strikes.keys() & set(honest)),
            "honest_gone": [
                n for n in honest if net.fleet.roster.index[n] not in net.fleet.present()
            ],
        }
    finally:
        member.ClientBlock = ClientBlock  # type: ignore[attr-defined]
        net.close()


def main(
    out: Path,
    method: str = "semisfl",
    clients: str = "3,5,10",
    attackers: int | None = None,
    attacks: str = ",".join(ATTACKS),
    rules: str = ",".join(RULES),
    rounds: int | None = None,
    seeds: str = "0,1,2",
) -> None:
    """Attack runs over mutual TLS, and append a line per run to the file OUT; runs that it has are not repeated.

    By default 1 of 3, 1 of 5 and 2 of 10 clients attack.
    """
    asked = itertools.product(
        map(int, words_of(seeds)),
        map(int, words_of(clients)),
        ("nobody", *words_of(attacks)),
        words_of(rules),
    )
    lines = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
    done = {_key(json.loads(line)) for line in lines}
    with tempfile.TemporaryDirectory() as place:
        folder = certificates(Path(place), max(ATTACKERS))
        for seed, total, attack, rule in asked:
            count = attackers or ATTACKERS[total]
            config = digits(total, seed, rule, method, attackers=count, rounds=rounds)
            job = {"method": method, "clients": total, "attack": attack, "rule": rule}
            who = [] if attack == "nobody" else range(count)
            if _key({**job, "seed": seed, "rounds": config.rounds, "attackers": who}) in done:
                continue
            run = attacked_run(config, None if attack == "nobody" else attack, folder, count)
            line = json.dumps({"rule": rule, **run})
            append_whole(out, f"{line}\n".encode())
            print(line, flush=True)


def _key(run: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what a run is known by."""
    names = ("method", "clients", "attack", "rule", "seed", "rounds")
    return (*(run[name] for name in names), len(run["attackers"]))


if __name__ == "__main__":
    typer.run(main)
