"""Runs of one's own models: the directory says what they are, and the command line goes on with them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from semisfl.cli.main import main
from semisfl.data.partition import Partition
from semisfl.fleet.setup import NetworkOptions
from semisfl.models.layers import Residual
from semisfl.runs.directory import RunDirectory
from semisfl.runs.experiment import assemble
from semisfl.runs.start import resume, train
from semisfl.settings import config
from semisfl.settings.config import Config, ConfigError
from semisfl.stopping import StopFlag
from semisfl.use.classifier import load, predict
from semisfl.use.split_inference import ServedModel
from tests import toy
from tests.net.harness import Oracle

SMALL = [
    *("rounds=3", "runtime.checkpoint_every=1", "data.labeled=10", "model.projection=4"),
    *("clients.total=3", "clients.active=2", "clients.batch=4", "clients.steps=2"),
    *("server.batch=4", "server.steps=2"),
]


def small(*assignments: str) -> Config:
    return config.parse(config.override({}, [*SMALL, *assignments]))


def own_model() -> nn.Sequential:
    torch.manual_seed(3)
    block = Residual(
        nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4)),
        nn.Sequential(nn.Conv2d(3, 4, 1, 2)),
    )
    return nn.Sequential(
        *(nn.Conv2d(1, 3, 5, stride=3), nn.ReLU(), block, nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
        *(nn.Flatten(), nn.Dropout(0.2), nn.Linear(4, 10)),
    )


@pytest.mark.parametrize("method", ["fl2", "fedmatch"])
def test_a_layer_used_twice_keeps_its_weights_between_rounds(method: str, tmp_path: Path) -> None:
    """Weights that a method only tries must not stay in the model: a resumed run would not have them."""
    torch.manual_seed(3)
    again = nn.Conv2d(3, 3, 3, padding=1)
    model = nn.Sequential(
        *(nn.Conv2d(1, 3, 5, stride=3), again, nn.ReLU(), again, nn.AdaptiveAvgPool2d(1)),
        *(nn.Flatten(), nn.Linear(3, 10)),
    )
    settings = small(f"method={method}")
    whole = train(settings, model=model, device="cpu")
    stop = StopFlag()
    out = tmp_path / "stopped"
    ends = {"stop": stop, "observe": lambda row: stop.request()}
    train(settings, model=model, device="cpu", out=out, **ends)
    resumed = resume(out, model=model, device="cpu")
    assert resumed.history["loss_supervised"] == whole.history["loss_supervised"]


class Called(nn.Module):
    """A module that calls its layers in order."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.flat, self.last = nn.Conv2d(1, 3, 5, 3), nn.Flatten(), nn.Linear(192, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.flat(self.first(x)))
        return out


@pytest.mark.parametrize("kind", ["sequential", "module", "stages"])
def test_the_module_given_is_not_trained_itself(kind: str) -> None:
    model = own_model() if kind == "sequential" else Called()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    layers = [type(layer) for layer in model.modules()]
    stages = list(model.children()) if kind == "stages" else model
    cut = "model.cut=stage2" if kind == "stages" else "model.cut=none"
    results = [train(small("rounds=1", cut), model=stages, device="cpu") for _ in range(2)]
    after = model.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())
    assert layers == [type(layer) for layer in model.modules()] and model.training
    first, second = (result.model.state_dict() for result in results)
    assert all(torch.equal(first[key], value) for key, value in second.items())
    trained = list(results[0].model.parameters())
    assert not any(torch.equal(trained[0], value) for value in before.values())


