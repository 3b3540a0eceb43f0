"""The tables about poisoning and leakage, from the studies ``poisoning``, ``leakage`` and ``update-noise``."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from statistics import mean
from typing import Any

from reproduction import records
from reproduction.poisoning.attacks import ATTACKS
from reproduction.poisoning.grid import DIGITS, NOBODY, Outcome, losses
from reproduction.records import entries, entry
from reproduction.tables.numbers import accuracies, each, spread, table
from semisfl.costs.rounds import ImageFacts, RoundCosts
from semisfl.fleet.caps import RoundSizes, RoundUse
from semisfl.settings import config as configs, presets
from semisfl.settings.counts import amount
from semisfl.settings.policy import Policy, upload_bits

# --- poisoning ---------------------------------------------------------------------------------------

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
    cases: dict[Case, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in named("network"):
        if run["attack"] != NOBODY:
            lost = honest[tuple(run[name] for name in names)] - run["accuracy"]
            case = (run["method"], run["clients"], len(run["attackers"]))
            cases[*case, run["rounds"], run["attack"]][run["rule"]].append(lost)
    return cases


def network_cell(by_rule: dict[str, list[float]], rule: str) -> str:
    values = by_rule.get(rule, [])
    return spread(values) if len(values) > 1 else "".join(f"{value:.1f}" for value in values) or "–"


def is_usual(method: str, clients: int, attackers: int, rounds: int) -> bool:
    """Return whether a case is of SemiSFL, with the usual attackers and rounds."""
    expected = configs.read(DIGITS)["rounds"]
    return method == "semisfl" and attackers == FLEETS[clients] and rounds == expected


def usual_cases() -> dict[str, dict[int, dict[str, list[float]]]]:
    """Return by attack and clients the losses of SemiSFL's runs of the usual length."""
    usual: dict[str, dict[int, dict[str, list[float]]]] = defaultdict(dict)
    for (method, clients, attackers, rounds, attack), by_rule in network_losses().items():
        if is_usual(method, clients, attackers, rounds):
            usual[attack][clients] = by_rule
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
    rounds = configs.parse(configs.read(DIGITS)).client_rounds
    by_case: dict[tuple[str, str], list[tuple[int, Outcome]]] = defaultdict(list)
    for clients in FLEETS:
        for run in outcomes(clients):
            by_case[run.attack, run.rule].append((clients, run))

    def held(attack: str, guilty: bool) -> str:
        """Return the mean share of rounds in which attackers, or honest clients, were held back."""
        shares = [
            run.held_back.get(str(client), 0) / rounds
            for clients, run in by_case[attack, SERVED]
            for client in range(clients)
            if (client in run.attackers) == guilty
        ]
        return f"{mean(shares):.0%}" if shares else "–"

    rows = [
        (f"`{attack}`", held(attack, True), held(attack, False)) for attack in (NOBODY, *ATTACKS)
    ]
    taken = {
        "without attackers": (NOBODY, "mean"),
        "under the mean": ("backdoor", "mean"),
        "under the default of `serve`": ("backdoor", SERVED),
    }
    shares = ", ".join(
        f"{mean(run.backdoor for _, run in by_case[case]):.1f} % {words}"
        for words, case in taken.items()
    )
    head = ("attack", "rounds in which an attacker was held back", "and an honest client")
    return (
        f"{table(head, rows)}\n\n"
        f"Stamped test images of other classes taken for the backdoor's class: {shares}."
    )


# --- leakage -----------------------------------------------------------------------------------------

POLICIES = "leakage/policies"
"""The entry of runs with the policies that are shipped, and of attacks on them."""
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


def by_seed(point: str) -> list[dict[str, Any]]:
    return [entry(f"leakage/{point}-seed{seed}") for seed in range(3)]


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
        for row in entry(f"leakage/{folder}")["features"]
    ]
    return table(("cut", "defence", "bytes", *ATTACKED), rows)


def uses() -> str:
    places = {often: f"noise0.14-seed0/uses{often}" for often in (4, 16, 64)}
    rows = [
        (str(often), *attacked(entry(f"leakage/{place}")["features"][-1]))
        for often, place in ({1: "noise0.14-seed0"} | places).items()
    ]
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
        for row in entry(f"leakage/{folder}")["updates"]
    ]
    return table(("from the", "clients × images", "SSIM", "PSNR", "identified"), rows)


def cifar10_noise() -> str:
    """Return the table of models trained without and with noise, and what their features reveal."""
    rows = []
    for folder in ("cifar10-h200", "cifar10-noise-h200"):
        measured = entry(f"leakage/{folder}")
        sent = [row for row in measured["features"] if row["cut"] == "flatten"]
        row = sent[-1] if folder.startswith("cifar10-noise") else sent[0]
        rows.append((row["defence"], f"{measured['accuracy']:.1f}", *attacked(row)))
    return table(("trained with", "accuracy", *ATTACKED), rows)


