"""Write the tables of docs/leakage.md and docs/poisoning.md, and a picture, from results/leakage and results/poisoning.

    python -m benchmarks.security_tables

Each table stands between ``<!-- security tradeoff -->`` and ``<!-- end of tradeoff -->``, with its own name.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

from semisfl.attacks.attack_grid import NOBODY, Outcome, losses, read
from semisfl.attacks.poisoning import ATTACKS
from semisfl.fleet.caps import Held, Price
from semisfl.paper.document import filled
from semisfl.runs.report import Spread
from semisfl.settings import config as configs
from semisfl.settings.policy import read_policy

LEAKAGE, POISONING = Path("results/leakage/leakage.json"), Path("results/poisoning")
POLICIES = Path("results/leakage/policies.json")
DOCUMENTS = (Path("docs/leakage.md"), Path("docs/poisoning.md"))
PICTURE = Path("docs/leakage-tradeoff.png")
POINTS = {
    "plain": "nothing",
    "tau0.9": "threshold 0.9 alone",
    "noise0.05": "`noise = 0.05`, threshold 0.9",
    "noise0.1": "`noise = 0.1`, threshold 0.9",
    "noise0.14": "`noise = 0.14`, threshold 0.9",
    "noise0.14-tau0.95": "`noise = 0.14`",
    "noise0.2": "`noise = 0.2`, threshold 0.9",
    "noise0.3": "`noise = 0.3`, threshold 0.9",
    "clip20-noise0.14": "`clip = 20`, `noise = 0.14`, threshold 0.9",
    "int8": "int8 for everything",
    "int4": "int4 for everything",
    "int4-noise0.14": "int4 for everything, `noise = 0.14`, threshold 0.9",
    "cut-relu_fc1": "cut at `relu_fc1`",
    "cut-relu_fc1-noise0.14": "cut at `relu_fc1`, `noise = 0.14`, threshold 0.9",
}
SERVED = "clipped_mean+limited"
"""The default of `semisfl serve`, as `semisfl poisoning` names it."""
FLEETS = {3: 1, 5: 1, 10: 2}
"""How many attack of so many clients."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def leaks(folder: str) -> dict[str, Any]:
    one: dict[str, Any] = _all_leaks()[folder]
    return one


@cache
def _all_leaks() -> dict[str, Any]:
    """Return what `semisfl leakage` wrote, by the name of its run."""
    measured: dict[str, Any] = json.loads(LEAKAGE.read_text(encoding="utf-8"))
    return measured


def spread(values: Sequence[float], digits: int = 1) -> str:
    summary = Spread.of(values)
    return f"{summary.mean:.{digits}f} ± {summary.stderr:.{digits}f}"


def by_seed(point: str) -> list[dict[str, Any]]:
    return [leaks(f"{point}-seed{seed}") for seed in range(3)]


def lost(point: str) -> list[float]:
    pairs = zip(by_seed("plain"), by_seed(point), strict=True)
    return [without["accuracy"] - with_it["accuracy"] for without, with_it in pairs]


def attacked(row: dict[str, Any]) -> list[str]:
    """Return one measurement in the columns that all tables share."""
    mix, member = row["class_mix"], row["membership_auc"]
    return [
        f"{row['decoder']['ssim']:.2f} ({row['mean_image']['ssim']:.2f})",
        f"{row['decoder']['psnr']:.1f}",
        f"{row['decoder']['identified']:.0%} ({row['chance_identified']['decoder']:.1%})",
        f"{row['optimised']['ssim']:.2f}",
        f"{mix['accuracy']:.0%} ({mix['chance']:.0%})",
        "–" if member is None else f"{member:.2f} (0.50)",
    ]


ATTACKED = ("SSIM", "PSNR", "identified", "by optimising", "class", "member")


