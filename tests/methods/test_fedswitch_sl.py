"""FedSwitch-SL where clients do not answer, and how its top labels. Its rounds: test_fedswitch.py."""

import copy

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from semisfl.fleet.base import Features
from semisfl.methods.fedswitch import divergence
from semisfl.methods.fedswitch_sl import FedSwitchSL
from semisfl.settings.config import ConfigError
from tests import toy
from tests.leaving import leave


def make(*assignments: str, **kind: bool) -> FedSwitchSL:
    experiment = toy.assemble("fedswitch-sl", "clients.active=3", *assignments, **kind)
    assert isinstance(experiment.method, FedSwitchSL)
    return experiment.method


class ByHand:
    """Compute, for each step, what every client's labeller predicts and the gradient of its own mean loss."""

    def __init__(self, method: FedSwitchSL, threshold: float) -> None:
        self.method, self.threshold = method, threshold
        self.predictions: dict[int, Tensor] = {}
        self.gradients: list[Tensor] = []

    def __call__(self, features: Features) -> None:
        method, limit = self.method, self.method.setup.config.fedswitch.iid_threshold
        parts = []
        for number, client in enumerate(features.clients):
            rows = slice(number * features.batch, (number + 1) * features.batch)
            by_teacher = method.skew.get(client, limit) <= limit
            top = copy.deepcopy(method.teacher_top if by_teacher else method.top).eval()
            with torch.no_grad():
                predictions = top(features.teacher[rows]).softmax(1)
                confidence, labels = predictions.max(1)
            self.predictions[client] = self.predictions.get(client, 0) + predictions.sum(0)
            student = features.student.detach()[rows].requires_grad_()
            losses = F.cross_entropy(copy.deepcopy(method.top)(student), labels, reduction="none")
            kept = (confidence >= self.threshold).float()
            (gradient,) = torch.autograd.grad((losses * kept).mean(), student)
            parts.append(gradient)
        self.gradients.append(torch.cat(parts))


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_missing_clients_do_not_affect_those_that_answer(missing: int) -> None:
    """Each gets the gradient of its own mean under its own labeller, also if others are missing."""
    method = make("fedswitch.confidence_threshold=0.3")
    method.round(0)
    method.skew = {0: 0.1, 1: 0.9, 2: 0.2}  # the student labels client 1, the teacher the others
    before = dict(method.skew)
    by_hand = ByHand(method, 0.3)
    sent = leave(method.setup.fleet, {missing}, by_hand)
    row = method.round(1)
    assert len(sent) == len(by_hand.gradients) == 4
    for got, wanted in zip(sent, by_hand.gradients, strict=True):
        assert float(wanted.abs().max()) > 0
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-7)
    assert row.contributing == 2
    assert row.coverage_by_client[str(missing)] is None
    for client, sums in by_hand.predictions.items():
        expected = float(divergence(sums.double() / sums.double().sum()))
        assert method.skew[client] == pytest.approx(expected, rel=1e-4)
    assert method.skew[missing] == before[missing], "nothing was heard of it"


@pytest.mark.parametrize("align", ["client", "global"])
def test_labels_are_corrected_after_the_warm_up_and_the_switch_sees_them_uncorrected(
    align: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("semisfl.algorithm.labelling.WARMUP_ROUNDS", 1)
    settings = ("fedswitch.confidence_threshold=0.35", "optimizer.lr=0.05")
    plain, corrected = make(*settings), make(*settings, f"fedswitch.align={align}")
    losses = [
        [method.round(index).loss_semi for index in range(2)] for method in (plain, corrected)
    ]
    assert losses[0][0] == losses[1][0] and losses[0][1] != pytest.approx(losses[1][1], rel=1e-4)
    # The switch follows what the labeller predicts: round 1 began with equal models.
    corrected = make(*settings, f"fedswitch.align={align}")
    corrected.round(0)
    by_hand = ByHand(corrected, 0.35)
    leave(corrected.setup.fleet, (), by_hand)
    corrected.round(1)
    for client, sums in by_hand.predictions.items():
        expected = float(divergence(sums.double() / sums.double().sum()))
        assert corrected.skew[client] == pytest.approx(expected, rel=1e-4)


def test_the_form_whose_clients_label_refuses_alignment() -> None:
    with pytest.raises(ConfigError, match=r"fedswitch\.align = 'client' .* 'fedswitch-sl'"):
        toy.assemble("fedswitch", "fedswitch.align=client")


def test_a_client_that_never_answered_leaves_no_state() -> None:
    method = make()
    leave(method.setup.fleet, {1})
    method.round(0)
    assert sorted(method.skew) == [0, 2]
    assert all(value == value for value in method.skew.values())


@pytest.mark.parametrize("by_teacher", [False, True])
def test_labels_are_given_without_dropout(by_teacher: bool) -> None:
    method = make("clients.steps=1", dropout=True)
    method.round(0)
    method.skew = dict.fromkeys(range(3), 0.0 if by_teacher else 9.0)
    seen: dict[int, float] = {}

    def watch(features: Features) -> None:
        top = method.teacher_top if by_teacher else method.top
        top.eval()
        for client, rows in zip(features.clients, features.teacher.split(8), strict=True):
            with torch.no_grad():
                seen[client] = float(divergence(top(rows).softmax(1).mean(0)))

    leave(method.setup.fleet, (), watch)
    assert method.round(1).labelled_by_teacher == float(by_teacher)
    assert method.skew == pytest.approx(seen, rel=1e-4)


def test_the_student_learns_with_dropout() -> None:
    """Gradients of one and the same step differ with the seed that dropout draws from."""
    gradients = []
    for number in (1, 2):
        method = make("clients.steps=1", "fedswitch.confidence_threshold=0", dropout=True)
        start = method.supervised.dropout.start
        method.supervised.run = (  # type: ignore[method-assign]
            lambda index, steps, lr, number=number, start=start: start(number) or 0.0
        )
        sent = leave(method.setup.fleet, ())
        method.round(0)
        gradients.append(sent[0])
    assert not torch.equal(*gradients)


def test_a_device_that_takes_a_place_is_labelled_by_the_teacher_first() -> None:
    method = make()
    fleet = method.setup.fleet
    method.round(0)
    method.skew = dict.fromkeys(range(3), 9.0)
    resumed = make()
    resumed.load_state_dict(method.state_dict())
    for one in (method, resumed):
        one.setup.fleet.members = lambda: fleet_names  # type: ignore[method-assign]
    fleet_names = {client: "another" if client == 1 else str(client) for client in fleet.present()}
    for one in (method, resumed):
        row = one.round(1)
        assert one.active == (0, 1, 2)
        assert row.labelled_by_teacher == pytest.approx(1 / 3)