TRIED = {
    "supervised": "no devices at all",
    "plain": "no policy, or `open.toml`",
    "n14-u01": "noise, with `update_noise = 0.01`",
    "n14-u03": "noise",
}
NOISY = Policy(clip=30.0, noise=0.14, update_clip=0.3, update_noise=0.03)
"""The policy of those runs, which the records call strict."""
HELD = RoundSizes(images=400, batch=32, features=1024, weights=52_096)
"""A device of the digits preset: about 400 images, 10 steps of 32."""


def policy_cost() -> str:
    rows, noises = [], {"n14-u01": 0.01, "n14-u03": NOISY.update_noise}
    for point, words in TRIED.items():
        accuracy = [run["accuracy"] for run in entry(POLICIES)["runs"] if run["point"] == point]
        bits = "0" if point == "supervised" else "no bound"
        if point in noises:
            policy = NOISY.model_copy(update={"update_noise": noises[point]})
            bits = f"{RoundUse.of_split(policy, 10, HELD).bits:,.0f}"
        rows.append((words, spread(accuracy), bits))
    return table(("with", "accuracy", "bits per image and round"), rows)


def cifar10_update_noise() -> str:
    """Return what noise on the bottoms costs on CIFAR-10, and the bits of an upload."""
    from semisfl.models.build import build

    bottom = build("alexnet", (3, 32, 32), 10).bottom.state_dict().values()
    weights = sum(tensor.numel() for tensor in bottom if tensor.is_floating_point())
    rows = [("nothing", each(accuracies([records.run("short/cifar10-semisfl")])), "no bound")]
    for noise in ("0.0003", "0.003", "0.03"):
        one = records.run(f"update-noise/{noise}")
        bits = upload_bits(Policy(**one.config["policy"]), weights)
        rows.append((f"`update_noise = {noise}`", each(accuracies([one])), f"{bits:,.1f}"))
    return table(("with", "accuracy", "bits per image and round, of the upload"), rows)


def policy_attacks() -> str:
    rows = [
        (
            f"`{row['cut']}`",
            "noise" if row["defence"] == "strict" else row["defence"],
            "no bound" if row["bits_per_image"] is None else f"{row['bits_per_image']:.0f}",
            *attacked(row),
        )
        for row in entry(POLICIES)["leakage"]["features"]
    ]
    return table(("cut", "policy", "bits per use", *ATTACKED), rows)


def solved_uploads() -> str:
    rows = [
        (
            f"`{row['cut']}`",
            "noise" if row["defence"] == "strict" else row["defence"],
            row["server"],
            "no bound" if row["bits"] is None else f"{row['bits']:,.0f}",
            f"{row['rebuilt']:,} of {row['inputs']:,}",
            f"{row['correlation']:.2f}",
        )
        for row in entry(POLICIES)["leakage"]["uploads"]
    ]
    return table(("cut", "policy", "server", "bits", "inputs rebuilt", "correlation"), rows)


def frozen_cuts() -> str:
    """Return what each cut of a frozen EfficientNet-Lite0 costs a device for one image, and what its rows show."""
    measured, rows = entry("leakage/frozen-food"), []
    side = round((measured["image_bits"] / 24) ** 0.5)
    config = configs.parse(configs.override(presets.values_of("photos"), [f"data.size={side}"]))
    costs = RoundCosts.of(config, ImageFacts((3, side, side), 10, 1))
    for row in measured["features"]:
        at = costs.at(row["layers"])
        sizes = amount(at.sizes.bottom), amount(at.image_bytes())
        flops = sum(config.clients.views.values()) * at.cut.bottom_flops
        ssim, _, identified, _, classes, member = attacked(row)
        shown = ssim, identified, classes, member
        rows.append((f"`{row['cut']}`", f"{flops / 1e6:,.0f}", *sizes, *shown))
    head = ("cut after", "MFLOP", "bottom", "rows", "SSIM", "identified", "class", "member")
    return table(head, rows)


TABLES: dict[str, Callable[[], str]] = {
    "fleets": fleets,
    "held-back": held_back,
    "network": network,
    "network-others": network_others,
    "tradeoff": tradeoff,
    "cuts": lambda: cuts("plain-seed0/cuts"),
    "updates": lambda: updates("plain-seed0/cuts"),
    "uses": uses,
    "cifar10": lambda: cuts("cifar10-h200"),
    "cifar10-updates": lambda: updates("cifar10-h200"),
    "cifar10-noise": cifar10_noise,
    "policies": policy_cost,
    "cifar10-update-noise": cifar10_update_noise,
    "policy-attacks": policy_attacks,
    "uploads": solved_uploads,
    "frozen-cuts": frozen_cuts,
}
