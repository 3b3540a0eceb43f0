"""Numbers that the pages quote in sentences and in tables of their own are those of the records.

`make results` writes the other tables, and test_document.py holds those.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import pytest

from reproduction import records
from reproduction.paper.measures import paper_world, replayed
from reproduction.records import run
from reproduction.tables import frontier as frontier_tables
from reproduction.tables import own_images
from reproduction.tables import poisoning as poisoning_tables
from reproduction.tables import results as result_tables
from reproduction.tables.numbers import METHODS, accuracies, every_seed, numbered, runs, summed
from semisfl.cli.look import _models
from semisfl.costs.plan import make
from semisfl.costs.rounds import ImageFacts
from semisfl.runs.report import Spread
from semisfl.settings.catalog import DATA
from semisfl.settings.presets import preset

ROOT = Path(__file__).parents[2]


@cache
def page(name: str) -> str:
    """Return a page with one space where lines break, and minus signs as Python writes them."""
    text = (ROOT / name).read_text(encoding="utf-8").replace("−", "-")
    return re.sub(r"\s+", " ", text)


def measured(path: str) -> Any:
    """Return what a benchmark printed."""
    return records.measured(path)


def accuracy(name: str, after: int | None = None) -> str:
    """Return a run's accuracy after its last round, or after round ``after``."""
    tested = run(name).tested
    return f"{[row for row in tested if after in (None, row.round + 1)][-1].accuracy:.1f}"


def spread(members: list[Any]) -> str:
    return str(Spread.of(accuracies(members)))


def readme() -> Iterator[str]:
    sent = run("demo/semisfl-seed0").rounds[-1].bytes_total
    assert sent is not None
    yield f"| Supervised-only | {accuracy('demo/supervised-seed0')} | 0 |"
    yield f"| SemiSFL | {accuracy('demo/semisfl-seed0')} | {sent / 1e6:.0f} MB |"
    iid, skewed = (
        fmean(accuracies(every_seed(f"paper/cifar10-{kind}-semisfl"))) for kind in ("iid", "dir0.1")
    )
    yield f"reaches {iid:.1f} % (IID) and {skewed:.1f} % (Dirichlet 0.1) after 1,000 rounds"
    frontier = fmean(accuracies(every_seed("frontier/cifar10-dir0.1")))
    yield f"go beyond the paper: {frontier:.1f} % (Dirichlet 0.1)"
    timed = result_tables.gpu_rounds().splitlines()
    (line,) = (line for line in timed if "CIFAR-10 / AlexNet, SemiSFL" in line)
    yield f"{float(line.split('|')[2]):.2f} s per round on one H200"


def tutorial() -> Iterator[str]:
    tests = [
        run(f"tutorial/{name}").tested[-1].test_accuracy for name in ("simulated", "labels-only")
    ]
    yield "give {:.1f} % of the test images, and labels alone {:.1f} %".format(*tests)


def methods() -> Iterator[str]:
    weights = [accuracy(f"fedmatch/{name}") for name in ("0.1", "0.03", "0.01", "supervised")]
    yield f"| CIFAR-10, CNN | {' | '.join(weights)} |"
    forty = {name: numbered(f"few-labels/{name}-data.labeled-40", 5) for name in METHODS}
    yield f"{spread(forty['semifl'])} against {spread(forty['supervised'])}"
    yield f"**(FL)² does not** either: {spread(forty['fl2'])}"
    last = [one.rounds[-1] for one in forty["fl2"]]
    kept = sorted(100 * (1 - (row.mask_rate or 0)) for row in last)
    wrong = sorted(100 * (row.impurity or 0) for row in last)
    yield f"keep {kept[0]:.0f} to {kept[-1]:.0f} % of the images, and {wrong[0]:.0f} to {wrong[-1]:.0f} %"
    labels_alone = fmean(accuracies(forty["supervised"]))
    gains = {name: fmean(accuracies(members)) - labels_alone for name, members in forty.items()}
    ahead = sorted(gains[name] for name in ("semisfl", "fedswitch", "fedswitch-sl"))
    yield f"do, by {ahead[0]:.0f} to {ahead[-1]:.0f} points; FedMatch by {gains['fedmatch']:.1f}."


