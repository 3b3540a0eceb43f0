"""Configuration: overrides, and mistakes, each in one line that names the key, the value and the fix."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from semisfl import resume, seeds, train
from semisfl.settings import config, presets
from semisfl.settings.catalog import AGGREGATES, METHODS
from semisfl.settings.config import Config, ConfigError, known_keys, parse
from semisfl.settings.sections import needed_confidence
from semisfl.settings.toml import to_toml
from semisfl.stopping import StopFlag
from tests import toy

BASE = {"clients": {"total": 10, "active": 5}}


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("clients.active=40", "clients.active = 40 exceeds clients.total = 10; lower"),
        ("network.quorum=6", "network.quorum = 6 exceeds clients.active = 5; lower"),
        (
            "optimizer.lr_min=0.5",
            "optimizer.lr_min = 0.5 exceeds optimizer.lr = 0.02; set optimizer.lr_min too",
        ),
        (
            "controller.period=25",
            "controller.period = 25 must be a multiple of 10, or below 20",
        ),
        ("clinets.active=4", "unknown key 'clinets'; did you mean 'clients'?"),
        ("clients.activ=4", "unknown key 'clients.activ'; did you mean 'clients.active'?"),
        ("zzz=1", "unknown key 'zzz'; `semisfl show digits` lists all keys"),
        ("rounds=many", "rounds = 'many': should be a valid integer"),
        ("data=1", "data = 1: data is a section; set a key in it"),
        ("data.partition=iid", "data.partition = 'iid': data.partition is a section"),
        ("rounds=2.5", "rounds = 2.5: should be a valid integer"),
        ("rounds=true", "rounds = True: should be a valid integer"),
        ("clients.batch=true", "clients.batch = True: should be a valid integer"),
        ("optimizer.lr=true", "optimizer.lr = True: should be a valid number"),
        ("stop.target=false", "stop.target = False: should be a valid number"),
        ("model.cut=1.5", "model.cut.int = 1.5: should be a valid integer"),
        ("rounds=0", "rounds = 0: should be greater than or equal to 1"),
        (f"server.steps={10**20}", f"server.steps = {10**20}: should be at most {2**53}"),
        ("sinks=tensorboard", "sinks = 'tensorboard': should be a list, [\"...\"]"),
        ("data.validation=0", "data.validation = 0: should be greater than 0, or none"),
        ("stop.patience=0", "stop.patience = 0: should be greater than or equal to 1, or none"),
        ("seed=-1", "seed = -1: should be greater than or equal to 0"),
        ("optimizer.lr=0", "optimizer.lr = 0: should be greater than 0"),
        ("optimizer.lr=inf", "optimizer.lr = inf: should be a finite number"),
        ("fedswitch.iid_threshold=nan", "fedswitch.iid_threshold = nan: should be"),
        ("optimizer.lr=nan", "optimizer.lr = nan: should be a finite number"),
        ("optimizer.momentum=1", "optimizer.momentum = 1: should be less than 1"),
        (
            "semisfl.confidence_threshold=1.5",
            "semisfl.confidence_threshold = 1.5: should be a number from 0 to 1, or 'by_classes'",
        ),
        (
            "teacher.ema_decay=-0.1",
            "teacher.ema_decay = -0.1: should be greater than or equal to 0",
        ),
        ("method=fedavg", "method = 'fedavg' is not known; use semisfl, supervised, probe, semifl"),
        ("wire.models=zip", "wire.models = 'zip' is not known; use fp32, fp16"),
        ("policy.codec=zip", "policy.codec = 'zip' is not known; use fp32, fp16"),
        (
            "semisfl.queue=double",
            "semisfl.queue = 'double' is not known; use 'two_level' or 'single'",
        ),
        ("data.partition.alpha=0", "data.partition.alpha = 0: should be greater than 0"),
        ("clients=4", "clients = 4"),
        ("data.labeled=0", "data.labeled = 0: should be greater than or equal to 1"),
    ],
)
def test_mistakes(assignment: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        config.parse(config.override(BASE, [assignment]))
    assert message in str(error.value)
    assert "\n" not in str(error.value) and "pydantic" not in str(error.value)


def test_several_mistakes_are_all_named() -> None:
    with pytest.raises(ConfigError) as error:
        config.parse({"rounds": 0, "seed": -1, "clients": {"colour": 1}})
    assert all(key in str(error.value) for key in ("rounds", "seed", "clients.colour"))


@pytest.mark.parametrize(
    ("assignment", "path", "value"),
    [
        ("rounds=12", "rounds", 12),
        ("optimizer.lr=5e-1", "optimizer.lr", 5e-1),
        ("data.name=cifar10", "data.name", "cifar10"),
        ('data.name="a=b"', "data.name", "a=b"),
        ("data.name=folder/x=1", "data.name", "folder/x=1"),
        ("model.cut=3", "model.cut", 3),
        ("model.cut=relu2", "model.cut", "relu2"),
        ("model.cut=none", "model.cut", None),
        ("model.projector=none", "model.projector", "none"),
        ("data.size=none", "data.size", None),
        ("data.augment.flip=false", "data.augment.flip", False),
        (" clients.active = 3 ", "clients.active", 3),
        ("semisfl.confidence_rule='>'", "semisfl.confidence_rule", ">"),
    ],
)
def test_overrides(assignment: str, path: str, value: Any) -> None:
    result: Any = config.parse(config.override({}, [assignment]))
    for name in path.split("."):
        result = getattr(result, name)
    assert result == value and type(result) is type(value)


def test_overrides_leave_their_input_alone_and_the_last_one_counts() -> None:
    values = {"data": {"name": "digits"}}
    changed = config.override(values, ["data.name=a", "data.name=b"])
    assert changed["data"]["name"] == "b" and values == {"data": {"name": "digits"}}


@pytest.mark.parametrize("assignment", ["rounds", "=3", " = 3", "rounds.deep=3"])
def test_wrong_overrides_are_refused(assignment: str) -> None:
    with pytest.raises(ConfigError, match="--set"):
        config.override({"rounds": 4}, [assignment])


def test_files(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('rounds = 3\n[optimizer]\nlr = 5e-2\n[model]\ncut = "none"\n')
    parsed = config.parse(config.read(file))
    assert (parsed.rounds, parsed.optimizer.lr, parsed.model.cut) == (3, 5e-2, None)
    for text in (b"rounds = = 3", b"rounds = " + b"[" * 5000, b"\xff\xfe\x00"):
        file.write_bytes(text)
        with pytest.raises(ConfigError, match="is not TOML"):
            config.read(file)
    with pytest.raises(ConfigError, match="cannot read"):
        config.read(tmp_path / "absent.toml")


def test_paper_settings() -> None:
    """Compare the presets with the paper's table of settings."""
    table = {
        "svhn": ("cnn", 1000, 64, 64, 0, "weak"),
        "cifar10": ("alexnet", 4000, 64, 64, 0, "strong"),
        "stl10": ("vgg13", 5000, 64, 32, 0, "strong"),
        "image100": ("vgg16", 5000, 128, 64, 20, "strong"),
    }
    for name, (model, labeled, server, client, before, view) in table.items():
        chosen = presets.preset(name)
        assert (chosen.model.name, chosen.data.labeled) == (model, labeled)
        assert (chosen.server.batch, chosen.clients.batch) == (server, client)
        assert (chosen.server.pretrain_rounds, chosen.labeled_view) == (before, view)
        assert (chosen.rounds, chosen.clients.total, chosen.clients.active) == (1000, 30, 10)
        assert (chosen.server.steps, chosen.clients.steps) == (100, 50)
    # As the code of (FL)² and of SemiFL has them.
    own = presets.preset("cifar10+semifl_original")
    assert (own.server.batch, own.server.steps, own.clients.batch) == (250, 80, 10)
    assert own.optimizer.keep_momentum
    field = presets.preset("field")
    assert (field.server.batch, field.server.steps, field.clients.batch) == (10, 20, 32)
    for chosen in (own, field, presets.preset("field+semifl_original")):
        assert (chosen.rounds, chosen.clients.total, chosen.clients.active) == (800, 100, 10)
        assert (chosen.clients.epochs, chosen.model.name) == (5, "wrn-28-2")
        assert (chosen.optimizer.lr, chosen.optimizer.lr_min) == (0.03, 0.0)
    default: Any = config.parse({})
    assert (default.semisfl.temperature, default.semisfl.confidence_threshold) == (0.2, 0.95)
    assert (default.semisfl.queue_size, default.model.projection, default.teacher.ema_decay) == (
        1024,
        128,
        0.99,
    )
    assert (default.controller.step_decay, default.controller.min_steps_factor) == (1.5, 8)
    optimizer = default.optimizer
    assert (optimizer.lr, optimizer.lr_min, optimizer.momentum) == (0.02, 0.005, 0.9)
    assert optimizer.weight_decay == 5e-4


