"""Tables that people wrote by hand into the pages for users have the numbers of the records.

`make results` writes all other tables, and test_document.py holds those.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from reproduction import records
from reproduction.paper.measures import paper_world
from reproduction.records import measured, run
from reproduction.tables.numbers import accuracies, every_seed
from reproduction.tables.photos import evidence
from semisfl.costs.plan import make
from semisfl.costs.rounds import ImageFacts
from semisfl.runs.report import Spread
from semisfl.settings.catalog import DATA
from semisfl.settings.presets import preset

ROOT = Path(__file__).parents[2]
SIMULATED = "tutorial/semisfl"


def accuracy(name: str) -> str:
    """Return a run's accuracy after its last round."""
    return f"{run(name).accuracy:.1f}"


def on_test(name: str) -> str:
    """Return a run's accuracy on the test images, which it read once."""
    return f"{run(name).rounds[-1].test_accuracy:.1f}"


def tutorial() -> Iterator[str]:
    probe, supervised, semisfl = map(on_test, ("tutorial/probe", "tutorial/supervised", SIMULATED))
    yield f"right for {probe} %, Supervised-only for {supervised} and SemiSFL for {semisfl},"
    yield f"sent {run(SIMULATED).rounds[-1].bytes_total / 1e6:.1f} MB"


def readme() -> Iterator[str]:
    means, gigabytes = (re.findall(r"[\d.]+", row) for row in evidence("10").splitlines()[-2:])
    yield f"the last layer, labels alone | {means[0]} | 0 |"
    yield f"all layers above the cut, labels alone | {means[1]} | 0 |"
    yield f"photographs | **{means[3]}** | {1000 * float(gigabytes[3]):.0f} MB, once |"
    yield f"all layers trained | {means[4]} (1 seed) | {float(gigabytes[4]):.1f} GB |"
    yield f"(preset `images`) | {means[5]} (1 seed) | {gigabytes[5]} GB |"
    yield (
        f"SemiSFL reaches {accuracy('demo/semisfl-seed0')} % from random weights, labels alone "
        f"{accuracy('demo/supervised-seed0')}."
    )
    iid, skewed = (
        fmean(accuracies(every_seed(f"paper/cifar10-{kind}-semisfl"))) for kind in ("iid", "dir0.1")
    )
    yield f"reaches {iid:.1f} % (IID) and {skewed:.1f} % (Dirichlet 0.1) after 1,000 rounds"
    frontier = fmean(accuracies(every_seed("frontier/cifar10-dir0.1")))
    yield f"go beyond the paper: {frontier:.1f} % (Dirichlet 0.1)"


def methods() -> Iterator[str]:
    weights = [accuracy(f"fedmatch/{name}") for name in ("0.1", "0.03", "0.01", "supervised")]
    yield f"| CIFAR-10, CNN | {' | '.join(weights)} |"
    for mean_over, shown in (
        ("batch", "the batch (default) | 1"),
        ("confident", "the confident images | 0.01"),
    ):
        both = [accuracy(f"fedmatch/digits-{mean_over}-seed{seed}") for seed in range(2)]
        yield f"| {shown} | {' | '.join(both)} |"


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
    by_wire: dict[str, list[Any]] = defaultdict(list)
    for line in records.entries("savings"):
        by_wire[line["variant"]].append(line)
    whole = fmean(line["bytes_total"] for line in by_wire["fp32"])
    for wire, lines in by_wire.items():
        sent = fmean(line["bytes_total"] for line in lines)
        score = Spread.of([line["accuracy"] for line in lines])
        yield f"| {wire} | {len(lines)} | {score} | {sent / 1e6:.1f} | {100 * sent / whole:.1f} % |"


def virtual_clock() -> Iterator[str]:
    rounds = measured("cpu/virtual_clock")["rounds"]
    for title, (first, second) in {"SemiSFL": rounds[:2], "FedSwitch": rounds[2:]}.items():
        yield (
            f"| {title}, rounds 2 and 3 | {first['measured']:.2f}, {second['measured']:.2f} | {first['virtual']:.2f} "
            f"| {100 * first['error']:+.1f} %, {100 * second['error']:+.1f} % |"
        )


def growth() -> Iterator[str]:
    grown = measured("gpu/bench")["growth"]
    yield f"| s per round | {' | '.join(format(one['seconds_a_round'], '.3f') for one in grown)} |"
    yield f"| GPU memory, GiB | {' | '.join(format(one['peak_gib'], '.2f') for one in grown)} |"


CLAIMS = {
    "README.md": readme,
    "docs/tutorial.md": tutorial,
    "docs/costs.md": costs,
    "reproduction/pages/results-more.md": methods,
    "reproduction/pages/performance-cpu.md": virtual_clock,
    "reproduction/pages/performance-gpu.md": growth,
}


@pytest.mark.parametrize("name", CLAIMS)
def test_a_page_quotes_the_records(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8").replace("−", "-")
    words = re.sub(r"\s+", " ", text)
    for claim in CLAIMS[name]():
        assert claim in words, claim