def faults() -> Iterator[str]:
    chaos = measured("cpu/chaos")
    assert not chaos["wrong"]
    yield (
        f"did {chaos['rounds']} rounds through {sum(chaos['faults'].values())} faults, "
        f"{chaos['servers_started'] - 1} restarts of the server and {chaos['checkpoints_refused_by_the_disk']} checkpoints"
    )


def costs() -> Iterator[str]:
    presets = {"svhn": "SVHN, CNN", "cifar10": "CIFAR-10, AlexNet", "stl10": "STL-10, VGG13"}
    for name, title in presets.items():
        known = DATA[name]
        made = make(preset(name), ImageFacts(known.shape, known.classes, 1000), paper_world())
        (whole,) = (line for line in made.full if line.method == "fedswitch")
        best = "before `fc1`, as in the paper"
        if made.best.cut != made.chosen.cut:
            best = f"after `{made.best.cut}`: {made.best.total / 1e6:.1f} MB"
        yield f"| {title} | {made.chosen.total / 1e6:.1f} MB | {whole.total / 1e6:.1f} MB | {best} |"
    rounds = measured("cpu/virtual_clock")["rounds"]
    for title, (first, second) in {"SemiSFL": rounds[:2], "FedSwitch": rounds[2:]}.items():
        yield (
            f"| {title}, rounds 2 and 3 | {first['measured']:.2f}, {second['measured']:.2f} | {first['virtual']:.2f} "
            f"| {100 * first['error']:+.1f} %, {100 * second['error']:+.1f} % |"
        )
    by_wire: dict[str, list[Any]] = defaultdict(list)
    for line in records.entries("savings"):
        by_wire[line["variant"]].append(line)
    whole = fmean(line["bytes_total"] for line in by_wire["fp32"])
    for wire, lines in by_wire.items():
        sent = fmean(line["bytes_total"] for line in lines)
        score = Spread.of([line["accuracy"] for line in lines])
        yield f"| {wire} | {len(lines)} | {score} | {sent / 1e6:.1f} | {100 * sent / whole:.1f} % |"
    lost = {
        wire: sorted(
            one["accuracy"] - other["accuracy"]
            for one, other in zip(by_wire["fp32"], lines, strict=True)
        )
        for wire, lines in by_wire.items()
    }
    coded = sorted(lost["int8"] + lost["int4"])
    yield f"int8 and int4 lost {coded[0]:.2f} to {coded[-1]:.2f} points."


def performance() -> Iterator[str]:
    models = {model["name"]: model for model in _models()}
    weights = models["alexnet"]["bottom"] + models["alexnet"]["top"]
    yield f"SGD over ten models of {weights / 1e6:.0f} million weights"
    row, bottom = 4 * models["vgg16"]["features"], 4 * models["vgg16"]["bottom"]
    features, bottoms = 50 * 576 * 3 * row, 9 * 3 * bottom
    yield f"50 x 576 rows x 3 x {row / 1024:.0f} KiB = {features / 1e9:.1f} GB"
    yield f"their bottoms, {bottom / 1e6:.0f} MB each way with the teacher's, {bottoms / 1e9:.1f} GB at most"
    sent = features + bottoms
    yield f"{1000 * sent / 400e9:.0f} ms at NVLink's 400 GB/s, {sent / 12.5e9:.2f} s at 100 Gbit/s"
    lines = result_tables.gpu_rounds().splitlines()
    reached = [line.split("|")[1].strip(" –") for line in lines if "| reached |" in line]
    yield f"**Only {' and '.join(reached)} reach their targets.**"
    grown = measured("gpu/bench")["growth"]
    yield f"| s per round | {' | '.join(format(one['seconds_a_round'], '.3f') for one in grown)} |"
    yield f"| GPU memory, GiB | {' | '.join(format(one['peak_gib'], '.2f') for one in grown)} |"
    kernels = {name: Kernels.of(one) for name, one in measured("gpu/profiles").items()}
    svhn, cifar = kernels["svhn"], kernels["cifar10"]
    yield f"is {svhn.launches:,} launches of {1e3 * svhn.total / svhn.launches:.0f} µs on average"
    own = sum(cifar.milliseconds(name) for name in CLIENTS_CONVOLUTIONS)
    yield (
        f"of {cifar.total:.0f} ms of kernel time, {cifar.milliseconds('_sgd'):.0f} are SGD and moving average"
    )
    yield f"{own:.0f} ms are the clients' own convolutions"
    switch, semifl = kernels["cifar10-fedswitch"], kernels["cifar10-semifl"]
    shares = [100 * one.milliseconds("_sgd") / one.total for one in (switch, semifl)]
    yield "is {:.0f} % of FedSwitch's and {:.0f} % of SemiFL's kernel time".format(*shares)
    shares = [
        kernels[name].share(kind)
        for kind in (CONVOLUTIONS, NORMALISATION)
        for name in ("stl10", "image100")
    ]
    yield "convolution alone is {:.0f} and {:.0f} % of the kernel time".format(*shares[:2])
    yield "BatchNorm with ReLU and pooling {:.0f} and {:.0f} %".format(*shares[2:])
    wide = kernels["cifar10-wrn-28-2"]
    yield f"{wide.share(CONVOLUTIONS):.0f} % are convolutions, most of them cuDNN's"
    yield f"in a round), {wide.share(NORMALISATION):.0f} % BatchNorm's passes"
    launches = [round(one.launches / 5000) * 5000 for one in (switch, semifl)]
    yield "the rest are {:,} and {:,} launches".format(*launches)


