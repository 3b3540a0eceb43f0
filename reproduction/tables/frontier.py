"""The tables about the variant ``frontier`` and about few labels."""

from collections import defaultdict
from statistics import fmean
from typing import Any

from reproduction.paper.measures import replayed
from reproduction.records import entries, run
from reproduction.tables.numbers import (
    METHODS,
    UNKNOWN,
    accuracies,
    called,
    cost_of,
    each,
    every_seed,
    known,
    numbered,
    on_test,
    percent,
    runs,
    sent,
    summed,
    table,
)
from semisfl.runs.report import Run, Spread


def frontier() -> str:
    """Return the variant beside the paper and SemiSFL, each seed by itself."""
    skewed, more_skewed = "paper/cifar10-dir0.1-semisfl", "paper/cifar10-dir0.05-semisfl"
    few, mixed = "paper/cifar10-250-semisfl", "paper/cifar10-250-semisfl-mixed-t0.65-global"
    places = (
        ("Dirichlet(0.1), 4,000 labels", 83.8, skewed, "frontier/cifar10-dir0.1", 86.0),
        ("Dirichlet(0.05), 4,000 labels", 82.3, more_skewed, "frontier/cifar10-dir0.05", 84.5),
        ("IID, 250 labels", 82.9, few, mixed, 85.0),
    )
    lines = []
    for title, paper, plain, variant, aim in places:
        ours = every_seed(plain)
        theirs = numbered(variant, 3) if variant == mixed else every_seed(variant)
        numbers = (each(accuracies(ours)), sent(ours), f"**{each(accuracies(theirs))}**")
        lines.append((title, str(paper), *numbers, sent(theirs), str(aim)))
    until = [
        gigabytes_until_80(members)
        for members in (
            every_seed("paper/cifar10-iid-semisfl"),
            numbered("frontier/cifar10-iid-to-80", 3),
        )
    ]
    numbers = (each(until[0], 0), "", f"**{each(until[1])}**")
    lines.append(("GB sent until 80 %, IID, 4,000 labels", "182", *numbers, "", "30"))
    return table(("", "the paper", "SemiSFL here", "GB", "`frontier`", "GB", "aim"), lines)


def gigabytes_until_80(members: list[Run]) -> list[float | None]:
    """Return what each run sent until 80 %."""
    costs = [cost_of([one], 80).bytes for one in members]
    return [cost and cost / 1e9 for cost in costs]


def frontier_labels() -> str:
    """Return how many labels are wrong and missing at the end, and what 83.5 % took, each seed by itself."""
    lines = []
    for title, name in (
        ("SemiSFL", "paper/cifar10-dir0.1-semisfl"),
        ("`frontier`", "frontier/cifar10-dir0.1"),
    ):
        for seed, one in enumerate(every_seed(name)):
            end, cost = one.rounds[-1], cost_of([one], 83.5)
            reached = (known(cost.rounds, 0), known(cost.bytes, 0, 1e9))
            lines.append(
                (f"{title}, seed {seed}", percent(end.impurity), percent(end.mask_rate), *reached)
            )
    head = ("", "labels in use that are wrong", "images without a label", "rounds to 83.5 %", "GB")
    return table(head, lines)


def frontier_cost() -> str:
    """Return accuracy, bytes and virtual hours, and what 77 % took."""
    groups = {"SemiSFL, `frontier`": every_seed("frontier/cifar10-dir0.1")}
    groups |= {"SemiSFL": every_seed("paper/cifar10-dir0.1-semisfl")}
    groups |= {
        called(method): runs(f"short/cifar10-{method}")
        for method in ("fedswitch-sl", "fedswitch", "semifl", "fedmatch", "supervised")
    }
    lines = []
    for title, members in groups.items():
        moved = [replayed(one).as_run() for one in members]
        total, cost = summed(moved), cost_of(moved, 77)
        lines.append(
            (
                *(title, str(len(members)), f"{total.rounds:,}", str(total.accuracy)),
                *(sent(members), known(total.seconds, 1, 3600)),
                *(f"{cost.reached} of {len(members)}", known(cost.rounds, 0)),
                *(known(cost.bytes, 1, 1e9), known(cost.seconds, 1, 3600)),
            )
        )
    head = ("", "seeds", "rounds", "accuracy %", "GB", "virtual hours")
    return table((*head, "reach 77 %", "after rounds", "GB", "virtual hours"), lines)


PARTS = {
    "plain": "SemiSFL, the preset",
    "align-client": '`semisfl.align = "client"`',
    "teacher-ema": "clients average their teachers",
    "int4": "int4, models int8",
    "both-views": '`server.labeled_view = "both"`',
    "together": "together",
}


def frontier_parts() -> str:
    """Return what each part of the variant is worth on the digits."""
    lines = []
    for name, words in PARTS.items():
        members = numbered(f"frontier/digits/{name}", 3)
        numbers = (str(Spread.of(accuracies(members))), str(Spread.of(on_test(members))))
        lines.append((words, *numbers, sent(members, 1e6)))
    return table(("", "validation %", "test %", "MB sent"), lines)


