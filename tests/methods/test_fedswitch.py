"""FedSwitch and FedSwitch-SL against plain loops."""

import copy
import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from semisfl import seeds
from semisfl.algorithm.schedule import learning_rate
from semisfl.data.positions import draw_batches
from semisfl.fleet.base import ClientRuntime, FullRound
from semisfl.methods.fedswitch import FedSwitch, FedSwitchWork, divergence
from semisfl.methods.fedswitch_sl import FedSwitchSL
from semisfl.runs.experiment import Experiment
from tests import toy
from tests.leaving import leave


def switch(*assignments: str, **kind: bool) -> tuple[Experiment, FedSwitch]:
    experiment = toy.assemble("fedswitch", *assignments, **kind)
    assert isinstance(experiment.method, FedSwitch)
    return experiment, experiment.method


def test_divergence_is_the_sum_over_classes() -> None:
    mean = np.array([0.7, 0.2, 0.1, 0.0])
    expected = sum(p * math.log(4 * p) for p in mean if p > 0)
    assert float(divergence(torch.from_numpy(mean))) == pytest.approx(expected, rel=1e-12)
    assert float(divergence(torch.full((10,), 0.1))) == pytest.approx(0, abs=1e-6)
    assert float(divergence(torch.eye(10)[3])) == pytest.approx(math.log(10))


@pytest.mark.parametrize("batchnorm", [False, True])
@pytest.mark.parametrize("by_teacher", [False, True])
def test_client_half_equals_a_plain_loop(batchnorm: bool, by_teacher: bool) -> None:
    settings = toy.values("fedswitch")
    experiment, method = switch(batchnorm=batchnorm)
    student = copy.deepcopy(method.student)
    teacher = copy.deepcopy(method.student)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(2)
    # So that it matters who labels: the student, an average, or what was sent.
    threshold = 0.36 if by_teacher else 0.32
    plan = FullRound(
        2,
        (0, 2),
        4,
        0.1,
        send={"student": student.state_dict()},
        on_request={"teacher": teacher.state_dict()},
        kinds={"teacher": "teacher"},
        settings={
            "confidence_threshold": threshold,
            "iid_threshold": 99.0 if by_teacher else -1.0,
            "ema_decay": 0.6,
        },
    )
    results = experiment.fleet.train(FedSwitchWork(), plan)
    assert [result.client for result in results] == [0, 2]
    shards, told_apart = toy.partition(toy.dataset()).clients, set()
    for result in results:
        client, mine = result.client, copy.deepcopy(student)
        labeller = copy.deepcopy(teacher if by_teacher else student)
        optimizer = toy.sgd(mine, settings, 0.1)
        rng = seeds.generator(settings.seed, "batches", 2, client)
        places = draw_batches(rng, len(shards[client]), 4, 8)
        strong = toy.views(settings, "strong", "strong", places, 2, client)
        weak = toy.views(settings, "weak", "weak", places, 2, client)
        kept = 0
        for step in range(4):
            with torch.no_grad():
                average, current, sent = (
                    voice.eval()(weak[step]).softmax(1).max(1)
                    for voice in (labeller, mine, teacher)
                )
            message = [torch.where(v >= threshold, n, -1) for v, n in (average, current, sent)]
            if step:
                told_apart |= {n for n in (1, 2) if not torch.equal(message[0], message[n])}
            confidence, labels = average if by_teacher else current
            losses = F.cross_entropy(mine.train()(strong[step]), labels, reduction="none")
            optimizer.zero_grad()
            (losses * (confidence >= threshold)).mean().backward()
            optimizer.step()
            kept += int((confidence >= threshold).sum())
            for slow, fast in zip(
                labeller.state_dict().values(), mine.state_dict().values(), strict=True
            ):
                slow.copy_(0.6 * slow + 0.4 * fast if slow.is_floating_point() else fast)
        toy.assert_same(dict(result.states["student"]), mine.state_dict())
        assert result.numbers["coverage"] == pytest.approx(kept / 32)
        assert result.numbers["by_teacher"] == float(by_teacher)
    assert told_apart == {1, 2}