CLIENTS_CONVOLUTIONS = ("convolve", "to_input", "to_weight", "to_few_weights")
CONVOLUTIONS = rf"fprop|wgrad|dgrad| ({'|'.join(CLIENTS_CONVOLUTIONS)})$"
NORMALISATION = r" (moments|normalise|settle|settle_back|reduce|to_raw)$"


class Kernels(NamedTuple):
    """The kernels of a round as a profile lists them."""

    total: float
    """Milliseconds of all kernels."""
    launches: int
    lines: list[str]

    @classmethod
    def of(cls, profile: dict[str, Any]) -> "Kernels":
        first, *lines = profile["kernels"]
        seconds, *launches = re.findall(r"[\d.]+", first)
        return cls(1000 * float(seconds), int(launches[0]) if launches else 0, lines)

    def milliseconds(self, kernel: str) -> float:
        (line,) = (line for line in self.lines if line.split()[-1] == kernel)
        return float(line.split()[1])

    def share(self, kind: str) -> float:
        """Return the percentage of kernels whose line matches ``kind``."""
        lines = [line for line in self.lines if re.search(kind, line)]
        return 100 * sum(float(line.split()[1]) for line in lines) / self.total


def performance_cpu() -> Iterator[str]:
    start = measured("cpu/first_round")
    yield f"its first round {start['first_round_seconds']:.1f} s after its start"
    yield f"{start['import_torch_seconds']:.1f} s of which PyTorch takes to load"
    rounds = [row for name in ("supervised", "semisfl") for row in run(f"demo/{name}-seed0").rounds]
    yield f"trains for {sum(row.seconds or 0 for row in rounds):.0f} s on two cores"
    work = {
        name: steps for name, steps in measured("cpu/flower").items() if isinstance(steps, dict)
    }
    apart = sorted(
        100 * (one[f"{engine}_seconds"] / one[f"{engine}_fastest_seconds"] - 1)
        for steps in work.values()
        for one in steps.values()
        for engine in ("ours", "flower")
    )
    yield f"lie up to {apart[-2]:.0f} % apart ({apart[-1]:.0f} % in Flower's shortest rounds"
    every = [one for steps in work.values() for one in steps.values()]
    yield f"weights by up to {max(one['largest_change'] for one in every):.2f}, and both"
    yield f"same ones to {max(one['largest_difference'] for one in every):.1e}".replace(
        "e-07", "e-7"
    )
    small, large = work["one convolution, batch 10"], work["the digits' CNN, batch 32"]["steps=10"]
    first = small["steps=1"]
    yield f"{first['ours_seconds']:.2f} s here and {first['flower_seconds']:.1f} s in Flower"
    speed = measured("cpu/flower")["matmul_gflop_per_second"]
    yield f"is {large['gflop_a_round']:.0f} GFLOP, which takes {large['gflop_a_round'] / speed:.2f} s"
    yield f"the {speed} GFLOP/s that"
    yield f"a third of Flower's time is {large['flower_seconds'] / 3:.2f} s"
    ours, theirs = (
        1000 * (small["steps=50"][f"{engine}_seconds"] - small["steps=10"][f"{engine}_seconds"])
        for engine in ("ours", "flower")
    )
    yield f"each adds {ours / 40:.1f} ms to a round here and {theirs / 40:.1f} ms in Flower"