def tradeoff() -> str:
    rows = []
    for point, words in POINTS.items():
        runs = by_seed(point)
        sent = [run["features"][-1] for run in runs]  # the last row is with the run's own policy
        rows.append(
            (
                words,
                f"{spread([run['accuracy'] for run in runs])}",
                "–" if point == "plain" else spread(lost(point)),
                spread([row["decoder"]["ssim"] for row in sent], 2),
                f"{mean(row['decoder']['identified'] for row in sent):.0%}",
                f"{mean(row['class_mix']['accuracy'] for row in sent):.0%}",
                f"{mean(row['membership_auc'] for row in sent):.2f}",
                f"{sent[0]['bytes_per_image']:,.0f}",
            )
        )
    head = ("with", "accuracy", "lost", "SSIM", "identified", "class", "member", "bytes")
    return table(head, rows)


def cuts(folder: str) -> str:
    rows = [
        (f"`{row['cut']}`", row["defence"], f"{row['bytes_per_image']:,.0f}", *attacked(row))
        for row in leaks(folder)["features"]
    ]
    return table(("cut", "defence", "bytes", *ATTACKED), rows)


def uses() -> str:
    rows = []
    for often in (1, 4, 16, 64):
        folder = "noise0.14-seed0" + ("" if often == 1 else f"/uses{often}")
        rows.append((str(often), *attacked(leaks(folder)["features"][-1])))
    return table(("uses", *ATTACKED), rows)


def updates(folder: str) -> str:
    rows = [
        (
            row["sent"],
            f"{row['clients']} × {row['images_each']}",
            f"{row['ssim']:.2f}",
            f"{row['psnr']:.1f}",
            f"{row['identified']:.0%} ({row['chance_identified']:.0%})",
        )
        for row in leaks(folder)["updates"]
    ]
    return table(("from the", "clients × images", "SSIM", "PSNR", "identified"), rows)


def outcomes(clients: int) -> list[Outcome]:
    """Return the runs with so many clients, in the order of seeds."""
    return sorted(read(POISONING / f"digits-{clients}.jsonl"), key=lambda one: one.seed)


def points_lost(clients: int) -> dict[str, dict[str, list[float]]]:
    """Return by attack and rule the points lost with each seed."""
    return {attack: by_rule for (attack, _), by_rule in losses(outcomes(clients)).items()}


def fleets() -> str:
    losses = {clients: points_lost(clients) for clients in FLEETS}
    columns = [(rule, clients) for rule in (SERVED, "mean") for clients in FLEETS]
    rows = [
        (f"`{attack}`", *(spread(losses[clients][attack][rule]) for rule, clients in columns))
        for attack in (NOBODY, *ATTACKS)
    ]
    words = {SERVED: "`serve`", "mean": "mean"}
    head = [f"{words[rule]} {FLEETS[clients]} of {clients}" for rule, clients in columns]
    return table(("attack", *head), rows)


