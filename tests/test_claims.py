"""Numbers that the pages quote in sentences and in tables of their own are those of the records in results/.

`make results` writes the other tables, and tests/paper/test_document.py holds those.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from benchmarks import records
from benchmarks.records import accuracies, numbered, run, runs
from semisfl.cli.look import _models
from semisfl.runs.report import Spread

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"


@cache
def page(name: str) -> str:
    """Return a page with one space where lines break, and minus signs as Python writes them."""
    text = (ROOT / name).read_text(encoding="utf-8").replace("−", "-")
    return re.sub(r"\s+", " ", text)


def read(name: str) -> Any:
    text = (RESULTS / name).read_text(encoding="utf-8")
    return list(map(json.loads, text.splitlines())) if name.endswith("jsonl") else json.loads(text)


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
    iid, skewed = (accuracy(f"h200/cifar10-{kind}-semisfl") for kind in ("iid", "dir0.1"))
    yield f"reaches {iid} % (IID) and {skewed} % (Dirichlet 0.1) after 1,000 rounds"
    frontier = fmean(accuracies(runs("frontier/cifar10-dir0.1", records.SEEDS[:2])))
    yield f"go beyond the paper: {frontier:.1f} % (Dirichlet 0.1)"


def tutorial() -> Iterator[str]:
    tests = [
        run(f"tutorial/{name}").tested[-1].test_accuracy for name in ("simulated", "labels-only")
    ]
    yield "give {:.1f} % of the test images, and labels alone {:.1f} %".format(*tests)


def methods() -> Iterator[str]:
    weights = [accuracy(f"fedmatch/{name}") for name in ("0.1", "0.03", "0.01", "supervised")]
    yield f"| CIFAR-10, CNN | {' | '.join(weights)} |"
    forty = {name: numbered(f"few-labels/{name}-data.labeled-40", 5) for name in records.METHODS}
    yield f"{spread(forty['semifl'])} against {spread(forty['supervised'])}"
    yield f"**(FL)² does not** either: {spread(forty['fl2'])}"
    last = [one.rounds[-1] for one in forty["fl2"]]
    kept = sorted(100 * (1 - (row.mask_rate or 0)) for row in last)
    wrong = sorted(100 * (row.impurity or 0) for row in last)
    yield f"keep {kept[0]:.0f} to {kept[-1]:.0f} % of the images, and {wrong[0]:.0f} to {wrong[-1]:.0f} %"


def faults() -> Iterator[str]:
    chaos = read("cpu/chaos.json")
    assert not chaos["wrong"]
    yield (
        f"did {chaos['rounds']} rounds through {sum(chaos['faults'].values())} faults, "
        f"{chaos['servers_started'] - 1} restarts of the server and {chaos['checkpoints_refused_by_the_disk']} checkpoints"
    )


def costs() -> Iterator[str]:
    rounds = read("cpu/virtual_clock.json")["rounds"]
    for title, (first, second) in {"SemiSFL": rounds[:2], "FedSwitch": rounds[2:]}.items():
        yield (
            f"| {title}, rounds 2 and 3 | {first['measured']:.2f}, {second['measured']:.2f} | {first['virtual']:.2f} "
            f"| {100 * first['error']:+.1f} %, {100 * second['error']:+.1f} % |"
        )
    by_wire: dict[str, list[Any]] = defaultdict(list)
    for line in read("savings/digits.jsonl"):
        by_wire[line["variant"]].append(line)
    whole = fmean(line["bytes_total"] for line in by_wire["fp32"])
    for wire, lines in by_wire.items():
        sent = fmean(line["bytes_total"] for line in lines)
        score = Spread.of([line["accuracy"] for line in lines])
        yield f"| {wire} | {len(lines)} | {score} | {sent / 1e6:.1f} | {100 * sent / whole:.1f} % |"


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


def performance_cpu() -> Iterator[str]:
    start = read("cpu/first_round.json")
    yield f"its first round {start['first_round_seconds']:.1f} s after its start"
    yield f"{start['import_torch_seconds']:.1f} s of which PyTorch takes to load"
    rounds = [row for name in ("supervised", "semisfl") for row in run(f"demo/{name}-seed0").rounds]
    yield f"trains for {sum(row.seconds or 0 for row in rounds):.0f} s on two cores"
    work = {
        name: steps for name, steps in read("cpu/flower.json").items() if isinstance(steps, dict)
    }
    apart = sorted(
        100 * (one[f"{engine}_seconds"] / one[f"{engine}_fastest_seconds"] - 1)
        for steps in work.values()
        for one in steps.values()
        for engine in ("ours", "flower")
    )
    yield f"lie up to {apart[-2]:.0f} % apart ({apart[-1]:.0f} % in Flower's shortest rounds"


def results() -> Iterator[str]:
    late = [row.accuracy or 0 for row in run("h200/svhn-supervised").tested if row.round >= 500]
    yield f"seed 0 is between {min(late):.1f} and {max(late):.1f} in its last 500 rounds"
    yield f"the same run reaches {accuracy('h200/svhn-supervised-no-flip')}"
    semifl = run("h200/svhn-baselines/semifl-200-steps")
    yield (
        f"gives {accuracy('h200/svhn-baselines/semifl-200-steps')} after {len(semifl.rounds)} rounds, "
        f"where the run of the table had {accuracy('h200/svhn-iid-semifl', 250)}"
    )
    original, heavy = (
        run(f"h200/svhn-baselines/fedmatch-{name}").tested[-1]
        for name in ("original", "weights-0.1")
    )
    yield f"(`svhn+fedmatch_original`) has {original.test_accuracy:.1f}"
    yield f"`lambda_a` 0.1) {heavy.test_accuracy:.1f}"
    yield f"on which they have {original.accuracy:.1f} and {heavy.accuracy:.1f}"
    seeds = {"dir1.0": 1, "dir0.5": 1, "dir0.1": 1, "dir0.05": 2}
    leads = [
        fmean(accuracies(runs(f"h200/cifar10-{kind}-semisfl", records.SEEDS[:count])))
        - accuracies([run(f"h200/cifar10-{kind}-fedswitch-sl")])[0]
        for kind, count in seeds.items()
    ]
    yield "SemiSFL leads it by {:.1f}, {:.1f}, {:.1f} and {:.1f} points".format(*leads)
    unfinished = "h200/unfinished/cifar10"
    tests = run(f"{unfinished}-dir0.1-semifl").tested
    late = [row.accuracy or 0 for row in tests if row.round >= 499]
    yield f"has {late[-1]:.1f} after {tests[-1].round + 1} rounds, and was between {min(late):.1f} and {max(late):.1f}"
    iid, skewed = (run(f"{unfinished}-{kind}-fedmatch").tested[-1] for kind in ("iid", "dir0.1"))
    yield f"FedMatch has {iid.accuracy:.1f} (IID, after {iid.round + 1} rounds"
    yield f"and {skewed.accuracy:.1f} (Dir(0.1), after {skewed.round + 1};"


def results_more() -> Iterator[str]:
    confident = {
        name: 100 * (1 - (run(f"h200/compare/{name}").rounds[-1].mask_rate or 0))
        for name in ("semifl", "semisfl", "fedswitch")
    }
    yield (
        f"find {confident['semifl']:.0f} % of their images confident in the last round "
        f"(SemiSFL {confident['semisfl']:.0f} %, FedSwitch {confident['fedswitch']:.0f} %)"
    )


def paper_figures() -> Iterator[str]:
    begins, ends, last = (accuracy("h200/cifar10-iid-semisfl", after) for after in (400, 600, None))
    yield f"{begins} when that begins, {ends} when it ends, and {last} at the end of the run"


def frontier() -> Iterator[str]:
    names = ("mixed", "mixed-t0.8", "mixed-t0.5", "mixed-t0.65-global")
    pairs = [numbered(f"h200/cifar10-250-semisfl-{name}", 2) for name in names]
    tests = [
        [one.tested[-1].test_accuracy or accuracies([one])[0] for one in pair] for pair in pairs
    ]
    apart = sorted(abs(first - second) for first, second in tests)
    yield f"over 1,000 rounds two seeds differ by {apart[0]:.1f} to {apart[-1]:.1f} points"


def leakage() -> Iterator[str]:
    planted, noisy, hijacked, honest = read("leakage/hijacking.jsonl")
    for attack in (planted, noisy):
        yield f"| {attack['ssim']:.2f} | {100 * attack['identified']:.0f} % of 300 | leaves none |"
    cosine = hijacked["alignment"]
    yield (
        f"| {hijacked['ssim']:.2f} | {100 * hijacked['identified']:.0f} % of 64 "
        f"| {cosine['least']:.2f} to {cosine['greatest']:.2f}, median {cosine['median']:.2f} |"
    )
    cosine = honest["alignment"]
    yield f"| {cosine['least']:.2f} to {cosine['greatest']:.2f}, median {cosine['median']:.2f} |"


CLAIMS = {
    "README.md": readme,
    "docs/tutorial.md": tutorial,
    "docs/methods.md": methods,
    "docs/faults.md": faults,
    "docs/costs.md": costs,
    "docs/performance.md": performance,
    "docs/performance-cpu.md": performance_cpu,
    "docs/results.md": results,
    "docs/results-more.md": results_more,
    "docs/paper-figures.md": paper_figures,
    "docs/frontier.md": frontier,
    "docs/leakage.md": leakage,
}


@pytest.mark.parametrize("name", CLAIMS)
def test_a_page_quotes_the_records(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for claim in CLAIMS[name]():
        assert claim in page(name), claim
