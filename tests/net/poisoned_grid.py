"""Attacks of some devices on a run over mutual TLS, under the default of ``serve``.

    python -m tests.net.poisoned_grid FILE.jsonl [--clients 3,5,10] [--attacks all] [--seed 0]

Each line of the file is one run: its accuracy, the points lost against the run without attackers, and
who was held back, struck or shut out. Runs that the file has are not repeated.
"""

import argparse
import json
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from semisfl.attacks.poisoned_fleet import PoisonedBlock, attackers_of
from semisfl.attacks.poisoning import attack_named
from semisfl.fleet.block import ClientBlock
from semisfl.net.client import member
from semisfl.net.tls import certs
from semisfl.runs.loop import run_rounds
from semisfl.runs.run_data import load_data
from semisfl.settings import config as configs
from semisfl.settings import presets
from semisfl.settings.config import Config, parse
from tests.net.harness import Network

ATTACKS = (
    *("scaled_bottom", "scaled_bottom_late", "zero_bottom", "stale_bottom", "reordered_bottom"),
    *("drift", "scaled_features", "negated_features_late", "one_class", "swapped_classes"),
)
SHARES = {3: 0.34, 5: 0.2, 10: 0.2}


def digits(clients: int, seed: int = 0) -> Config:
    """Return the run of docs/poisoning.md; its quorum are the honest devices.

    With a quorum of all, an attacker pauses the run by values for which it is shut out.
    """
    values = configs.read(Path("results/poisoning/digits.toml"))
    counts = {"total": clients, "active": clients}
    quorum = clients - max(1, round(SHARES[clients] * clients))
    changes = {"seed": seed, "clients": counts, "network": {"quorum": quorum}}
    return parse(presets.served(presets.merge(values, changes)))


def attacked_run(config: Config, attack: str | None, folder: Path) -> dict[str, Any]:
    """Train over the network with attackers, or without; return what came of it."""
    total = config.clients.total
    share = SHARES[total] if attack else 0.0
    attackers = attackers_of(config.seed, total, share)
    data, partition = load_data(config)
    net = Network(config, data, partition, certificates=folder)
    if attack:
        member.ClientBlock = partial(  # type: ignore[attr-defined, assignment, misc]
            PoisonedBlock, attack=attack_named(attack), attackers=attackers
        )
    try:
        net.join_all()
        result = run_rounds(net.experiment)
        honest = [f"client-{index}" for index in range(total) if index not in attackers]
        strikes = {
            name: count for name, count in net.fleet._listener.penalties.strikes.items() if count
        }
        return {
            "clients": total,
            "attack": attack or "nobody",
            "seed": config.seed,
            "accuracy": result.accuracy,
            "rounds": len(result.rounds),
            "attackers": sorted(attackers),
            "held_back": dict(
                Counter(c for row in result.rounds for c in row.get("held_back") or {})
            ),
            "honest_struck": sorted(strikes.keys() & set(honest)),
            "honest_gone": [
                n for n in honest if net.fleet.roster.index[n] not in net.fleet.present()
            ],
        }
    finally:
        member.ClientBlock = ClientBlock  # type: ignore[attr-defined]
        net.close()


def certificates(folder: Path, clients: int) -> Path:
    certs.make_authority(folder)
    certs.make_server(folder, ["localhost"])
    for index in range(clients):
        certs.make_client(folder, f"client-{index}")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--clients", default="3,5,10")
    parser.add_argument("--attacks", default=",".join(ATTACKS))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    lines = options.out.read_text(encoding="utf-8").splitlines() if options.out.exists() else []
    runs = [json.loads(line) for line in lines]
    done = {(run["clients"], run["attack"], run["seed"]): run["accuracy"] for run in runs}
    with tempfile.TemporaryDirectory() as place:
        folder = certificates(Path(place), max(SHARES))
        for clients in map(int, options.clients.split(",")):
            for attack in ("nobody", *options.attacks.split(",")):
                key = (clients, attack, options.seed)
                if key in done:
                    continue
                config = digits(clients, options.seed)
                run = attacked_run(config, None if attack == "nobody" else attack, folder)
                done[key] = run["accuracy"]
                run["lost"] = round(done[clients, "nobody", options.seed] - run["accuracy"], 2)
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(run) + "\n")
                print(json.dumps(run), flush=True)


if __name__ == "__main__":
    main()
