"""Check a chaos run afterwards, and compare it with the same run without a network."""

import dataclasses
import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from semisfl.data import sources
from semisfl.data.partition import Partition
from semisfl.fleet.setup import FleetSetup
from semisfl.net.client.join import load_images
from semisfl.runs import checkpoint
from semisfl.runs.experiment import Experiment, assemble
from semisfl.runs.loop import run_rounds
from semisfl.runs.reading import read_rounds
from semisfl.settings.config import Config
from tests.net.chaos_processes import RECORD
from tests.net.harness import Oracle, flat

Record = Mapping[str, Any]
"""Of one round: who was active, who answered at which step, and who had been struck by then."""


def records(lines: Sequence[str]) -> list[Record]:
    return [json.loads(line.removeprefix(RECORD)) for line in lines if line.startswith(RECORD)]


def participation(lines: Sequence[str]) -> list[Record]:
    """Each round as it counted: one that was done again counted the last time."""
    by_round = {record["round"]: record for record in records(lines)}
    return [by_round[index] for index in sorted(by_round)]


def wrong(place: Path, config: Config, honest: Sequence[str], lines: Sequence[str]) -> list[str]:
    """All that should not be so; ``lines`` is what the servers of the run wrote."""
    faults = []
    counted = participation(lines)
    rows = [row["round"] for row in read_rounds(place / "out", dict)]
    for name, rounds in {"metrics": rows, "records": [r["round"] for r in counted]}.items():
        if rounds != list(range(config.rounds)):
            faults.append(f"{name} of rounds {rounds}, not of each of {config.rounds} once")
    struck = {name for record in records(lines) for name in record["strikes"] if name in honest}
    if struck:
        faults.append(f"honest clients were struck: {sorted(struck)}")
    if faults:
        return faults
    roster = json.loads((place / "out/roster.json").read_text(encoding="utf-8"))["index"]
    missing = [name for name in honest if roster[name] not in counted[-1]["answered"][-1]]
    if missing:
        faults.append(f"{missing} were not in the last round, long after the last fault")
    ours = flat(checkpoint.read(place / "out/latest.safetensors")["method"])
    theirs = flat(replay(place, config, counted, roster).method.state_dict())
    if ours.keys() != theirs.keys():
        faults.append(f"only one side has the tensors {sorted(ours.keys() ^ theirs.keys())}")
    differing = [key for key in ours.keys() & theirs.keys() if not ours[key].equal(theirs[key])]
    if differing:
        faults.append(f"{len(differing)} of {len(theirs)} tensors differ: {sorted(differing)[:3]}")
    return faults


def replay(
    place: Path, config: Config, counted: Sequence[Record], roster: Mapping[str, int]
) -> Experiment:
    """The same run without a network, with the same participation."""
    data = sources.load(str(place / "labeled"))
    names = sorted(roster, key=roster.__getitem__)
    held = [load_images(place / name, data.shape)[0] for name in names]
    labels = torch.cat([data.labels, torch.full((sum(map(len, held)),), -1)])
    both = dataclasses.replace(data, images=torch.cat([data.images, *held]), labels=labels)
    ends = np.cumsum([len(data.images), *map(len, held)])
    shards = tuple(np.arange(*span) for span in itertools.pairwise(ends))
    experiment = assemble(
        config,
        both,
        Partition(np.arange(len(data.images)), shards),
        device="cpu",
        make_fleet=functools.partial(Replay, counted=counted),
    )
    run_rounds(experiment)
    return experiment


class Replay(Oracle):
    """Clients that answer exactly where they did in the records."""

    def __init__(self, setup: FleetSetup, *, counted: Sequence[Record]) -> None:
        super().__init__(setup)
        self._counted = counted

    def image_counts(self) -> dict[int, int]:
        return {int(c): n for c, n in self._counted[self._round - 1]["images"].items()}

    def present(self) -> list[int]:
        return list(self._counted[self._round]["active"])

    def _here(self) -> tuple[int, ...]:
        return tuple(self._counted[self._round]["answered"][self._step])