def test_the_student_labels_where_its_predictions_are_uneven() -> None:
    """The threshold lies between the divergences of two clients: only one downloads the teacher."""
    experiment, method = switch("clients.active=3", "rounds=20", "optimizer.lr=0.1")
    for round_index in range(8):
        method.round(round_index)
    skews = {}
    for client in (0, 2):
        count = len(toy.partition(toy.dataset()).clients[client])
        weak = toy.views(
            experiment.config, "weak", "predict-weak", np.arange(count)[:, None], 8, client
        )
        with torch.no_grad():
            p = method.student.eval()(weak[:, 0]).softmax(1).mean(0).double()
        skews[client] = float((p * (4 * p).log()).sum())
    assert skews[0] < skews[2]
    work = FedSwitchWork()
    before = experiment.fleet.traffic.by_kind().get("teacher_down", 0)
    state = method.student.state_dict()
    plan = FullRound(
        8,
        (0, 2),
        1,
        0.01,
        send={"student": state},
        on_request={"teacher": state},
        kinds={"teacher": "teacher"},
        settings={
            "confidence_threshold": 0.95,
            "iid_threshold": (skews[0] + skews[2]) / 2,
            "ema_decay": 0.9,
        },
    )
    first, last = experiment.fleet.train(work, plan)
    assert (first.numbers["by_teacher"], last.numbers["by_teacher"]) == (1.0, 0.0)
    size = sum(value.numel() * value.element_size() for value in state.values())
    assert experiment.fleet.traffic.by_kind()["teacher_down"] - before == size


def test_the_share_labelled_by_the_teacher_is_of_the_clients_that_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    experiment, method = switch("clients.active=3")
    chosen = iter([True, True, False])
    monkeypatch.setattr(FedSwitchWork, "_teacher_labels", lambda *_: next(chosen))
    train = experiment.fleet.train
    experiment.fleet.train = lambda work, plan: train(work, plan)[1:]  # type: ignore[method-assign]
    assert method.round(0).labelled_by_teacher == 0.5


def test_in_a_split_round_it_is_of_all_for_whom_the_server_chose() -> None:
    experiment, method = split_switch("clients.active=3", "fedswitch.iid_threshold=0.5")
    method.round(0)
    method.skew = {0: 0.9, 1: 0.1, 2: 0.1}
    leave(experiment.fleet, {0})
    assert method.round(1).labelled_by_teacher == pytest.approx(2 / 3)


def test_a_state_fetched_twice_is_counted_once() -> None:
    class Twice(FedSwitchWork):
        def start(self, client: ClientRuntime) -> bool:
            client.fetch("teacher")
            return super().start(client)

    experiment, method = switch("fedswitch.iid_threshold=inf")
    method.work = Twice()
    assert method.round(0).labelled_by_teacher == 1
    kinds = experiment.fleet.traffic.by_kind()
    assert kinds["teacher_down"] == kinds["model_down"]


@pytest.mark.parametrize("method", ["fedswitch", "fedswitch-sl"])
def test_labelled_images_are_shown_weakly_augmented(method: str) -> None:
    """The loss of the first supervised step, before anything is learned, by hand."""
    experiment = toy.assemble(method, "server.steps=1")
    subject = experiment.method
    assert isinstance(subject, FedSwitch | FedSwitchSL)
    labeled = subject.setup.labeled
    labeled.start(0, 1, "weak", views=1)
    images, (labels, *_) = labeled.next()
    with torch.no_grad():
        expected = F.cross_entropy(subject.student.train()(images), labels)
    assert subject.round(0).loss_supervised == pytest.approx(float(expected), rel=1e-5)


def test_the_teacher_changes_only_on_the_server() -> None:
    _, method = switch("clients.steps=6")
    method.round(0)
    after = copy.deepcopy(method.ema.model.state_dict())
    updates = float(method.ema.updates)
    _, other = switch("clients.steps=1")
    other.round(0)
    assert updates == 5
    toy.assert_same(after, other.ema.model.state_dict())


# --- FedSwitch-SL ---------------------------------------------------------------------------------


def split_switch(*assignments: str, **kind: bool) -> tuple[Experiment, FedSwitchSL]:
    experiment = toy.assemble("fedswitch-sl", *assignments, **kind)
    assert isinstance(experiment.method, FedSwitchSL)
    return experiment, experiment.method


