"""Attackers among simulated clients send what their attack says; honest clients are unchanged."""

from pathlib import Path

import pytest
import torch

from reproduction.__main__ import main
from reproduction.poisoning import grid as attack_grid
from reproduction.poisoning.attacks import (
    ATTACKS,
    PoisonedFleet,
    poisoned_fleet,
)
from semisfl.fleet.base import Features, SplitRound
from semisfl.runs.experiment import Experiment, assemble
from semisfl.runs.loop import run_rounds
from tests import toy

SHARE = 0.34
"""One of three clients."""
FEATURES = [name for name, attack in ATTACKS.items() if attack.features]


def poisoned(
    attack: str, *assignments: str, method: str = "semisfl", share: float = SHARE
) -> Experiment:
    data = toy.dataset()
    config = toy.values(method, "clients.active=3", "rounds=1", *assignments)
    make = poisoned_fleet(ATTACKS[attack], share)
    return assemble(config, data, toy.partition(data), toy.network(), device="cpu", make_fleet=make)


def two_steps(
    attack: str, *assignments: str, share: float = SHARE
) -> tuple[PoisonedFleet, list[Features]]:
    """Return the fleet and the features of a round's first two steps, with zero gradients between."""
    experiment = poisoned(attack, *assignments, share=share)
    fleet, method = experiment.fleet, experiment.method
    assert isinstance(fleet, PoisonedFleet)
    bottom = method.student.bottom.state_dict()  # type: ignore[attr-defined]
    fleet.start_round(SplitRound(0, (0, 1, 2), 2, 0.0, bottom, bottom))
    seen = [fleet.forward()]
    fleet.backward(torch.zeros_like(seen[0].student))
    seen.append(fleet.forward())
    return fleet, seen


def rows(features: Features, place: int) -> slice:
    return slice(place * features.batch, (place + 1) * features.batch)


@pytest.mark.parametrize("attack", FEATURES)
def test_only_the_attackers_features_differ(attack: str) -> None:
    fleet, steps = two_steps(attack)
    _, honest = two_steps(attack, share=0.0)
    (attacker,) = fleet.attackers
    # A replay sends the first step again, so its first step is honest.
    step = 1
    for place in range(3):
        same = all(
            torch.equal(
                getattr(steps[step], kind)[rows(honest[step], place)],
                getattr(honest[step], kind)[rows(honest[step], place)],
            )
            for kind in ("student", "teacher")
        )
        assert same == (place != attacker), place
    assert steps[step].student.requires_grad and steps[step].student.is_leaf


def test_each_attack_sends_what_its_summary_says() -> None:
    honest = two_steps("noise_features", share=0.0)[1]
    fleet, scaled = two_steps("scaled_features")
    mine = rows(honest[0], next(iter(fleet.attackers)))
    torch.testing.assert_close(scaled[0].student[mine], 9 * honest[0].student[mine])
    replayed = two_steps("replayed_features")[1]
    assert torch.equal(replayed[1].student[mine], honest[0].student[mine])
    copied = two_steps("copied_features")[1][0]
    following = rows(honest[0], (next(iter(fleet.attackers)) + 1) % 3)
    assert torch.equal(copied.teacher[mine], honest[0].teacher[following])
    # The student's features stay; the teacher's are those of the next class, if any client shows it.
    swapped, truth = two_steps("swapped_classes")[1][0], honest[0].truth
    assert truth is not None and torch.equal(swapped.student[mine], honest[0].student[mine])
    for row in range(mine.start, mine.stop):
        wanted = (truth == (truth[row] + 1) % toy.CLASSES).nonzero().flatten()
        donors = honest[0].teacher[wanted]
        assert not len(wanted) or (donors == swapped.teacher[row]).all(1).any()


def test_attackers_bottoms_follow_no_policy() -> None:
    fleets = [two_steps("scaled_bottom", *own)[0] for own in ((), ("policy.update_clip=0.001",))]
    (attacker,) = fleets[0].attackers
    free, limited = (fleet.block.bottoms()[attacker].tensors for fleet in fleets)
    for name, tensor in free.items():
        assert torch.equal(tensor, limited[name]), name


@pytest.mark.parametrize("method", ["semisfl", "fedswitch-sl", "fedswitch", "fedmatch", "semifl"])
def test_rules_name_the_attacker_and_keep_its_weights_out(method: str) -> None:
    """With the mean one of three clients moves the result far; with the median it hardly does."""
    results = {}
    for rule in ("mean", "median"):
        for share in (0.0, SHARE):
            settings = ("semifl.confidence_threshold=0", f"robust.aggregate={rule}")
            experiment = poisoned("scaled_bottom", *settings, method=method, share=share)
            (row,) = run_rounds(experiment).rounds
            model = list(experiment.method.tested().values())[-1]
            weights = torch.cat([value.flatten() for value in model.parameters()])
            results[rule, bool(share)] = weights, row.get("held_back", {})
            attackers = experiment.fleet.attackers  # type: ignore[attr-defined]
    thrown = (results["mean", True][0] - results["mean", False][0]).norm()
    moved = (results["median", True][0] - results["median", False][0]).norm()
    assert moved < 0.2 * thrown
    assert list(results["median", True][1]) == [str(client) for client in attackers]
    assert not results["mean", True][1] and not results["median", False][1]


def test_an_absent_client_takes_no_part() -> None:
    experiment = poisoned("absent", "clients.active=3")
    assert sorted({*experiment.fleet.present()} | experiment.fleet.attackers) == [0, 1, 2]  # type: ignore[attr-defined]
    assert len(experiment.fleet.present()) == 2


# --- the table ------------------------------------------------------------------------------------

TINY = ["--set", "rounds=1", "clients.total=4", "clients.active=4", "clients.batch=4"]
TINY += [
    "clients.steps=1",
    "server.batch=4",
    "server.steps=2",
    "model.projection=8",
    "data.size=14",
]
TINY += [
    "model.layers=[{kind='conv', channels=2, padding=1}, {kind='pool'}, {kind='flatten'}, {kind='linear'}]"
]


def test_the_command_makes_a_table_and_continues_where_it_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "runs.jsonl"
    words = ["poisoning", "digits", "--rules", "mean,median+limited", "--attacks", "negated_bottom"]
    words += ["--shares", "0,0.25", "--out", str(out), *TINY]
    with pytest.raises(SystemExit, match="0"):
        main(words)
    assert "negated_bottom" in capsys.readouterr().out
    outcomes = {(one.rule, one.share): one for one in attack_grid.read(out)}
    assert len(outcomes) == 4
    assert outcomes["mean", 0.25].held_back == {}
    (attacker,) = outcomes["median+limited", 0.25].attackers
    assert str(attacker) in outcomes["median+limited", 0.25].held_back
    before = out.read_text()
    with pytest.raises(SystemExit, match="0"):
        main(words)
    assert out.read_text() == before