def results() -> Iterator[str]:
    late = [row.accuracy or 0 for row in run("paper/svhn-supervised").tested if row.round >= 500]
    yield f"seed 0 is between {min(late):.1f} and {max(late):.1f} in its last 500 rounds"
    yield f"the same run reaches {accuracy('paper/svhn-supervised-no-flip')}"
    semifl = run("baselines/semifl-200-steps")
    yield (
        f"gives {accuracy('baselines/semifl-200-steps')} after {len(semifl.rounds)} rounds, "
        f"where the run of the table had {accuracy('paper/svhn-iid-semifl', 250)} after 250, with a rate that "
        f"falls more slowly, and ends at {accuracy('paper/svhn-iid-semifl')}"
    )
    original, heavy = (
        run(f"baselines/fedmatch-{name}").tested[-1] for name in ("original", "weights-0.1")
    )
    yield f"(`svhn+fedmatch_original`) has {original.test_accuracy:.1f}"
    yield f"`lambda_a` 0.1) {heavy.test_accuracy:.1f}"
    yield f"on which they have {original.accuracy:.1f} and {heavy.accuracy:.1f}"
    skews = ("dir1.0", "dir0.5", "dir0.1", "dir0.05")
    leads = [
        fmean(accuracies(every_seed(f"paper/cifar10-{kind}-semisfl")))
        - accuracies([run(f"paper/cifar10-{kind}-fedswitch-sl")])[0]
        for kind in skews
    ]
    yield "SemiSFL leads it by {:.1f}, {:.1f}, {:.1f} and {:.1f} points".format(*leads)
    uncut = [
        float(accuracy(f"paper/cifar10-{kind}-fedswitch"))
        - float(accuracy(f"paper/cifar10-{kind}-fedswitch-sl"))
        for kind in skews
    ]
    yield "FedSwitch has {:+.1f}, {:+.1f}, {:+.1f} and {:+.1f} points against FedSwitch-SL".format(
        *uncut
    )
    yield f"labels alone ({accuracy('paper/cifar10-supervised')})"
    semifl, skewed, iid = (
        [row.accuracy or 0 for row in run(f"paper/cifar10-{name}").tested if row.round >= 500]
        for name in ("dir0.1-semifl", "dir0.1-fedmatch", "iid-fedmatch")
    )
    yield f"between {min(semifl):.1f} and {max(semifl):.1f}, and between {min(skewed):.1f} and {max(skewed):.1f}"
    yield f"stays between {min(iid):.1f} and {max(iid):.1f}"
    twins = [accuracy(f"frozen/svhn-iid-semisfl{again}") for again in ("", "-again")]
    yield f"SVHN IID with frozen teachers is {twins[0]} (`frozen/svhn-iid-semisfl`)"
    yield f"and {twins[1]} (`frozen/svhn-iid-semisfl-again`)"


def results_more() -> Iterator[str]:
    confident = {
        name: 100 * (1 - (run(f"compare/{name}").rounds[-1].mask_rate or 0))
        for name in ("semifl", "semisfl", "fedswitch")
    }
    yield (
        f"find {confident['semifl']:.0f} % of their images confident in the last round "
        f"(SemiSFL {confident['semisfl']:.0f} %, FedSwitch {confident['fedswitch']:.0f} %)"
    )
    short = {
        (data, method): accuracies(runs(f"short/{data}-{method}"))
        for data in ("cifar10", "svhn")
        for method in ("semisfl", "fedswitch", "fedswitch-sl")
    }
    best = {
        data: max(fmean(short[data, method]) for method in ("fedswitch", "fedswitch-sl"))
        for data in ("cifar10", "svhn")
    }
    yield f"ahead on CIFAR-10 by {fmean(short['cifar10', 'semisfl']) - best['cifar10']:.1f} points"
    yield f"On SVHN it is ahead by {fmean(short['svhn', 'semisfl']) - best['svhn']:.1f}, two"
    for ours, *theirs in zip(
        *(short["svhn", method] for method in ("semisfl", "fedswitch", "fedswitch-sl")), strict=True
    ):
        assert ours > max(theirs) + 1
    yield "and with every seed by more than one point"
    sent = {
        method: summed(runs(f"short/cifar10-{method}"), 75).to_target.bytes
        for method in ("semisfl", "fedswitch-sl", "fedswitch")
    }
    shares = {
        f"{100 * sent[method] / sent['fedswitch']:.0f}" for method in ("semisfl", "fedswitch-sl")
    }
    yield f"reach 75 % with {shares.pop()} % of FedSwitch's traffic"
    assert not shares
    hours = {method: virtual_hours(f"short/cifar10-{method}", 75) for method in sent}
    times = sorted(
        100 * hours[method] / hours["fedswitch"] for method in ("semisfl", "fedswitch-sl")
    )
    yield "and in {:.0f} to {:.0f} % of its time".format(*times)