def test_a_configuration_made_directly_has_the_sections_of_methods() -> None:
    made: Any = Config(rounds=3)
    assert made == config.parse({"rounds": 3}) and made.semisfl.temperature == 0.2
    assert made.model_copy(update={"rounds": 30}) == Config() == config.parse({})
    assert Config.model_validate({"rounds": 3}) == made
    changed: Any = Config(method="fedswitch", fedswitch={"iid_threshold": 2.0})  # type: ignore[call-arg]
    assert changed.fedswitch.iid_threshold == 2.0


def test_every_field_explains_itself() -> None:
    def walk(section: type[Any]) -> None:
        for name, field in section.model_fields.items():
            if isinstance(field.annotation, type) and issubclass(field.annotation, config.Section):
                walk(field.annotation)
            else:
                assert field.description, f"{section.__name__}.{name}"

    for kind in (Config, *(type(section) for section in Config().own_sections)):
        walk(kind)
    promised = "method rounds seed data.name data.labeled data.partition.kind data.partition.alpha"
    promised += (
        " clients.total clients.active clients.batch clients.steps server.batch server.steps"
    )
    assert {*promised.split(), "model.name", "model.cut"} <= set(config.known_keys(Config()))


def test_fewer_classes_need_more_confidence() -> None:
    needed = {classes: needed_confidence("by_classes", classes) for classes in (2, 4, 10, 1000)}
    assert needed == pytest.approx({2: 0.8, 4: 0.675, 10: 0.6, 1000: 0.6})
    assert needed_confidence(0.0, 2) == 0.0 and needed_confidence(0.95, 1000) == 0.95


