"""The tables and a picture about leakage, from the studies ``leakage`` and ``update-noise``."""

from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

from reproduction.records import entry, run
from reproduction.tables.numbers import accuracies, each, spread, table
from semisfl.fleet.caps import Held, Price
from semisfl.settings.policy import Policy, read_policy, upload_bits

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


def leaks(folder: str) -> dict[str, Any]:
    """Return what `semisfl leakage` wrote about the run of this name."""
    return entry(f"leakage/{folder}")


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


def cifar10_noise() -> str:
    """Return the table of models trained without and with noise, and what their features reveal."""
    rows = []
    for folder in ("cifar10-h200", "cifar10-noise-h200"):
        measured = leaks(folder)
        sent = [row for row in measured["features"] if row["cut"] == "flatten"]
        row = sent[-1] if folder.startswith("cifar10-noise") else sent[0]
        rows.append((row["defence"], f"{measured['accuracy']:.1f}", *attacked(row)))
    return table(("trained with", "accuracy", *ATTACKED), rows)


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
        accuracy = [run["accuracy"] for run in entry(POLICIES)["runs"] if run["point"] == point]
        bits = "0" if point == "supervised" else "no bound"
        if point in noises:
            policy = strict.model_copy(update={"update_noise": noises[point]})
            bits = f"{Price.of_split(policy, 10, HELD).bits:,.0f}"
        rows.append((words, spread(accuracy), bits))
    return table(("with", "accuracy", "bits per image and round"), rows)


def cifar10_update_noise() -> str:
    """Return what noise on the bottoms costs on CIFAR-10, and the bits of an upload."""
    from semisfl.models.build import build

    bottom = build("alexnet", (3, 32, 32), 10).bottom.state_dict().values()
    weights = sum(tensor.numel() for tensor in bottom if tensor.is_floating_point())
    rows = [("nothing", each(accuracies([run("short/cifar10-semisfl")])), "no bound")]
    for noise in ("0.0003", "0.003", "0.03"):
        one = run(f"update-noise/{noise}")
        bits = upload_bits(Policy(**one.config["policy"]), weights)
        rows.append((f"`update_noise = {noise}`", each(accuracies([one])), f"{bits:,.1f}"))
    return table(("with", "accuracy", "bits per image and round, of the upload"), rows)


def policy_attacks() -> str:
    rows = [
        (
            f"`{row['cut']}`",
            row["defence"],
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
            row["defence"],
            row["server"],
            "no bound" if row["bits"] is None else f"{row['bits']:,.0f}",
            f"{row['rebuilt']:,} of {row['inputs']:,}",
            f"{row['correlation']:.2f}",
        )
        for row in entry(POLICIES)["leakage"]["uploads"]
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
    "cifar10-update-noise": cifar10_update_noise,
    "policy-attacks": policy_attacks,
    "uploads": solved_uploads,
}


def draw(file: Path) -> Path:
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
    return file