def virtual_hours(name: str, target: float) -> float:
    """Return the mean of three seeds' virtual hours to a target, over the paper's connections."""
    moved = [replayed(one).as_run() for one in runs(name)]
    return summed(moved, target).to_target.seconds / 3600


def models() -> Iterator[str]:
    taught = run("weights/90-classes").tested[-1].test_accuracy
    yield f"at 32 × 32 pixels ({taught:.1f} % of their test images right)"
    for name, words in (("resnet18", "million parameters"), ("wrn-28-2", "million)")):
        (model,) = (one for one in _models() if one["name"] == name)
        yield f"{(model['bottom'] + model['top']) / 1e6:.2f} {words}"


def own_images_choice() -> Iterator[str]:
    chosen = own_images.read("choice")
    ours = chosen["semisfl", "mixed"]

    def ahead(of: Any, than: Any) -> dict[str, float]:
        means = [
            {task: fmean(own_images.validation(runs)) for task, runs in one.items()}
            for one in (of, than)
        ]
        return {task: means[0][task] - means[1][task] for task in means[1]}

    same, strong = (ahead(ours, chosen["fedswitch-sl", view]) for view in ("mixed", "strong"))
    assert min(same.values()) > 0
    yield f"on all ten tasks, by {fmean(same.values()):.1f} points on average"
    yield f"with strong views by {fmean(strong.values()):.1f}."
    close = [f"{points:.1f}" for points in sorted(strong.values()) if points < 2]
    yield f"{' and '.join(close)} on the digits (strong views)"
    close = [
        f"{same[task]:.1f} on `{task}`"
        for task in sorted(same, key=same.__getitem__)
        if same[task] < 2
    ]
    yield f"with the same views {', '.join(close)}."
    parts, mixed = own_images.read("parts"), own_images.read("mixed")
    terms = ahead(parts["semisfl", "images"], parts["semisfl", "no-clustering"])
    yield f"The contrastive terms bring {fmean(terms.values()):.2f} points on average here"
    terms = ahead(mixed["semisfl", "lr4-t8"], mixed["semisfl", "plain"])
    yield f"with 50 supervised steps they bring {fmean(terms.values()):.1f} ("

    lower = own_images.read("threshold")
    by_seed = {}
    for method in ("semisfl", "fedswitch-sl"):
        pairs = zip(
            *(
                [one["validation"][-1] for each in cells.values() for one in each]
                for cells in (lower[method, "t6"], chosen[method, "mixed"])
            ),
            strict=True,
        )
        by_seed[method] = Spread.of([one - other for one, other in pairs])
    yield "0.6 brings SemiSFL {} points and FedSwitch-SL {}:".format(*by_seed.values())

    preset_has, split = own_images.untuned(), own_images.read("untuned")
    full = own_images.read("untuned-full")
    for others, words in (
        ([preset_has, full], "ahead of the best of the others by {}, {}, {}, {} and {} points"),
        ([preset_has, full, split], "on these test images, it is ahead by {}, {}, {}, {} and {}"),
    ):
        leads = []
        for task in ("letters", "smile", "fruit", "deva", "sign"):
            theirs = [
                fmean(one["test"] for one in each[task])
                for cells in others
                for (method, _), each in cells.items()
                if method != "semisfl"
            ]
            reached = preset_has["semisfl", "mixed"][task]
            leads.append(fmean(one["test"] for one in reached) - max(theirs))
        yield words.format(*(f"{lead:.1f}" for lead in leads))