def every_key() -> list[str]:
    """Return every setting: the common ones, those of all methods and those of all rules."""
    chosen = [parse({"method": name}) for name in METHODS]
    chosen += [parse({"robust": {"aggregate": name}}) for name in AGGREGATES]
    return list(dict.fromkeys(key for one in chosen for key in known_keys(one)))


def test_there_are_few_settings() -> None:
    """A setting stays only if a run shows that it pays, the paper has it, or a user must say it."""
    keys = every_key()
    assert len(keys) == len(set(keys)) <= 98, len(keys)


def test_a_mistake_in_another_methods_section_is_still_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'fedmatch\.helper'; did you mean"):
        parse({"method": "semisfl", "fedmatch": {"helper": 1}})
    with pytest.raises(ConfigError, match=r"robust\.krum\.attackers = 0\.7"):
        parse({"robust": {"aggregate": "mean", "krum": {"attackers": 0.7}}})


def test_a_run_writes_its_own_methods_section_alone() -> None:
    for method in ("semisfl", "fedmatch", "supervised", "fedswitch-sl"):
        written = tomllib.loads(to_toml(parse({"method": method})))
        own = {"supervised": set(), "probe": set(), "fedswitch-sl": {"fedswitch"}}.get(
            method, {method}
        )
        assert {entry.section for entry in METHODS.values()} & written.keys() == own
        assert "krum" not in written["robust"]


def test_seeds_that_no_float_holds_are_kept_to_the_last_digit(tmp_path: Path) -> None:
    """TOML and JSON both carry them, and two that one float would stand for give two runs."""
    seed = 2**60 + 1
    chosen = parse({"seed": seed})
    assert parse(tomllib.loads(to_toml(chosen))) == chosen
    assert parse(json.loads(chosen.model_dump_json())).seed == seed
    assert config.override({}, [f"seed={seed}"]) == {"seed": seed}
    assert float(seed) == float(seed - 1)
    assert seeds.derive(seed, "batches") != seeds.derive(seed - 1, "batches")
    small = ("rounds=2", *toy.FLAT)
    whole = train(toy.values("semisfl", f"seed={seed}", *small), data=toy.dataset(), device="cpu")
    other = train(
        toy.values("semisfl", f"seed={seed - 1}", *small), data=toy.dataset(), device="cpu"
    )
    losses = [run.history["loss_supervised"] for run in (whole, other)]
    assert losses[0] != losses[1]
    begun = toy.values("semisfl", f"seed={seed}", *small)
    stop = StopFlag()
    how: dict[str, Any] = {"data": toy.dataset(), "device": "cpu"}
    train(begun, out=tmp_path / "run", stop=stop, observe=lambda row: stop.request(), **how)
    resumed = resume(tmp_path / "run", **how)
    assert resumed.history["loss_supervised"] == losses[0]


@pytest.mark.parametrize("name", ["images", "photos", "digits"])
def test_weights_bring_rates_in_place_of_a_presets(name: str) -> None:
    weights = ["model.name=efficientnet-lite0", "model.weights=imagenet", "semisfl.align=client"]
    for more, lr in ([], 3e-3), (["optimizer.lr=0.001"], 1e-3):
        values = config.override(presets.values_of(name), [*weights, *more])
        rates = config.parse(presets.complete(name, values)).optimizer
        assert (rates.kind, rates.lr, rates.lr_pretrained, rates.lr_min) == ("adamw", lr, 3e-4, 0)
    plain = config.override(
        presets.values_of(name), [*weights, "optimizer.kind=sgd", "optimizer.lr=0.01"]
    )
    assert config.parse(presets.complete(name, plain)).optimizer.kind == "sgd"
