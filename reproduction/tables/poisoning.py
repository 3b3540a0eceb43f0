"""The tables about poisoning, from the study ``poisoning``."""

from collections.abc import Callable, Iterable
from statistics import mean
from typing import Any

from reproduction.poisoning.attacks import ATTACKS
from reproduction.poisoning.grid import DIGITS, NOBODY, Outcome, losses
from reproduction.records import entries
from reproduction.tables.numbers import spread, table
from semisfl.settings import config as configs

SERVED = "clipped_mean+limited"
"""The default of `semisfl serve`, as `python -m reproduction poisoning` names it."""
FLEETS = {3: 1, 5: 1, 10: 2}
"""Number of attackers by number of clients."""


def named(part: str) -> list[dict[str, Any]]:
    """Return the runs of one part of the study: a grid by its number of clients, or ``network``."""
    return [one for one in entries("poisoning") if one["name"] == part]


def outcomes(clients: int) -> list[Outcome]:
    """Return the runs with so many clients, in the order of seeds."""
    grid = [Outcome.of(one) for one in named(f"digits-{clients}")]
    return sorted(grid, key=lambda one: one.seed)


def points_lost(clients: int) -> dict[str, dict[str, list[float]]]:
    """Return by attack and rule the points lost with each seed."""
    return {attack: by_rule for (attack, _), by_rule in losses(outcomes(clients)).items()}


def by_fleet(served: str, attacks: Iterable[str], cell: Callable[[str, str, int], str]) -> str:
    """Return a table with a ``cell`` for each attack, rule and number of clients."""
    columns = [(rule, clients) for rule in (served, "mean") for clients in FLEETS]
    words = {served: "`serve`", "mean": "mean"}
    head = [f"{words[rule]} {FLEETS[clients]} of {clients}" for rule, clients in columns]
    rows = [(f"`{attack}`", *(cell(attack, *column) for column in columns)) for attack in attacks]
    return table(("attack", *head), rows)


def fleets() -> str:
    lost = {clients: points_lost(clients) for clients in FLEETS}
    return by_fleet(
        SERVED,
        (NOBODY, *ATTACKS),
        lambda attack, rule, clients: spread(lost[clients][attack][rule]),
    )


Case = tuple[str, int, int, int, str]
"""Method, clients, attackers, rounds and attack of runs over the network."""


def network_losses() -> dict[Case, dict[str, list[float]]]:
    """Return by case and rule the points lost against the same rule and seed without attackers."""
    names = ("rule", "method", "clients", "rounds", "seed")
    honest = {
        tuple(run[name] for name in names): run["accuracy"]
        for run in named("network")
        if run["attack"] == NOBODY
    }
    cases: dict[Case, dict[str, list[float]]] = {}
    for run in named("network"):
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
    length = configs.read(DIGITS)["rounds"]
    return (method, attackers, rounds) == ("semisfl", FLEETS[clients], length)


def usual_cases() -> dict[str, dict[int, dict[str, list[float]]]]:
    """Return by attack and clients the losses of SemiSFL's runs of the usual length."""
    usual: dict[str, dict[int, dict[str, list[float]]]] = {}
    for (method, clients, attackers, rounds, attack), by_rule in network_losses().items():
        if is_usual(method, clients, attackers, rounds):
            usual.setdefault(attack, {})[clients] = by_rule
    return usual


def network() -> str:
    usual = usual_cases()
    return by_fleet(
        "serve",
        [attack for attack in ATTACKS if attack in usual],
        lambda attack, rule, clients: network_cell(usual[attack].get(clients, {}), rule),
    )


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
    config = configs.parse(configs.read(DIGITS))
    rounds = config.rounds - config.server.pretrain_rounds
    every = {clients: outcomes(clients) for clients in FLEETS}
    rows = []
    for attack in (NOBODY, *ATTACKS):
        guilty: list[float] = []
        honest: list[float] = []
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


TABLES: dict[str, Callable[[], str]] = {
    "fleets": fleets,
    "held-back": held_back,
    "network": network,
    "network-others": network_others,
}