def own_images_page() -> Iterator[str]:
    cells = own_images.read("untuned-preset")
    ours = cells["semisfl", "mixed-by-classes"]
    same = cells["fedswitch-sl", "mixed-by-classes"]
    strong = cells["fedswitch-sl", "strong-by-classes"]

    def tests(runs: Sequence[dict[str, Any]]) -> dict[int, float]:
        return {one["seed"]: one["test"] for one in runs}

    leads = []
    for task in own_images.UNTUNED:
        reached, theirs = tests(ours[task]), tests(same[task])
        assert all(reached[seed] > theirs[seed] for seed in (0, 1, 2)) and len(theirs) == 3
        assert all(reached[seed] > value for seed, value in tests(strong[task]).items())
        leads.append(f"{fmean(reached.values()) - fmean(theirs.values()):.1f}")
        assert set(tests(strong[task])) == ({0, 1} if task == "letters" else {0})
    *most, last = leads
    yield f"by {', '.join(most)} and {last} points, and with each seed on each set."
    faces = tests(ours["smile"])[0], tests(strong["smile"])[0]
    yield "on `smile` with {:.1f} against {:.1f}".format(*faces)


def poisoning() -> Iterator[str]:
    by_attack: dict[str, dict[int, float]] = defaultdict(dict)
    for one in poisoning_tables.named("network"):
        if (one["method"], one["rule"], one["clients"], one["rounds"]) == (
            "semisfl",
            "serve",
            3,
            28,
        ):
            by_attack[one["attack"]][one["seed"]] = one["accuracy"]
    honest = by_attack["nobody"]
    lost = [honest[seed] - reached for seed, reached in sorted(by_attack["one_class"].items())]
    assert len(lost) == 9 and sum(points > 1 + 1e-9 for points in lost) == 4
    yield f"{min(lost):.1f} to {max(lost):.1f} points, in four of nine more than one"
    yield f"seeds of the other attacks it is {fmean(lost[:3]):.1f}."
    absent = poisoning_tables.points_lost(3)["absent"][poisoning_tables.SERVED]
    yield f"`absent` costs {poisoning_tables.spread(absent)} in"
    long = []
    for align in ("none", "client"):
        reached = {
            (one["attack"], one["seed"]): one["accuracy"]
            for one in poisoning_tables.named(f"long-{align}")
            if one["rule"] == poisoning_tables.SERVED
        }
        long.append([reached["nobody", seed] - reached["one_class", seed] for seed in range(3)])
    points, aligned = map(poisoning_tables.spread, long)
    yield f"the default {points} points against the same rule without attackers, and {aligned} with"


def paper_figures() -> Iterator[str]:
    begins, ends, last = (
        accuracy("paper/cifar10-iid-semisfl", after) for after in (400, 600, None)
    )
    yield f"{begins} when that begins, {ends} when it ends, and {last} at the end of the run"
    iid, skewed = (lowered(f"paper/cifar10-{kind}-semisfl") for kind in ("iid", "dir0.1"))
    yield f"100 supervised steps for the first {iid[0][0]} (IID) or {skewed[0][0]} (Dirichlet(0.1)) rounds"
    yield f"to its floor of {iid[-1][1]}, at rounds {iid[-1][0]} and {skewed[-1][0]}."


def lowered(name: str) -> list[tuple[int, int]]:
    """Return each round that begins with fewer supervised steps than the one before, and how many."""
    steps = [row.supervised_steps or 0 for row in run(name).rounds]
    return [
        (number, now) for number, (before, now) in enumerate(pairwise(steps), 1) if now < before
    ]