@cache
def networked() -> list[dict[str, Any]]:
    """Return the runs of `tests.net.poisoned_grid`."""
    lines = (POISONING / "network.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


Case = tuple[str, int, int, int, str]
"""Method, clients, attackers, rounds and attack of runs over the network."""


def network_losses() -> dict[Case, dict[str, list[float]]]:
    """Return by case and rule the points lost against the same rule and seed without attackers."""
    names = ("rule", "method", "clients", "rounds", "seed")
    honest = {
        tuple(run[name] for name in names): run["accuracy"]
        for run in networked()
        if run["attack"] == NOBODY
    }
    cases: dict[Case, dict[str, list[float]]] = {}
    for run in networked():
        if run["attack"] == NOBODY:
            continue
        clients, attackers = run["clients"], len(run["attackers"])
        case = (run["method"], clients, attackers, run["rounds"], run["attack"])
        lost = honest[tuple(run[name] for name in names)] - run["accuracy"]
        cases.setdefault(case, {}).setdefault(run["rule"], []).append(lost)
    return cases


def network_cell(by_rule: dict[str, list[float]], rule: str) -> str:
    values = by_rule.get(rule, [])
    return spread(values) if len(values) > 1 else "".join(f"{value:.1f}" for value in values) or "–"


def is_usual(method: str, clients: int, attackers: int, rounds: int) -> bool:
    length = configs.read(POISONING / "digits.toml")["rounds"]
    return (method, attackers, rounds) == ("semisfl", FLEETS[clients], length)


def usual_cases() -> dict[str, dict[int, dict[str, list[float]]]]:
    """Return by attack and clients the losses of SemiSFL's runs of the usual length."""
    usual: dict[str, dict[int, dict[str, list[float]]]] = {}
    for (method, clients, attackers, rounds, attack), by_rule in network_losses().items():
        if is_usual(method, clients, attackers, rounds):
            usual.setdefault(attack, {})[clients] = by_rule
    return usual


def network() -> str:
    columns = [(rule, clients) for rule in ("serve", "mean") for clients in FLEETS]
    rows = [
        (f"`{attack}`", *(network_cell(cells.get(clients, {}), rule) for rule, clients in columns))
        for attack, cells in sorted(
            usual_cases().items(), key=lambda item: [*ATTACKS].index(item[0])
        )
    ]
    words = {"serve": "`serve`", "mean": "mean"}
    head = [f"{words[rule]} {FLEETS[clients]} of {clients}" for rule, clients in columns]
    return table(("attack", *head), rows)


def network_others() -> str:
    """Return the runs over the network with other methods, more attackers or more rounds."""
    rows = [
        (
            *(method, f"{attackers} of {clients}", str(rounds), f"`{attack}`"),
            *(network_cell(by_rule, rule) for rule in ("serve", "mean")),
        )
        for (method, clients, attackers, rounds, attack), by_rule in network_losses().items()
        if not is_usual(method, clients, attackers, rounds)
    ]
    return table(("method", "attackers", "rounds", "attack", "`serve`", "mean"), rows)


def held_back() -> str:
    """Return who was held back how often, and what a backdoor reached."""
    config = configs.parse(configs.read(POISONING / "digits.toml"))
    rounds = config.rounds - config.server.pretrain_rounds
    every = {clients: outcomes(clients) for clients in FLEETS}
    rows = []
    for attack in (NOBODY, *ATTACKS):
        guilty, honest = [], []
        for clients, runs in every.items():
            for run in (o for o in runs if (o.attack, o.rule) == (attack, SERVED)):
                for client in range(clients):
                    share = run.held_back.get(str(client), 0) / rounds
                    (guilty if client in run.attackers else honest).append(share)
        rows.append(
            (f"`{attack}`", *(f"{mean(one):.0%}" if one else "–" for one in (guilty, honest)))
        )
    taken = [
        (
            rule,
            mean(
                o.backdoor for runs in every.values() for o in runs if (o.attack, o.rule) == which
            ),
        )
        for rule, which in (
            ("without attackers", (NOBODY, "mean")),
            ("under the mean", ("backdoor", "mean")),
            ("under the default of `serve`", ("backdoor", SERVED)),
        )
    ]
    shares = ", ".join(f"{share:.1f} % {words}" for words, share in taken)
    head = ("attack", "rounds in which an attacker was held back", "and an honest client")
    return (
        f"{table(head, rows)}\n\n"
        f"Stamped test images of other classes taken for the backdoor's class: {shares}."
    )


def cifar10_noise() -> str:
    """Return the table of models trained without and with noise, and what their features reveal."""
    rows = []
    for folder in ("cifar10-h200", "cifar10-noise-h200"):
        measured = leaks(folder)
        sent = [row for row in measured["features"] if row["cut"] == "flatten"]
        row = sent[-1] if folder.startswith("cifar10-noise") else sent[0]
        rows.append((row["defence"], f"{measured['accuracy']:.1f}", *attacked(row)))
    return table(("trained with", "accuracy", *ATTACKED), rows)


@cache
def _policies() -> dict[str, Any]:
    """Return the runs and the attacks on the policies that are shipped."""
    policies: dict[str, Any] = json.loads(POLICIES.read_text(encoding="utf-8"))
    return policies


TRIED = {
    "supervised": "no devices at all",
    "plain": "no policy, or `open.toml`",
    "n14-u01": "`strict.toml` with `update_noise = 0.01`",
    "n14-u03": "`strict.toml`",
}
HELD = Held(images=400, batch=32, features=1024, weights=52_096)
"""A device of the digits preset: about 400 images, 10 steps of 32."""


def policy_cost() -> str:
    strict, rows = read_policy(Path("policies/strict.toml")), []
    noises = {"n14-u01": 0.01, "n14-u03": strict.update_noise}
    for point, words in TRIED.items():
        accuracy = [run["accuracy"] for run in _policies()["runs"] if run["point"] == point]
        bits = "0" if point == "supervised" else "no bound"
        if point in noises:
            policy = strict.model_copy(update={"update_noise": noises[point]})
            bits = f"{Price.of_split(policy, 10, HELD).bits / HELD.images:.0f}"
        rows.append((words, spread(accuracy), bits))
    return table(("with", "accuracy", "bits per image and round"), rows)


def policy_attacks() -> str:
    rows = [
        (
            f"`{row['cut']}`",
            row["defence"],
            "no bound" if row["bits_per_image"] is None else f"{row['bits_per_image']:.0f}",
            *attacked(row),
        )
        for row in _policies()["leakage"]["features"]
    ]
    return table(("cut", "policy", "bits per use", *ATTACKED), rows)


def solved_uploads() -> str:
    rows = [
        (
            f"`{row['cut']}`",
            row["defence"],
            row["server"],
            "no bound" if row["bits"] is None else f"{row['bits']:,.0f}",
            f"{row['rebuilt']:,} of {row['inputs']:,}",
            f"{row['correlation']:.2f}",
        )
        for row in _policies()["leakage"]["uploads"]
    ]
    return table(("cut", "policy", "server", "bits", "inputs rebuilt", "correlation"), rows)


TABLES: dict[str, Callable[[], str]] = {
    "tradeoff": tradeoff,
    "cuts": lambda: cuts("plain-seed0/cuts"),
    "updates": lambda: updates("plain-seed0/cuts"),
    "uses": uses,
    "cifar10": lambda: cuts("cifar10-h200"),
    "cifar10-updates": lambda: updates("cifar10-h200"),
    "cifar10-noise": cifar10_noise,
    "policies": policy_cost,
    "policy-attacks": policy_attacks,
    "uploads": solved_uploads,
    "fleets": fleets,
    "held-back": held_back,
    "network": network,
    "network-others": network_others,
}


def draw(file: Path) -> None:
    """Draw accuracy lost over SSIM, one point per line of the trade-off."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
    labelled: list[tuple[float, float]] = []
    points = {
        words: (mean(run["features"][-1]["decoder"]["ssim"] for run in by_seed(point)), lost(point))
        for point, words in POINTS.items()
    }
    for words, (ssim, points_of) in sorted(points.items(), key=lambda item: -mean(item[1][1])):
        height = mean(points_of)
        axes.plot(ssim, height, "o", color="C1" if "noise" in words else "C0")
        while any(abs(ssim - x) < 0.3 and abs(height - y) < 0.11 for x, y in labelled):
            height -= 0.02
        labelled.append((ssim, height))
        side = "right" if ssim > 0.8 else "left"
        offset = -6 if ssim > 0.8 else 6
        axes.annotate(
            words.replace("`", "").replace(", threshold 0.9", ""),
            (ssim, height),
            xytext=(offset, -3),
            textcoords="offset points",
            fontsize=7,
            ha=side,
        )
    axes.axvspan(0, 0.44, ymax=1, color="C2", alpha=0.08)
    axes.axhline(2, color="grey", linewidth=0.8, linestyle=":")
    axes.set(
        xlabel="SSIM of what a decoder rebuilds", ylabel="points of accuracy lost", xlim=(0.1, 1)
    )
    figure.savefig(file, dpi=110)


def names_in(text: str) -> list[str]:
    """Return the names of the tables that a document has a place for."""
    return re.findall(r"^<!-- security (\S+) -->$", text, re.MULTILINE)


def with_tables(text: str) -> str:
    """Return the document with its tables made again."""
    return filled(text, lambda name: TABLES[name](), names_in(text), "security")


def main() -> None:
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        document.write_text(with_tables(text), encoding="utf-8")
    draw(PICTURE)


if __name__ == "__main__":
    main()