BOTH_VIEWS = '`server.labeled_view = "both"`'
MIXED = '`server.labeled_view = "mixed"`'
THRESHOLD = "`semisfl.confidence_threshold ="
GLOBAL = '`semisfl.align = "global"`'
FEW = {
    "plain": "SemiSFL",
    "both-views": BOTH_VIEWS,
    "align-global": GLOBAL,
    "rate-5": "`optimizer.lr = 0.05`",
    "fewer-steps": "32 supervised steps per round, always",
}
FEW_MIDDLE = {
    "plain-300": "SemiSFL",
    "both-views-300": BOTH_VIEWS,
    "both-views-t0.65-300": f"{BOTH_VIEWS} and {THRESHOLD} 0.65`",
    "mixed-300": f"{MIXED} and {THRESHOLD} 0.8`",
    "mixed-t0.65-300": f"{MIXED} and {THRESHOLD} 0.65`",
    "mixed-t0.5-300": f"{MIXED} and {THRESHOLD} 0.5`",
    "mixed-t0.65-global-300": f"{MIXED}, {THRESHOLD} 0.65` and {GLOBAL}",
    "mixed-t0.65-fixed-300": f'{MIXED}, {THRESHOLD} 0.65` and `controller.kind = "fixed"`',
    "mixed-t0.65-period15-300": f"{MIXED}, {THRESHOLD} 0.65` and `controller.period = 15`",
    "mixed-t0.65-lrmin-300": f"{MIXED}, {THRESHOLD} 0.65` and `optimizer.lr_min = 0.0005`",
}


def few(names: dict[str, str]) -> str:
    """Return what was tried with 250 labels over fewer rounds than the paper's."""
    lines = []
    for name, words in names.items():
        one = run(f"frontier/250-labels/{name}")
        end = one.rounds[-1]
        numbers = (each(accuracies([one])), each(on_test([one])))
        lines.append((words, *numbers, percent(end.impurity), percent(end.mask_rate)))
    head = ("", "validation %", "test %", "labels wrong", "images without a label")
    return table(head, lines)


FEW_LONG = {
    "SemiSFL, the preset": ["paper/cifar10-250-semisfl"],
    "– with frozen teachers": ["frozen/cifar10-250-semisfl"],
    '`frontier` with `controller.kind = "fixed"`': ["frontier/cifar10-250-fixed"],
    "both views, four bits, frozen teachers, `controller.min_steps_factor = 64`": [
        "frontier/cifar10-250-both-views"
    ],
    'the preset with `controller.kind = "raw"`': ["paper/cifar10-250-semisfl-raw"],
    f"the preset with {MIXED}": [f"paper/cifar10-250-semisfl-mixed-seed{seed}" for seed in (0, 1)],
    **{
        f"the preset with {MIXED} and {THRESHOLD} {threshold}`": [
            f"paper/cifar10-250-semisfl-mixed-t{threshold}-seed{seed}" for seed in (0, 1)
        ]
        for threshold in (0.8, 0.5)
    },
    f"the preset with {MIXED}, {THRESHOLD} 0.65` and {GLOBAL}": [
        f"paper/cifar10-250-semisfl-mixed-t0.65-global-seed{seed}" for seed in (0, 1, 2)
    ],
    f'the preset with {MIXED} and `semisfl.align = "client"`': [
        "paper/cifar10-250-semisfl-mixed-align-seed0"
    ],
}


def few_long() -> str:
    """Return what was tried with 250 labels over 1,000 rounds, each seed by itself."""
    lines = []
    for words, names in FEW_LONG.items():
        members = [run(name) for name in names]
        ends = [one.tested[-1] for one in members]
        tests = each(
            end.accuracy if end.test_accuracy is None else end.test_accuracy for end in ends
        )
        steps = [members[0].rounds[place - 1].supervised_steps for place in (300, 500, 1000)]
        wrong = ", ".join(percent(end.impurity) for end in ends)
        unlabelled = ", ".join(percent(end.mask_rate) for end in ends)
        lines.append((words, tests, ", ".join(map(str, steps)), wrong, unlabelled))
    head = ("", "test %", "supervised steps in round 300, 500, 1,000")
    return table((*head, "labels wrong", "images without a label"), lines)


def few_labels() -> str:
    """Return the digits by number of labels, over five seeds."""
    lines = []
    for name in ("frontier", *METHODS):
        by_labels = {
            labels: numbered(f"few-labels/{name}-data.labeled-{labels}", 5)
            for labels in (10, 20, 40, 100)
        }
        title = "SemiSFL, `frontier`" if name == "frontier" else called(name)
        cells = [str(Spread.of(accuracies(some))) for some in by_labels.values()]
        lines.append((title, sent(by_labels[40], 1e6), *cells))
    return table(("", "MB sent", "10 labels", "20", "40", "100"), lines)


def tuning() -> str:
    """Return each method's best rate and threshold by validation accuracy."""
    lines = []
    for name in ("frontier", *METHODS):
        points: dict[tuple[float, float], list[dict[str, Any]]] = defaultdict(list)
        for one in entries("tuning"):
            if one["method"] == name:
                points[one["rate"], one["threshold"]].append(one)
        reached = {
            point: fmean(one["validation"][-1] for one in members)
            for point, members in points.items()
        }
        best = max(reached, key=lambda point: reached[point])
        rates = sorted(rate for rate, _ in reached)
        tests = [each(one["test"] for one in points[point]) for point in (best, (0.02, 0.95))]
        title = "SemiSFL, `frontier`" if name == "frontier" else called(name)
        threshold = UNKNOWN if name == "supervised" else str(best[1])
        numbers = (str(best[0]), threshold, f"{reached[best]:.1f}", *tests)
        lines.append((reached[best], (title, *numbers, f"{rates[0]} to {rates[-1]}")))
    head = ("", "learning rate", "threshold", "validation %", "test %, seeds 0 and 1")
    more = ("test % as in the preset (0.02, 0.95)", "rates tried")
    return table((*head, *more), [line for _, line in sorted(lines, reverse=True)])


TABLES = {
    "frontier": frontier,
    "frontier-labels": frontier_labels,
    "frontier-cost": frontier_cost,
    "frontier-parts": frontier_parts,
    "few-short": lambda: few(FEW),
    "few-middle": lambda: few(FEW_MIDDLE),
    "few-long": few_long,
    "few-labels": few_labels,
    "tuning": tuning,
}