def paper_choices() -> Iterator[str]:
    skewed = [f"paper/cifar10-dir{alpha}-semisfl" for alpha in ("1.0", "0.1", "0.05")]
    none, linear, mlp = (
        fmean(accuracies([run(f"{name}{head}") for name in skewed]))
        for head in ("-head-none", "-head-linear", "")
    )
    yield f"is {none:.1f} without a head, {linear:.1f} with the linear one and {mlp:.1f} with the MLP."
    assert none < linear < mlp
    seeds = accuracies(every_seed(skewed[-1]))
    assert len(seeds) == 3
    yield f"the MLP's three seeds at Dir(0.05) alone are up to {max(seeds) - min(seeds):.1f} points apart"
    apart = []
    for name in ("svhn", "cifar10"):
        usual = fmean(accuracies(every_seed(f"paper/{name}-iid-semisfl")))
        others = [
            run(f"controller/{one['name']}")
            for one in records.entries("controller")
            if one["name"].startswith(name)
        ]
        cells = [usual, *accuracies(others)]
        apart.append(f"{max(cells) - min(cells):.1f}")
    yield f"all cells on SVHN lie within {apart[0]} points, and those run on CIFAR-10 with 4,000 labels within {apart[1]}."
    lowest = sorted(others, key=lambda one: accuracies([one])[0])[:2]
    assert {one.config["controller"]["min_steps_factor"] for one in lowest} == {12}
    assert max(accuracies(lowest)) < usual
    yield "There the two with β = 12, the highest floor of supervised steps, are the lowest."
    for kind in ("raw", "as-in-paper"):
        falls = lowered(f"paper/cifar10-250-semisfl-{kind}")
        assert falls[-1][0] - falls[0][0] < 9
        yield f"from 100 supervised steps to its floor of {falls[-1][1]} within nine rounds"
    slow = lowered("paper/cifar10-250-semisfl")
    begins, ends = (
        float(accuracy("paper/cifar10-250-semisfl", at[0])) for at in (slow[0], slow[-1])
    )
    yield (
        f"goes from 100 at round {slow[0][0]} to {slow[-1][1]} at round {slow[-1][0]} and gains {ends - begins:.0f} points"
    )
    raw, paper, usual = (
        lowered(f"paper/cifar10-dir0.05-semisfl{kind}")[0][0]
        for kind in ("-raw", "-as-in-paper", "")
    )
    yield f"decides late (first at round {raw}, and {paper} in `as_in_paper`)"
    yield f"while the default lowers the supervised steps at round {usual}."
    tried = own_images.read("strong")
    averaged, frozen = (
        own_images.averaged(tried["semisfl", name]) for name in ("lr4", "lr4-frozen")
    )
    yield f"({averaged:.1f} averaged, {frozen:.1f} frozen:"


