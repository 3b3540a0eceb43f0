"""Attacks of some devices on a run over mutual TLS, under the default of ``serve`` or the plain mean.

    python -m reproduction.poisoning.network_grid FILE.jsonl --clients 3,5,10 --attacks A,B --rules serve,mean --seeds 0,1,2
    python -m reproduction.poisoning.network_grid FILE.jsonl --method semifl --attacks large_variance,tiny_variance

Each line of the file is one run: its accuracy, and who was held back, struck or shut out. Runs that the
file has are not repeated.
"""

import argparse
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
from torch import Tensor

from reproduction.poisoning import attacks as poisoning
from reproduction.poisoning.attacks import Attack, PoisonedBlock, Weights, attackers_of
from reproduction.poisoning.grid import DIGITS
from semisfl.fleet.base import ClientResult
from semisfl.fleet.block import ClientBlock
from semisfl.net.client import member
from semisfl.runs.loop import run_rounds
from semisfl.runs.run_data import load_data
from semisfl.settings import config as configs
from semisfl.settings import presets
from semisfl.settings.config import Config, parse
from tests.net.harness import Network, certificates

ATTACKS = (
    *("scaled_bottom", "scaled_bottom_late", "zero_bottom", "stale_bottom", "reordered_bottom"),
    *("drift", "scaled_features", "negated_features_late", "one_class", "swapped_classes"),
    *("alternating_update", "repeated_update", "mirrored_drift"),
)


def _statistics(change: Callable[[Tensor], Tensor]) -> Callable[[Weights], Tensor]:
    """Return an attack that changes running variances and leaves other tensors as they are."""
    return lambda w: change(w.trained) if w.name.endswith("running_var") else w.trained


def _without_first(values: Tensor) -> Tensor:
    return torch.where(torch.arange(len(values)) == 0, 1e-12, values)


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
            _statistics(_without_first),
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--method", default="semisfl")
    parser.add_argument("--clients", default="3,5,10")
    parser.add_argument("--attackers", type=int, help="default: 1 of 3, 1 of 5, 2 of 10")
    parser.add_argument("--attacks", default=",".join(ATTACKS))
    parser.add_argument("--rules", default=",".join(RULES))
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seeds", default="0,1,2")
    options = parser.parse_args()
    asked = itertools.product(
        map(int, options.seeds.split(",")),
        map(int, options.clients.split(",")),
        ("nobody", *options.attacks.split(",")),
        options.rules.split(","),
    )
    lines = options.out.read_text(encoding="utf-8").splitlines() if options.out.exists() else []
    done = {_key(json.loads(line)) for line in lines}
    with tempfile.TemporaryDirectory() as place:
        folder = certificates(Path(place), max(ATTACKERS))
        for seed, clients, attack, rule in asked:
            count = options.attackers or ATTACKERS[clients]
            config = digits(
                *(clients, seed, rule, options.method), attackers=count, rounds=options.rounds
            )
            job = {"method": options.method, "clients": clients, "attack": attack, "rule": rule}
            attackers = [] if attack == "nobody" else range(count)
            if _key({**job, "seed": seed, "rounds": config.rounds, "attackers": attackers}) in done:
                continue
            run = attacked_run(config, None if attack == "nobody" else attack, folder, count)
            line = json.dumps({"rule": rule, **run})
            with options.out.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
            print(line, flush=True)


def _key(run: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what a run is known by."""
    names = ("method", "clients", "attack", "rule", "seed", "rounds")
    return (*(run[name] for name in names), len(run["attackers"]))


if __name__ == "__main__":
    main()
