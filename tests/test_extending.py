"""A method, a data set, a codec and an aggregate of another package: found by entry point or by path, in every command."""

import json
import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from semisfl.cli.main import main
from semisfl.costs.rounds import cost_of
from semisfl.data import sources
from semisfl.fleet.aggregate import combine
from semisfl.fleet.codec import codec_named
from semisfl.fleet.held_back import HeldBack
from semisfl.methods.supervised import Supervised
from semisfl.metrics import MethodMetrics
from semisfl.models import split as models
from semisfl.runs.loop import run_rounds
from semisfl.runs.start import train
from semisfl.settings import config, lookup
from semisfl.settings.config import ConfigError
from semisfl.settings.toml import commented_toml, to_toml
from tests import processes, toy
from tests.packages import EXAMPLE, NAME, PLACE, entry_points_of, imported_anew, install_package
from tests.sizes import sizes_of

ROOT = Path(__file__).resolve().parents[1]
Install = Callable[[Path, Mapping[str, Mapping[str, str]]], None]
TINY = ["rounds=2", "clients.total=3", "clients.active=2", "clients.batch=4", "clients.steps=2"]
TINY += ["server.batch=4", "server.steps=2", "data.labeled=20", *toy.FLAT]


@pytest.fixture(autouse=True)
def inside_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    with imported_anew("fedavg_fixmatch", "other", "mypackage"):
        yield


@pytest.fixture
def reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the example on Python's path without installing it."""
    monkeypatch.syspath_prepend(str(EXAMPLE))


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    return partial(install_package, tmp_path / "site", monkeypatch)


@pytest.fixture
def installed(install: Install) -> None:
    install(EXAMPLE, entry_points_of(EXAMPLE))


def test_the_documentation_shows_the_example() -> None:
    page = (ROOT / "docs" / "own-method.md").read_text(encoding="utf-8")
    for file in sorted(EXAMPLE.rglob("*.py")):
        assert file.read_text(encoding="utf-8").strip() in page, file.name
    assert f'{NAME} = "{entry_points_of(EXAMPLE)["semisfl.methods"][NAME]}"' in page


# --- through the command line ---------------------------------------------------------------------


