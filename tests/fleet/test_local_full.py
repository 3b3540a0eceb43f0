"""Full-model rounds on a CPU: every client takes its steps at its own pace, and nothing else changes."""

import copy
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest
import torch

from semisfl.engine.hardware import Hardware
from semisfl.fleet.base import ClientResult, ClientRuntime, FullRound, State
from semisfl.fleet.local import LocalFleet
from semisfl.fleet.local_full import FullModelClients, Slot
from semisfl.runs import checkpoint
from semisfl.runs.experiment import Experiment
from semisfl.settings.config import ConfigError, parse
from semisfl.stopping import Stopped
from tests import toy
from tests.toy import assemble

STEPS = 500


def in_step(
    self: FullModelClients, work: object, slots: list[Slot], ok: list[bool], between: None
) -> list[ClientResult]:
    with self._hardware.streams.a_core_each():
        return self._together(work, slots, ok, between)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("budget", "epochs"), [(1, "none"), (256 * 2**20, "none"), (1, "1"), (256 * 2**20, "2")]
)
@pytest.mark.parametrize("method", ["semifl", "fedmatch", "fedswitch", "fl2"])
def test_own_pace_gives_what_steps_side_by_side_give(
    method: str, budget: int, epochs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit, in one stretch or in many; also where a client has nothing to contribute, or ends early."""
    settings = ("clients.active=3", "semifl.confidence_threshold=0.3", f"clients.epochs={epochs}")
    settings += ("clients.steps=20",) if epochs != "none" else ()
    apart, together = (assemble(method, *settings, dropout=True) for _ in range(2))
    assert isinstance(apart.fleet, LocalFleet)
    apart.fleet.block.batches.budget = budget
    rows = [apart.method.round(index) for index in range(2)]
    monkeypatch.setattr(FullModelClients, "_at_their_own_pace", in_step)
    assert rows == [together.method.round(index) for index in range(2)]
    for one, other in zip(
        apart.method.tested().values(), together.method.tested().values(), strict=True
    ):
        for name, value in one.state_dict().items():
            assert torch.equal(value, other.state_dict()[name]), name


@pytest.mark.parametrize(
    ("method", "batchnorm", "models"),
    [
        ("semifl", False, {"model"}),
        ("fedswitch", False, {"student", "labeller"}),
        ("fedswitch", True, {"student", "labeller"}),
        ("fedmatch", True, {"helper0", "helper1"}),
    ],
)
def test_layers_may_compute_on_copies_of_their_weights(
    method: str, batchnorm: bool, models: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU does so, where a copy is as exact as the cast that it saves; here it is in float16."""
    monkeypatch.setattr("semisfl.methods.fedmatch.method.REFRESH", 1)
    settings = ("clients.active=3", "semifl.confidence_threshold=0.3")
    settings += ("fedswitch.confidence_threshold=0.2", "fedswitch.iid_threshold=9")
    settings += ("fedmatch.confidence_threshold=0.3",)
    monkeypatch.setattr(Hardware, "dtype", torch.float16)
    monkeypatch.setattr(
        Hardware,
        "arithmetic",
        lambda _: torch.autocast("cpu", dtype=torch.float16, cache_enabled=False),
    )
    cast = assemble(method, *settings, batchnorm=batchnorm)
    rows = [cast.method.round(index) for index in range(2)]
    monkeypatch.setattr(Hardware, "weights_dtype", torch.float16)
    copied = assemble(method, *settings, batchnorm=batchnorm)
    others = [copied.method.round(index) for index in range(2)]
    assert with_copies(copied) - with_copies(cast) == models
    assert rows[1].mask_rate == others[1].mask_rate != 1
    assert rows[1].loss_semi == pytest.approx(others[1].loss_semi, rel=1e-3)
    for one, other in zip(
        cast.method.tested().values(), copied.method.tested().values(), strict=True
    ):
        for name, value in one.state_dict().items():
            assert torch.allclose(value, other.state_dict()[name], atol=1e-4), name


def with_copies(experiment: Experiment) -> set[str]:
    """Return the clients' models whose layers compute on copies."""
    assert isinstance(experiment.fleet, LocalFleet)
    slot = experiment.fleet.block._full._slots[0]
    return {
        name
        for name, model in slot._models.items()
        if any(hasattr(parameter, "master") for parameter in model.parameters())
    }


class Counting:
    """Count the steps and call ``during`` in each."""

    name = "counting"

    def __init__(self, during: Callable[[ClientRuntime, int], None]) -> None:
        self.taken = dict.fromkeys(range(3), 0)
        self._during = during

    def start(self, client: ClientRuntime) -> bool:
        client.draw_view("plain", "plain", torch.zeros(client.steps, 1, dtype=torch.long).numpy())
        return True

    def step(self, client: ClientRuntime) -> None:
        self.taken[client.client] += 1
        self._during(client, self.taken[client.client])

    def finish(self, client: ClientRuntime) -> tuple[dict[str, State], dict[str, float]]:
        return {}, {}


class Passing(Counting):
    """Take steps on the first ``pools[client]`` images of each client."""

    pools = (20, 8, 0)

    def start(self, client: ClientRuntime) -> bool:
        places = client.draw_batches(client.rng("batches"), np.arange(self.pools[client.client]))
        assert places.shape == (client.steps, client.batch)
        client.draw_view("plain", "plain", places)
        return True

    def finish(self, client: ClientRuntime) -> tuple[dict[str, State], dict[str, float]]:
        return {}, {"steps": float(self.taken[client.client])}


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(("most", "taken"), [(9, (6, 2, 2)), (5, (5, 2, 2))])
def test_a_client_ends_after_its_passes_or_steps(
    together: bool, most: int, taken: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two passes over 20 and 8 images in batches of 8; without an image to train on, over the first one."""
    if together:
        monkeypatch.setattr(FullModelClients, "_at_their_own_pace", in_step)
    fleet = assemble("semifl", "clients.epochs=2", "clients.active=3").fleet
    results = fleet.train(
        Passing(lambda client, step: None), FullRound(0, (0, 1, 2), most, 0.1, {})
    )
    assert tuple(result.numbers["steps"] for result in results) == taken


class Descending(Counting):
    """Take the steps of plain SGD on each client's first images."""

    def start(self, client: ClientRuntime) -> bool:
        client.model("model").load_state_dict(client.received("model") or {})
        return super().start(client)

    def step(self, client: ClientRuntime) -> None:
        model = client.model("model").train()
        client.descend(model, model(client.batch_of("plain")).square().mean())

    def finish(self, client: ClientRuntime) -> tuple[dict[str, State], dict[str, float]]:
        return {"model": client.model("model").state_dict()}, {}


def test_a_client_keeps_its_momentum_between_its_rounds_and_across_a_restart(
    tmp_path: Path,
) -> None:
    """As PyTorch's optimiser of each client does that is never made anew; the clients share a slot."""
    experiment = assemble("semifl", "optimizer.keep_momentum=true", "clients.active=1")
    sent = experiment.model.state_dict()
    twins = [copy.deepcopy(experiment.model) for _ in range(2)]
    optimizers = [toy.sgd(twin, experiment.config, 0.1) for twin in twins]
    clients = toy.partition(toy.dataset()).clients
    for index, client in enumerate((0, 1, 0, 1, 0)):
        if index == 3:
            checkpoint.write(tmp_path / "latest.safetensors", experiment.state_dict())
            experiment = assemble("semifl", "optimizer.keep_momentum=true", "clients.active=1")
            experiment.load_state_dict(checkpoint.read(tmp_path / "latest.safetensors"))
        plan = FullRound(index, (client,), 3, 0.1, send={"model": sent})
        (result,) = experiment.fleet.train(Descending(lambda *_: None), plan)
        twin, optimizer = twins[client], optimizers[client]
        twin.load_state_dict(sent)
        image = experiment.normalizer(toy.dataset().images[clients[client][:1]])
        for _ in range(3):
            optimizer.zero_grad()
            twin(image).square().mean().backward()
            optimizer.step()
        toy.assert_same(dict(result.states["model"]), twin.state_dict())


def test_only_clients_of_one_process_can_keep_their_momentum() -> None:
    with pytest.raises(ConfigError, match="keep_momentum"):
        parse({"optimizer": {"keep_momentum": True}}).in_fleet("network")


def test_a_stop_ends_every_client_after_its_step() -> None:
    experiment = assemble("semifl")

    def stop(client: ClientRuntime, step: int) -> None:
        experiment.stop.requested = experiment.stop.requested or step == 3

    work = Counting(stop)
    with pytest.raises(Stopped):
        experiment.fleet.train(work, FullRound(0, (0, 1, 2), STEPS, 0.1, {}))
    assert max(work.taken.values()) == 3


@pytest.fixture
def three_threads() -> Iterator[None]:
    """Use three threads: with one, no client is in a step when another one fails."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
def test_where_one_client_fails_the_others_give_up() -> None:
    all_under_way = Barrier(3)

    def fail(client: ClientRuntime, step: int) -> None:
        if step == 3:
            all_under_way.wait(60)
            if client.client == 0:
                raise RuntimeError("no memory")
        time.sleep(0.002)

    work = Counting(fail)
    with pytest.raises(RuntimeError, match="no memory"):
        assemble("semifl").fleet.train(work, FullRound(0, (0, 1, 2), STEPS, 0.1, {}))
    assert work.taken[0] == 3 and max(work.taken.values()) < STEPS


@pytest.mark.parametrize("together", [False, True])
def test_between_is_called_before_every_step(
    together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for each client at its own pace; once for all if they step together, as on a GPU."""
    if together:
        monkeypatch.setattr(FullModelClients, "_at_their_own_pace", in_step)
    events: list[str] = []
    work = Counting(lambda client, step: events.append("step"))
    fleet = assemble("semifl").fleet
    assert isinstance(fleet, LocalFleet)
    fleet.block.train(work, FullRound(0, (1,), 4, 0.1, {}), lambda: events.append("between"))
    assert events == ["between", "step"] * 4
    events.clear()
    fleet.block.train(work, FullRound(0, (0, 1, 2), 4, 0.1, {}), lambda: events.append("between"))
    assert events.count("step") == 12 and events.count("between") == (4 if together else 12)


def test_steps_taken_together_notice_the_stop_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FullModelClients, "_at_their_own_pace", in_step)
    experiment = assemble("semifl")
    assert isinstance(experiment.fleet, LocalFleet)
    calls: list[None] = []

    def ask_to_stop() -> None:
        calls.append(None)
        experiment.stop.requested = len(calls) == 3

    work = Counting(lambda client, step: None)
    with pytest.raises(Stopped):
        experiment.fleet.block.train(work, FullRound(0, (0, 1, 2), STEPS, 0.1, {}), ask_to_stop)
    assert set(work.taken.values()) == {3}, "the step after the call is the last one"