def frontier() -> Iterator[str]:
    names = ("mixed", "mixed-t0.8", "mixed-t0.5", "mixed-t0.65-global")
    pairs = [numbered(f"paper/cifar10-250-semisfl-{name}", 2) for name in names]
    tests = [
        [one.tested[-1].test_accuracy or accuracies([one])[0] for one in pair] for pair in pairs
    ]
    apart = sorted(abs(first - second) for first, second in tests)
    yield f"over 1,000 rounds seeds 0 and 1 differ by {apart[0]:.1f} to {apart[-1]:.1f} points"
    skewed = fmean(accuracies(every_seed("frontier/cifar10-dir0.1")))
    yield f"Dirichlet(0.1) is {skewed:.2f}, {86 - skewed:.2f} below its aim"
    extreme = fmean(accuracies(every_seed("frontier/cifar10-dir0.05")))
    assert extreme > 84.5
    yield f"Dirichlet(0.05) it is {extreme:.1f}, above its aim"
    sent = frontier_tables.gigabytes_until_80(numbered("frontier/cifar10-iid-to-80", 3))
    assert all(one and one <= 30 for one in sent)
    yield "Every seed reaches the aim for gigabytes."
    aligned = accuracies(numbered("paper/cifar10-250-semisfl-mixed-t0.65-global", 3))
    usual = accuracies([run("paper/cifar10-250-semisfl")])[0]
    yield f"with 250 labels it is {fmean(aligned):.1f}, above the paper's number and {85 - fmean(aligned):.1f} points below"
    yield f"ends at {aligned[0]:.1f}, {aligned[1]:.1f} and {aligned[2]:.1f} (seeds 0, 1 and 2)"
    yield f"{fmean(aligned):.1f} on average, and {aligned[0] - usual:.1f} above the preset with seed 0"
    fixed = run("frontier/cifar10-250-fixed").tested[-1]
    yield f"which ends at {fixed.accuracy:.1f} with as many supervised steps to the end"
    yield f"the student ends above it ({fixed.accuracies['student']:.1f})"
    plain, align, average = (
        accuracies(numbered(f"frontier/digits/{name}", 3))
        for name in ("plain", "align-client", "teacher-ema")
    )
    gains = [one - other for one, other in zip(align, plain, strict=True)]
    assert min(gains) > 0
    yield f"Alignment is worth {fmean(gains):.1f} points on validation, each seed agreeing"
    yield f"the teacher's average {fmean(average) - fmean(plain):.1f}; four bits"
    soft = sorted(
        100 * (1 - (one.rounds[299].mask_rate or 0))
        for one in numbered("paper/cifar10-250-semisfl-mixed", 2)
    )
    yield f"after 300 rounds only {soft[0]:.0f} to {soft[-1]:.0f} % of the images reach"
    lasting = [fmean(one) for one in tests]
    yield f"it ends at {lasting[1]:.1f} on average over two seeds, with 0.8 and with 0.5"
    yield f"after 1,000 it is {lasting[3] - lasting[2]:.1f} ahead of 0.8 and of 0.5 alone"
    short = {
        name: accuracies([run(f"frontier/250-labels/mixed-t0.65{name}-300")])[0]
        for name in ("", "-global", "-fixed", "-period15", "-lrmin")
    }
    yield f"it is {short['-global'] - short['']:.1f} points ahead of 0.65 alone after 300 rounds"
    yield f"to the end cost {short[''] - short['-fixed']:.1f} points over 300 rounds"
    yield f"a decay twice as fast {short[''] - short['-period15']:.1f}."
    yield f"last learning rate costs {short[''] - short['-lrmin']:.1f}."
    tried: dict[str, list[float]] = defaultdict(list)
    for line in records.entries("tuning"):
        if (line["rate"], line["threshold"]) == (0.02, 0.95):
            tried[line["method"]].append(line["validation"][-1])
    ahead = {
        f"{fmean(tried[name]) - fmean(tried['semisfl']):.2f}"
        for name in ("fedswitch", "fedswitch-sl")
    }
    assert ahead == {"1.35"}
    yield "ahead of plain SemiSFL on these two seeds as well, by 1.4 points on validation"
    settings: dict[tuple[str, float, float], list[Any]] = defaultdict(list)
    for line in records.entries("tuning"):
        settings[line["method"], line["rate"], line["threshold"]].append(line)
    best = {
        name: max(
            (fmean(one["validation"][-1] for one in pair), fmean(one["test"] for one in pair))
            for (method, *_), pair in settings.items()
            if method == name
        )
        for name in ("fedswitch-sl", "semisfl")
    }
    gains = [one - other for one, other in zip(*best.values(), strict=True)]
    yield "plain SemiSFL on the digits**, by {:.1f} points on validation and {:.1f} on test".format(
        *gains
    )
    better = [
        theirs > ours
        for labels in (10, 20, 40, 100)
        for theirs, ours in zip(
            *(
                accuracies(numbered(f"few-labels/{name}-data.labeled-{labels}", 5))
                for name in ("frontier", "semisfl")
            ),
            strict=True,
        )
    ]
    yield f"ahead of SemiSFL with {sum(better)} of the {len(better)} pairs"


def security() -> Iterator[str]:
    noticed = attempts = 0
    for fleet in (3, 5, 10):
        for one in poisoning_tables.named(f"digits-{fleet}"):
            known = one["attack"] in ("copied_features", "backdoor")
            if known and one["rule"] == "clipped_mean+limited":
                noticed += sum(one["held_back"].get(str(client), 0) for client in one["attackers"])
                attempts += 8 * len(one["attackers"])
    yield f"a backdoor are rarely detected ({100 * noticed / attempts:.0f} % of rounds)"


CLAIMS = {
    "README.md": readme,
    "docs/tutorial.md": tutorial,
    "docs/methods.md": methods,
    "docs/faults.md": faults,
    "docs/costs.md": costs,
    "docs/performance.md": performance,
    "reproduction/pages/performance-cpu.md": performance_cpu,
    "reproduction/pages/results.md": results,
    "reproduction/pages/results-more.md": results_more,
    "reproduction/pages/paper-choices.md": paper_choices,
    "reproduction/pages/paper-figures.md": paper_figures,
    "docs/models.md": models,
    "docs/own-images.md": own_images_page,
    "reproduction/pages/own-images-choice.md": own_images_choice,
    "reproduction/pages/poisoning.md": poisoning,
    "reproduction/pages/frontier.md": frontier,
    "docs/security.md": security,
}


@pytest.mark.parametrize("name", CLAIMS)
def test_a_page_quotes_the_records(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for claim in CLAIMS[name]():
        assert claim in page(name), claim