@pytest.mark.usefixtures("no_pictures")
def test_a_path_is_enough_to_run_show_and_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--set", *TINY, f"method={PLACE}", "fixmatch.confidence_threshold=0.2"]
    done = processes.run(
        [sys.executable, "-m", "semisfl", "run", "digits", *words, "--out", "run", "--quiet"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(EXAMPLE)])},
    )
    assert done.returncode == 0, done.stderr
    config = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert config["method"] == PLACE
    assert config["fixmatch"] == {"confidence_threshold": 0.2, "labeled_view": "weak"}
    # Rounds that a longer run still has to do are done by the same method.
    text = (tmp_path / "run" / "config.toml").read_text()
    (tmp_path / "run" / "config.toml").write_text(text.replace("rounds = 2", "rounds = 3"))
    # A run's directory may be somebody else's: it alone makes nothing be imported.
    monkeypatch.syspath_prepend(str(EXAMPLE))
    for command in (["run", "--resume", "run"], ["leakage", "run", "--quick"]):
        assert main(command) == 2
        assert f"add --allow-method {PLACE}" in " ".join(capsys.readouterr().err.split())
        assert "fedavg_fixmatch" not in sys.modules
    assert main(["run", "--resume", "run", "--quiet", "--allow-method", PLACE]) == 0
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3
    capsys.readouterr()
    assert main(["report", "run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["results"][0]["label"] == "FedAvgFixMatch"


def test_a_method_by_its_path_is_in_a_plan(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    assert main(["plan", "digits", "--methods", f"semisfl,{PLACE}", "--json"]) == 0
    both = json.loads(capsys.readouterr().out)["methods"]
    assert main(["plan", "digits", "--set", f"method={PLACE}", "--json"]) == 0
    assert both[1] in json.loads(capsys.readouterr().out)["methods"]
    assert [one["title"] for one in both] == ["SemiSFL", "FedAvg-FixMatch"]


@pytest.mark.usefixtures("installed")
def test_an_installed_method_is_taken_to_read_every_setting_but_other_methods() -> None:
    assert lookup.unread_settings(NAME) == {"semisfl", "semifl", "fedmatch", "fedswitch", "fl2"}
    assert "fixmatch" in lookup.unread_settings("semisfl")
    assert lookup.unread_settings(PLACE) == lookup.unread_settings(NAME), "named by its path"


@pytest.mark.usefixtures("installed")
def test_an_installed_method_is_listed_shown_and_priced(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["list", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["methods"]}
    assert rows[NAME]["title"] == "FedAvg-FixMatch" and rows[NAME]["note"]
    assert main(["show", "digits", "--set", f"method={NAME}", "fixmatch.labeled_view=strong"]) == 0
    output = capsys.readouterr().out
    assert 'labeled_view = "strong"         # augmentation of labelled images' in output
    assert main(["show", "digits"]) == 0
    assert "fixmatch" not in capsys.readouterr().out, "a run is readable where it is not installed"
    assert main(["plan", "digits", "--methods", "all", "--json"]) == 0
    prices = {item["method"]: item for item in json.loads(capsys.readouterr().out)["methods"]}
    assert prices[NAME]["down"] == prices["fedswitch"]["down"] // 2
    assert main(["show", "--set", f"method={NAME}", "fixmatch.confidence=1"]) != 0
    assert "did you mean 'fixmatch.confidence_threshold'" in capsys.readouterr().err


@pytest.mark.usefixtures("installed")
def test_it_is_compared_with_the_others_by_name_and_by_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--set", *TINY, "fixmatch.confidence_threshold=0.3", "--quiet", "--json"]
    assert main(["compare", "digits", "--methods", f"supervised,{NAME}", "--out", "a", *words]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [row["label"] for row in results] == ["Supervised-only", "FedAvg-FixMatch"]
    assert results[1]["note"] == "an example, not tuned"
    config = tomllib.loads((tmp_path / "a" / f"{NAME}-seed0" / "config.toml").read_text())
    assert config["fixmatch"]["confidence_threshold"] == 0.3
    other = tomllib.loads((tmp_path / "a" / "supervised-seed0" / "config.toml").read_text())
    assert "fixmatch" not in other
    assert NAME in lookup.METHODS.all(), "and `--methods all` is those"


@pytest.mark.usefixtures("reachable")
def test_a_comparison_has_settings_of_a_method_that_is_not_installed() -> None:
    values = {"fixmatch": {"confidence_threshold": 0.3}}
    with pytest.raises(ConfigError, match="unknown key 'fixmatch'"):
        config.parse(values)
    entry = lookup.method(PLACE)
    assert config.parse(values, others=[entry]) == config.parse({})
    chosen = config.parse({**values, "method": PLACE}, others=[entry])
    assert chosen.fixmatch.confidence_threshold == 0.3  # type: ignore[attr-defined]


@pytest.mark.usefixtures("reachable")
def test_it_learns_costs_what_its_formula_says_and_is_written_down_whole() -> None:
    settings = ["rounds=4", "optimizer.lr=0.1", "fixmatch.confidence_threshold=0.5"]
    experiment = toy.assemble(PLACE, *settings)
    assert run_rounds(experiment).accuracy > 30
    sizes = sizes_of(models.split(toy.network(), (3, 12, 12), projection=8), 8, 4)
    cost = cost_of(lookup.method(PLACE), sizes, experiment.config)
    assert cost is not None and experiment.fleet.traffic.total() == 4 * 2 * cost.total > 0
    for text in (to_toml(experiment.config), commented_toml(experiment.config)):
        assert config.parse(tomllib.loads(text)) == experiment.config


# --- mistakes -------------------------------------------------------------------------------------

OTHER = """
from semisfl.settings.catalog import NamedCodec, NamedData, NamedMethod
from semisfl.settings.sections import Section

class Bare:
    def round(self, round_index): ...

class Work:
    name = "half"

class Mine(Section):
    size: int = 3

def row(**changes):
    return NamedMethod(name="x", title="X", **{"code": "other:Bare", **changes})

TAKEN = row(section="semisfl", settings="other:Mine")
COMMON = row(section="clients", settings="other:Mine")
NAMELESS = row(settings="other:Mine")
NO_SETTINGS = row(section="mine", settings="other:Work")
HALF = row(works=("other:Work",))
FINE = row(section="mine", settings="other:Mine")
NUMBER = 3
"""


@pytest.fixture
def other(tmp_path: Path) -> Path:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "other.py").write_text(OTHER)
    (tmp_path / "package" / "broken.py").write_text("1 / 0\n")
    return tmp_path / "package"


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("other", r"method = 'other' is not known; use semisfl, .*, or package.module:Class"),
        ("nowhere.at_all:Mine", r"nowhere.at_all cannot be imported \(ModuleNotFound.*install"),
        ("broken:Mine", r"broken cannot be imported \(ZeroDivisionError"),
        ("other:Nothing", r"other has no 'Nothing'; it has .*Bare"),
        ("other:NUMBER", r"other:NUMBER is int, neither a class nor a NamedMethod"),
        ("other:TAKEN", r"calls its section 'semisfl', which is another method's; rename it"),
        ("other:COMMON", r"calls its section 'clients', as every run has one; rename it"),
        ("other:NAMELESS", r"has settings but section = None"),
        ("other:NO_SETTINGS", r"other:Work is no settings class; derive it"),
    ],
)
def test_a_method_that_cannot_be_is_said_in_one_line(
    method: str, reason: str, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(other))
    with pytest.raises(ConfigError) as error:
        config.parse({"method": method})
    assert re.search(reason, str(error.value)) and "\n" not in str(error.value)


def test_what_a_class_lacks_is_named(other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(other))
    with pytest.raises(ConfigError, match="no method: it lacks tested, state_dict, load_state_di"):
        lookup.method_class(lookup.method("other:Bare"))
    with pytest.raises(ConfigError, match="no client half: it lacks answers, start, step, finish"):
        lookup.works(lookup.method("other:HALF"))
    with pytest.raises(ConfigError, match=r"unknown key 'mine\.sise'; did you mean 'mine.size'"):
        config.parse({"method": "other:FINE", "mine": {"sise": 1}})


DERIVED = """
from dataclasses import replace
from semisfl.methods.semisfl import SemiSFL
from semisfl.settings.catalog import METHODS

class Mine(SemiSFL):
    entry = replace(METHODS["semisfl"], name="mine", title="Mine")

class Bare(SemiSFL):
    pass

class Old(SemiSFL):
    row = METHODS["semisfl"]
"""


def test_a_method_is_derived_from_one_of_this_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other.py").write_text(DERIVED)
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = toy.values("other:Mine", "rounds=1", "semisfl.temperature=0.5", *toy.FLAT)
    result = train(settings, data=toy.dataset(), device="cpu")
    ours = toy.values("semisfl", "rounds=1", "semisfl.temperature=0.5", *toy.FLAT)
    assert result.accuracy == train(ours, data=toy.dataset(), device="cpu").accuracy
    with pytest.raises(
        ConfigError, match=r"other:Bare asks for SemiSFLSettings, which .* attribute `entry`"
    ):
        train(toy.values("other:Bare", *toy.FLAT), data=toy.dataset(), device="cpu")
    with pytest.raises(
        ConfigError, match=r"other:Old is of 0\.1\.0: call its catalog entry `entry`"
    ):
        train(toy.values("other:Old", *toy.FLAT), data=toy.dataset(), device="cpu")


def test_what_a_class_does_wrong_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = toy.values("supervised", "rounds=1", *toy.FLAT)
    monkeypatch.setattr(Supervised, "round", lambda self, round_index: {"loss": 1.0})
    with pytest.raises(
        ValueError, match=r"round\(\) of Supervised returned a dict; it must return"
    ):
        train(settings, data=toy.dataset(), device="cpu")
    one = MethodMetrics(loss_supervised=1.0)
    monkeypatch.setattr(Supervised, "round", lambda self, round_index: one)
    for tested in ({}, torch.nn.Sequential(torch.nn.Flatten())):
        monkeypatch.setattr(Supervised, "tested", lambda self, tested=tested: tested)
        with pytest.raises(ConfigError, match=r"tested\(\) of supervised names no model"):
            train(settings, data=toy.dataset(), device="cpu")


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ({3: 0.5}, "the state /method/kept has the key 3; make every key a text"),
        ({"of": [np.float32(1)]}, "the state /method/kept/of/0 is of type float32, which a check"),
        ({1}, "the state /method/kept is of type set, which a checkpoint cannot hold"),
    ],
)
def test_a_state_that_would_come_back_changed_is_refused_in_the_first_round(
    kept: object, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JSON turns keys into texts, so a method would not find what it kept under the number 3."""
    monkeypatch.setattr(Supervised, "state_dict", lambda self: {"kept": kept})
    settings = toy.values("supervised", "rounds=1", *toy.FLAT)
    with pytest.raises(ValueError, match=re.escape(message)):
        train(settings, data=toy.dataset(), device="cpu")


def test_a_broken_package_does_not_take_the_others_down(
    other: Path, install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    groups = ("methods", "data", "codecs", "aggregates", "sinks")
    points: dict[str, dict[str, str]] = {
        f"semisfl.{group}": {"bad": "broken:Mine"} for group in groups
    }
    install(other, points | {"semisfl.methods": {"bad": "broken:Mine", "semisfl": "other:FINE"}})
    assert main(["list", "--json"]) == 0
    printed = capsys.readouterr()
    listed = json.loads(printed.out)
    assert not any(one["name"] == "bad" for group in groups for one in listed[group])
    assert printed.err.count("bad is left out: ") == len(groups)
    assert lookup.method("semisfl").title == "SemiSFL", "a name of ours stays ours"
    with pytest.raises(ConfigError, match="cannot be imported"):
        config.parse({"method": "bad"})


# --- data sets and codecs -------------------------------------------------------------------------

SHAPES = """
from semisfl.settings.catalog import NamedAggregate, NamedCodec, NamedData

RULE = NamedAggregate(name="first", code="other_codec:first", summary="the first client's")
LOOK = {"shape": (1, 8, 8), "classes": 2, "mean": (0.25,), "std": (0.5,)}
SET = NamedData(name="shapes", summary="circles and squares", file="other_data:shapes.npz", **LOOK)
ELSEWHERE = NamedData(name="elsewhere", summary="nowhere", **LOOK)
CODEC = NamedCodec(name="halves", code="other_codec:HALVES", summary="to the next half")
WRONG = NamedCodec(name="wrong", code="other_rows:LOOK", summary="no codec")
SHORT = NamedCodec(name="short", code="other_codec:SHORT", summary="counts half of its bytes")
FLAT = NamedCodec(name="flat", code="other_codec:FLAT", summary="loses the shape")
MEAN = NamedAggregate(name="one_number", code="other_codec:one_number", summary="a mean of everything")
"""
HALVES = """
import torch
from semisfl.fleet.codec import Cast

class Halves(Cast):
    def encode(self, tensor):
        return (tensor.detach().mul(2).round().div(2).to(self.dtype),)

HALVES = Halves("halves", torch.float16)

class Short(Cast):
    def layout(self, shape):
        return ((tuple(shape), torch.float16),)

class Flat(Cast):
    def decode(self, parts, shape, dtype=torch.float32):
        return parts[0].flatten()

SHORT, FLAT = Short("short", torch.float32), Flat("flat", torch.float32)

def one_number(updates, settings):
    from semisfl.fleet.aggregate import Combined
    return Combined(updates.mean(), {})

def first(updates, settings):
    from semisfl.fleet.aggregate import Combined
    return Combined(updates[0], {1: "it is not the first"})
"""


@pytest.fixture
def brought(tmp_path: Path, install: Install) -> None:
    folder = tmp_path / "brought"
    (folder / "other_data").mkdir(parents=True)
    (folder / "other_data" / "__init__.py").write_text("")
    (folder / "other_rows.py").write_text(SHAPES)
    (folder / "other_codec.py").write_text(HALVES)
    parts = {
        "x": np.arange(20 * 64, dtype=np.uint8).reshape(20, 8, 8),
        "labels": np.arange(20) % 2,
        "split": np.array([0] * 16 + [1] * 4),
        "classes": np.array(["circle", "square"]),
    }
    np.savez(folder / "other_data" / "shapes.npz", **parts)
    data = {"shapes": "other_rows:SET", "elsewhere": "other_rows:ELSEWHERE"}
    codecs = {"halves": "CODEC", "wrong": "WRONG", "short": "SHORT", "flat": "FLAT"}
    codecs = {name: f"other_rows:{entry}" for name, entry in codecs.items()}
    rules = {"first": "other_rows:RULE", "one_number": "other_rows:MEAN"}
    groups = {"semisfl.data": data, "semisfl.codecs": codecs, "semisfl.aggregates": rules}
    install(folder, groups)


@pytest.mark.usefixtures("brought")
def test_a_data_set_of_another_package(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = sources.load("shapes", cache=tmp_path / "cache")
    assert (dataset.shape, dataset.classes, dataset.mean) == (
        (1, 8, 8),
        ("circle", "square"),
        (0.25,),
    )
    assert main(["list", "--json"]) == 0
    names = [row["name"] for row in json.loads(capsys.readouterr().out)["data"]]
    assert names[-2:] == ["shapes", "elsewhere"]
    with pytest.raises(ValueError, match=r"known set \(digits, .*, shapes, elsewhere\)"):
        sources.load("absent")
    monkeypatch.delenv("SEMISFL_DATA", raising=False)
    with pytest.raises(ValueError, match=r"elsewhere could not be fetched .*SEMISFL_DATA"):
        sources.load("elsewhere")


def test_the_packed_file_of_the_page(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    (code,) = (
        block
        for block in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
        if "savez" in block
    )
    exec(code, {})
    data = sources.load("shapes.npz", cache=tmp_path / "cache")
    assert (data.classes, len(data.images), len(data.test_images)) == (
        ("circle", "square"),
        150,
        50,
    )
    with np.load("shapes.npz") as arrays:
        parts = dict(arrays)
    parts["labels"][10:20] = -1
    for part in (0, 1):
        rows = {name: parts[name][part::2] for name in ("x", "labels", "split")}
        np.savez(f"two_{part}of2.npz", classes=parts["classes"], **rows)
    for name in ("two", "two_1of2.npz"):
        joined = sources.load(name, cache=tmp_path / "cache")
        assert len(joined.images) == 150 and int((joined.labels < 0).sum()) == 10


@pytest.mark.usefixtures("brought")
def test_a_codec_of_another_package() -> None:
    chosen = config.parse({"wire": {"gradients": "halves"}}).wire.gradients
    crossed = codec_named(chosen).roundtrip(torch.tensor([0.3, 0.7, 1.2]))
    assert crossed.tolist() == [0.5, 0.5, 1.0]
    with pytest.raises(ConfigError, match="codec 'wrong' is dict, not a semisfl"):
        codec_named("wrong")


@pytest.mark.usefixtures("brought")
def test_a_codec_sends_what_its_layout_says_and_gives_the_shape_back() -> None:
    """Bytes are counted by the layout: a wrong one would be a wrong result, without an error."""
    with pytest.raises(
        ConfigError, match=r"codec 'short': encode makes .*float32.*, its layout .*float16"
    ):
        codec_named("short")
    with pytest.raises(ConfigError, match=r"codec 'flat': decode makes .*\[12\].*\[3, 4\]"):
        codec_named("flat")


@pytest.mark.usefixtures("brought")
def test_an_aggregation_rule_returns_one_update() -> None:
    states = {client: {"w": torch.full((2, 2), float(client))} for client in range(3)}
    settings = config.parse({"robust": {"aggregate": "one_number"}}).robust
    with pytest.raises(
        ConfigError, match=r"robust.aggregate = 'one_number' returned .*\[\]; .*\[4\]"
    ):
        combine(settings, states, states[0], HeldBack())


def test_an_aggregate_of_the_docs_has_settings_of_its_own(tmp_path: Path, install: Install) -> None:
    """Its section is written, read again and refused where it is wrong."""
    page = (Path(__file__).parent.parent / "docs" / "extending.md").read_text(encoding="utf-8")
    block = page[page.index("# mypackage/rules.py") :].partition("```")[0]
    folder = tmp_path / "rules"
    (folder / "mypackage").mkdir(parents=True)
    (folder / "mypackage" / "__init__.py").write_text("")
    (folder / "mypackage" / "rules.py").write_text(block)
    names = dict.fromkeys(("nearest", "features"), "mypackage.rules:NEAREST")
    install(folder, {"semisfl.aggregates": names})
    with pytest.raises(ConfigError, match="'features' has the name of a setting; rename the rule"):
        config.parse({"robust": {"aggregate": "features"}})
    chosen = ("robust.aggregate=nearest", "robust.nearest.kept=1", "robust.krum.attackers=0.1")
    experiment = toy.assemble("semisfl", "rounds=1", "clients.active=3", *chosen)
    (row,) = run_rounds(experiment).rounds
    assert list(row["held_back"].values()) == ["its update is far from the mean"] * 2
    text = to_toml(experiment.config)
    assert "[robust.nearest]\nkept = 1" in text and "krum" not in text
    assert config.parse(tomllib.loads(text)) == experiment.config
    with pytest.raises(ConfigError, match=r"unknown key 'robust\.nearest\.keep'; did you mean"):
        config.parse({"robust": {"aggregate": "nearest", "nearest": {"keep": 1}}})


@pytest.mark.usefixtures("brought")
def test_an_aggregate_of_another_package(capsys: pytest.CaptureFixture[str]) -> None:
    experiment = toy.assemble("semisfl", "rounds=1", "clients.active=3", "robust.aggregate=first")
    (row,) = run_rounds(experiment).rounds
    assert list(row["held_back"].values()) == ["it is not the first"]
    assert main(["list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["aggregates"][-2]["name"] == "first"