class Scaled(nn.Module):
    """A layer that no table describes."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x


class Shifted(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return self.factor + x


def test_a_run_does_not_go_on_with_another_network(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def network(layer: nn.Module, channels: int = 3) -> nn.Sequential:
        conv, last = nn.Conv2d(1, channels, 5, 3), nn.Linear(64 * channels, 10)
        return nn.Sequential(conv, layer, nn.Flatten(), last)

    other_code = "the module has other code or settings than the one that was trained"
    train(small("rounds=1"), model=network(nn.ReLU()), device="cpu", out=tmp_path / "table")
    for other in (network(nn.GELU()), network(nn.ReLU(), channels=4)):
        with pytest.raises(ConfigError, match="is not the network that was trained"):
            resume(tmp_path / "table", model=other, device="cpu")
    train(small("rounds=1"), model=network(Scaled(1.0)), device="cpu", out=tmp_path / "code")
    for path, same in (("table", nn.ReLU()), ("code", Scaled(1.0))):
        assert resume(tmp_path / path, model=network(same), device="cpu").rounds
        assert other_code not in caplog.text
    # Other code may compute the same, and other versions may describe other layers.
    for path, other in (("code", Shifted(1.0)), ("code", nn.ReLU()), ("table", Scaled(1.0))):
        caplog.clear()
        assert resume(tmp_path / path, model=network(other), device="cpu").rounds
        assert other_code in caplog.text


def test_a_model_that_no_table_describes_still_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = nn.Sequential(nn.Conv2d(1, 3, 5, 3), Scaled(1.0), nn.Flatten(), nn.Linear(192, 10))
    train(small("rounds=1"), model=own, device="cpu", out=tmp_path / "run")
    model = RunDirectory.open(tmp_path / "run").config().model
    assert model.name.startswith("code-") and model.layers is None
    assert resume(tmp_path / "run", model=own, device="cpu").rounds
    for words in (["--resume", str(tmp_path / "run")], [str(tmp_path / "run" / "config.toml")]):
        assert main(["run", *words, "--device", "cpu"]) == 2
        assert "was given to train() as code" in capsys.readouterr().err, "not another network"


class Attending(nn.Module):
    """A top that no table describes: attention over the positions of a picture, its mean beside the largest values."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)
        self.norm, self.last = nn.BatchNorm1d(64), nn.Linear(64, toy.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).transpose(1, 2)
        seen, _ = self.attention(tokens, tokens, tokens, need_weights=False)
        return self.last(self.norm(torch.cat([seen.mean(1), tokens.amax(1)], 1)))


@pytest.mark.parametrize("bottom", ["trained", "frozen"])
def test_the_top_may_be_any_module(
    bottom: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    data, out = toy.dataset(), tmp_path / "run"
    given: Any = {"data": data, "partition": toy.partition(data), "top": Attending()}
    settings = toy.values("semisfl", "rounds=2", "model.cut=pool1", f"clients.bottom={bottom}")
    whole = train(settings, device="cpu", **given)
    stop = StopFlag()
    train(settings, **given, device="cpu", out=out, stop=stop, observe=lambda row: stop.request())
    described = RunDirectory.open(out).config().model
    assert [layer.kind for layer in described.layers or ()] == ["conv", "relu", "pool"]
    with pytest.raises(ConfigError, match="or its top as top="):
        resume(out, device="cpu", **{**given, "top": None})
    resumed = resume(out, device="cpu", **given)
    for key in ("loss_supervised", "loss_semi"):
        assert resumed.history[key] == whole.history[key]
    Image.new("RGB", (12, 12)).save(tmp_path / "photo.png")
    for command in ("predict", "evaluate --data digits", "export --to onnx"):
        name, *more = command.split()
        words = [name, str(out), *more, *[str(tmp_path)][: name == "predict"]]
        assert main(words) == 2 and "load(path, top=...)" in capsys.readouterr().err
    model = load(out / "latest.safetensors", top=given["top"])
    assert ServedModel.of(model).downloadable, "a device of `classify` needs the bottom alone, too"
    answer = model.probabilities(data.test_images)
    assert torch.equal(answer, predict(resumed.model, data.test_images, data))


def test_devices_need_no_table_of_the_top() -> None:
    """Simulated clients, and devices that build the bottom from a run's terms, compute the same."""
    data, losses = toy.dataset(), []
    for make_fleet in (None, Oracle):
        torch.manual_seed(0)
        settings = toy.values("semisfl", "model.cut=pool1")
        run = assemble(
            settings,
            data,
            toy.partition(data),
            top=Attending(),
            device="cpu",
            make_fleet=make_fleet,
        )
        losses.append([run.method.round(index).loss_semi for index in range(2)])
    assert losses[0] == losses[1]


def test_a_server_says_at_its_start_that_devices_cannot_build_code() -> None:
    data = toy.dataset()
    images = Partition(labeled=toy.partition(data).labeled, clients=())
    server = NetworkOptions("127.0.0.1:0", None, insecure_loopback=True)
    settings = toy.values("fedswitch", "model.cut=pool1").in_fleet("network")
    with pytest.raises(ConfigError, match="devices cannot build this model"):
        assemble(settings, data, images, top=Attending(), device="cpu", network=server)


def test_a_top_that_a_table_describes_is_part_of_the_table(tmp_path: Path) -> None:
    data = toy.dataset()
    given: Any = {"data": data, "partition": toy.partition(data), "device": "cpu"}
    top = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, toy.CLASSES)]
    settings = toy.values("supervised", "model.cut=pool1", "rounds=1")
    train(settings, top=top, out=tmp_path / "run", **given)
    resume(tmp_path / "run", top=top, **given)
    resume(tmp_path / "run", **given)
    model = load(tmp_path / "run")
    assert model.description.layers is not None and len(model.description.layers) == 6