def test_split_form_equals_a_plain_loop_over_clients_and_modes() -> None:
    settings = toy.values("fedswitch-sl", "clients.active=3", "fedswitch.confidence_threshold=0.3")
    _, method = split_switch("clients.active=3", "fedswitch.confidence_threshold=0.3")
    method.round(0)
    # Client 1 is remembered as uneven: its own student is going to label it.
    method.skew = {0: 0.1, 1: 0.9}
    twin, twin_teacher = copy.deepcopy(method.student), copy.deepcopy(method.ema.model)
    lr = learning_rate(settings.optimizer, 1, settings.rounds)
    # The supervised phase is tested with Supervised-only; here it is taken over.
    method.supervised.run = lambda round_index, steps, lr: 0.0  # type: ignore[method-assign]
    method.round(1)
    shards = toy.partition(toy.dataset()).clients
    bottoms = [copy.deepcopy(twin.get_submodule("bottom")) for _ in range(3)]
    labellers = [copy.deepcopy(twin_teacher.get_submodule("bottom")) for _ in range(3)]
    labellers[1] = copy.deepcopy(bottoms[1])
    top, teacher_top = twin.get_submodule("top"), twin_teacher.get_submodule("top")
    server = toy.sgd(top, settings, lr)
    optimizers = [toy.sgd(bottom, settings, lr) for bottom in bottoms]
    views = []
    for client in range(3):
        rng = seeds.generator(settings.seed, "batches", 1, client)
        places = draw_batches(rng, len(shards[client]), 4, 8)
        views.append(
            [toy.views(settings, kind, kind, places, 1, client) for kind in ("strong", "weak")]
        )
    sums = torch.zeros(3, 4)
    for step in range(4):
        for optimizer in (server, *optimizers):
            optimizer.zero_grad()
        losses = []
        for client in range(3):
            strong, weak = (view[step] for view in views[client])
            with torch.no_grad():
                mode_top = top if client == 1 else teacher_top
                predictions = mode_top(labellers[client](weak)).softmax(1)
                sums[client] += predictions.sum(0)
                confidence, labels = predictions.max(1)
            row = F.cross_entropy(top(bottoms[client](strong)), labels, reduction="none")
            losses.append((row * (confidence >= 0.3)).mean())
        # The top descends the mean over all rows, each bottom the mean over its own.
        torch.stack(losses).mean().backward()
        for bottom in bottoms:
            for parameter in bottom.parameters():
                assert parameter.grad is not None
                parameter.grad *= 3
        for optimizer in (server, *optimizers):
            optimizer.step()
        with torch.no_grad():
            for client in range(3):
                keep = 0.0 if client == 1 else settings.teacher.ema_decay
                for slow, fast in zip(
                    labellers[client].parameters(), bottoms[client].parameters(), strict=True
                ):
                    slow.copy_(keep * slow + (1 - keep) * fast)
    toy.assert_same(method.top.state_dict(), top.state_dict())
    mean = {
        name: torch.stack([bottom.state_dict()[name] for bottom in bottoms]).mean(0)
        for name in bottoms[0].state_dict()
    }
    toy.assert_same(method.bottom.state_dict(), mean)
    for client in range(3):
        p = (sums[client] / sums[client].sum()).double()
        assert method.skew[client] == pytest.approx(float((p * (4 * p).log()).sum()), rel=1e-4)


def test_a_client_is_labelled_by_the_teacher_the_first_time_only_if_it_looks_iid_afterwards() -> (
    None
):
    _, method = split_switch("clients.active=3", "fedswitch.iid_threshold=-1")
    assert method.round(0).labelled_by_teacher == 1.0
    assert method.round(1).labelled_by_teacher == 0.0


def test_the_supervised_steps_are_not_adapted() -> None:
    _, method = split_switch(
        "controller.kind=raw", "controller.period=2", "controller.min_steps_factor=0"
    )
    for round_index in range(6):
        # A supervised loss that rises while the other stays: SemiSFL's controller would lower K_s.
        method.supervised.run = (  # type: ignore[method-assign]
            lambda index, steps, lr, value=float(round_index): value
        )
        assert method.round(round_index).supervised_steps == 5
