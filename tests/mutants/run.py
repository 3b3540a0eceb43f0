"""Applies each wrong change of the catalogue to a copy of the package and runs its tests there.

`make mutants` (or ``python -m tests.mutants.run``). A change that its tests do not notice has
survived; unless the catalogue explains it as equivalent, the exit status is 1. Outcomes are kept
in ``.mutants/``, so that a run that was interrupted goes on where it stopped; a change is tried
again when its entry, the file it changes or its tests' files change, or with ``--fresh``.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, which `trial` does

from tests.mutants.catalogue import ROOT, Wrong, read
from tests.mutants.trial import Outcome, Trial, make_tree

OUTCOMES = ROOT / ".mutants" / "outcomes.json"
SECONDS = 300.0
"""A change that keeps its tests busy for longer was noticed: without it they take seconds."""


def side_by_side(
    tasks: list[tuple[Wrong | None, tuple[str, ...]]],
    trees: list[Path],
    seconds: float = SECONDS,
) -> Iterator[tuple[int, Outcome]]:
    """Runs the tests of each task with its change, if any; yields its number when it is done."""
    waiting, free, running = list(enumerate(tasks)), list(trees), dict[int, Trial]()
    try:
        while waiting or running:
            while waiting and free:
                number, (wrong, tests) = waiting.pop(0)
                tree = free.pop()
                if wrong is not None:
                    wrong.write(tree)
                running[number] = Trial(tree, tests, seconds)
            time.sleep(0.05)
            for number, trial in list(running.items()):
                if (outcome := trial.outcome()) is not None:
                    free.append(running.pop(number).tree)
                    if (wrong := tasks[number][0]) is not None:
                        wrong.undo(trial.tree)
                    yield number, outcome
    finally:
        for trial in running.values():
            trial.end()


def check_unchanged(entries: list[Wrong], trees: list[Path]) -> None:
    """Without a change every test passes; else what fails with one would say nothing."""
    tests = sorted({test for wrong in entries for test in wrong.tests})
    parts = [tuple(tests[number :: len(trees)]) for number in range(min(len(trees), len(tests)))]
    for _, outcome in side_by_side([(None, part) for part in parts], trees, seconds=3600):
        if outcome.name != "survived":
            raise SystemExit(f"the tests fail without any change, fix them first: {outcome.detail}")


def summary(outcomes: dict[Wrong, Outcome], seconds: float) -> int:
    """Prints it; the exit status."""
    for area in sorted({wrong.area for wrong in outcomes}):
        counts = Counter(outcome.name for wrong, outcome in outcomes.items() if wrong.area == area)
        print(f"{area:12}", ", ".join(f"{count} {name}" for name, count in sorted(counts.items())))
    bad = 0
    for wrong, outcome in outcomes.items():
        if outcome.name == "survived" and wrong.equivalent:
            print(f"equivalent: {wrong.why} ({wrong.file}): {wrong.equivalent}")
        elif outcome.name != "killed":
            bad += 1
            print(f"{outcome.name.upper()}: {wrong.why} ({wrong.file})\n{outcome.detail}")
        elif wrong.equivalent:
            bad += 1
            print(f"NOT EQUIVALENT, {outcome.detail} notices it: {wrong.why} ({wrong.file})")
    print(f"{len(outcomes)} wrong changes, {bad} to look at, {seconds:.0f} s")
    return int(bad > 0)


def save(known: dict[str, Outcome]) -> None:
    OUTCOMES.parent.mkdir(exist_ok=True)
    beside = OUTCOMES.with_suffix(".new")
    beside.write_text(json.dumps(known, indent=1), encoding="utf-8")
    beside.replace(OUTCOMES)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.mutants.run")
    parser.add_argument("--only", default="", help="entries whose area, file or reason has this")
    parser.add_argument("--fresh", action="store_true", help="forget earlier outcomes")
    parser.add_argument("--jobs", type=int, default=2, help="how many at the same time")
    options = parser.parse_args()
    started = time.monotonic()
    chosen = [wrong for wrong in read() if options.only in f"{wrong.area} {wrong.file} {wrong.why}"]
    digests = {wrong: wrong.digest() for wrong in chosen}
    known: dict[str, Outcome] = {}
    if OUTCOMES.exists() and not options.fresh:
        known = {k: Outcome(*v) for k, v in json.loads(OUTCOMES.read_text("utf-8")).items()}
    new = [wrong for wrong in chosen if digests[wrong] not in known]
    with tempfile.TemporaryDirectory() as folder:
        trees = [make_tree(Path(folder) / str(n)) for n in range(options.jobs if new else 0)]
        check_unchanged(new, trees)
        done = side_by_side([(wrong, wrong.tests) for wrong in new], trees)
        for count, (number, outcome) in enumerate(done, 1):
            wrong = new[number]
            known[digests[wrong]] = outcome
            save(known)
            by = f"by {outcome.detail}" if outcome.name == "killed" else ""
            print(f"{count}/{len(new)} {outcome.name}: {wrong.why} ({wrong.file}) {by}", flush=True)
    outcomes = {wrong: known[digest] for wrong, digest in digests.items()}
    return summary(outcomes, time.monotonic() - started)


if __name__ == "__main__":
    sys.exit(main())
