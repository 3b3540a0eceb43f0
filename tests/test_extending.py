"""A method, a data set, a codec and an aggregate of another package: found by path, in every command."""

import copy
import json
import os
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from semisfl.cli.main import main
from semisfl.costs.rounds import cost_of
from semisfl.data import sources
from semisfl.fleet.aggregate import combine
from semisfl.fleet.base import HeldBack
from semisfl.fleet.codec import codec_named
from semisfl.methods.supervised import Supervised
from semisfl.models import split as models
from semisfl.runs.loop import run_rounds
from semisfl.runs.start import train
from semisfl.settings import config, lookup
from semisfl.settings.config import ConfigError
from semisfl.settings.toml import commented_toml, to_toml
from tests import processes, toy
from tests.packages import EXAMPLE, PLACE, SOFT, imported_anew, written_in_the_documentation
from tests.sizes import sizes_of

ROOT = Path(__file__).resolve().parents[1]
TINY = ["rounds=2", "clients.total=3", "clients.active=2", "clients.batch=4", "clients.steps=2"]
TINY += ["server.batch=4", "server.steps=2", "data.labeled=20", *toy.FLAT]


@pytest.fixture(autouse=True)
def inside_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    with imported_anew(
        "fedavg_fixmatch", "other", "other_rows", "other_codec", "other_data", "mypackage"
    ):
        yield


@pytest.fixture
def reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the example on Python's path without installing it."""
    monkeypatch.syspath_prepend(str(EXAMPLE))


def test_the_documentation_shows_the_example() -> None:
    page = (ROOT / "docs" / "own-method.md").read_text(encoding="utf-8")
    (file,) = EXAMPLE.rglob("method.py")
    assert file.read_text(encoding="utf-8").strip() in page
    assert PLACE in page


# --- through the command line ---------------------------------------------------------------------


@pytest.mark.usefixtures("no_pictures")
def test_a_path_is_enough_to_run_show_and_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--set", *TINY, f"method={PLACE}", "fixmatch.confidence_threshold=0.2"]
    done = processes.run(
        [sys.executable, "-m", "semisfl", "run", "digits", *words, "--out", "run"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(EXAMPLE)])},
    )
    assert done.returncode == 0, done.stderr
    assert "FedAvg-FixMatch: round 2/2" in done.stderr and "FedAvg-FixMatch: test" in done.stdout
    # A table has the title also where the package is not installed.
    assert main(["report", "run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["results"][0]["label"] == "FedAvg-FixMatch"
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


def test_a_method_by_its_path_is_in_a_plan(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    own = "fixmatch.confidence_threshold=0.9"
    assert main(["plan", "digits", "--methods", f"semisfl,{PLACE}", "--set", own, "--json"]) == 0
    both = json.loads(capsys.readouterr().out)["methods"]
    assert main(["plan", "digits", "--set", f"method={PLACE}", own, "--json"]) == 0
    assert both[1] in json.loads(capsys.readouterr().out)["methods"]
    assert [one["title"] for one in both] == ["SemiSFL", "FedAvg-FixMatch"]


@pytest.mark.usefixtures("reachable")
def test_it_is_compared_with_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--set", *TINY, "fixmatch.confidence_threshold=0.3", "--quiet", "--json"]
    methods = ["--methods", f"supervised,{PLACE}"]
    assert main(["compare", "digits", *methods, "--out", "a", *words]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [row["label"] for row in results] == ["Supervised-only", "FedAvg-FixMatch"]
    assert results[1]["note"] == "an example, not tuned"
    config = tomllib.loads((tmp_path / "a" / "fedavg-fixmatch-seed0" / "config.toml").read_text())
    assert config["fixmatch"]["confidence_threshold"] == 0.3
    other = tomllib.loads((tmp_path / "a" / "supervised-seed0" / "config.toml").read_text())
    assert "fixmatch" not in other
    assert "fixmatch" not in lookup.unread_settings(PLACE) and "fl2" in lookup.unread_settings(
        PLACE
    )


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


def test_a_split_method_of_one_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It learns, is limited, resumes exactly and costs what its formula says."""
    written_in_the_documentation(tmp_path, "soft")
    monkeypatch.syspath_prepend(str(tmp_path))
    experiment = toy.assemble(SOFT, "rounds=4", "optimizer.lr=0.1")
    result = run_rounds(experiment)
    assert result.accuracy > 30 and 0 < result.rounds[-1]["mask_rate"] < 1
    sizes = sizes_of(models.split(toy.network(), (3, 12, 12), projection=8), 8, 4)
    cost = cost_of(lookup.method(SOFT), sizes, experiment.config)
    assert cost is not None and experiment.fleet.traffic.total() == 4 * 2 * cost.total > 0
    limits = ("rounds=2", "clients.active=3", "robust.features=limited")
    first, second = (toy.assemble(SOFT, *limits) for _ in range(2))
    rows = [first.method.round(0)]
    state = copy.deepcopy(first.method.state_dict())
    rows.append(first.method.round(1))
    second.method.load_state_dict(state)
    assert second.method.round(1) == rows[1]
    assert rows[0].loss_semi != rows[1].loss_semi and lookup.title_of(SOFT) == "Soft weights"


# --- mistakes -------------------------------------------------------------------------------------

OTHER = """
from semisfl.settings.catalog import NamedCodec, NamedData, NamedMethod
from semisfl.settings.sections import Section

class Mine(Section):
    size: int = 3

class Bare:
    entry = NamedMethod(name="x", title="X", code="other:Bare", section="mine", settings="other:Mine")

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
        ("other", r"method = 'other' is not known; use semisfl, .*, or package.module:NAME"),
        (
            "nowhere.at_all:Mine",
            r"nowhere.at_all:Mine' cannot be imported \(ModuleNotFound.*install",
        ),
        ("broken:Mine", r"broken:Mine' cannot be imported \(ZeroDivisionError"),
        ("other:Nothing", r"other:Nothing' cannot be imported .*no attribute 'Nothing'"),
        ("other:NUMBER", r"other:NUMBER' is no NamedMethod"),
    ],
)
def test_a_method_that_cannot_be_is_said_in_one_line(
    method: str, reason: str, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(other))
    with pytest.raises(ConfigError) as error:
        config.parse({"method": method})
    assert re.search(reason, str(error.value)) and "\n" not in str(error.value)
    with pytest.raises(ConfigError, match=r"unknown key 'mine\.sise'; did you mean 'mine.size'"):
        config.parse({"method": "other:Bare", "mine": {"sise": 1}})


DERIVED = """
from dataclasses import replace
from semisfl.methods.semisfl import SemiSFL
from semisfl.methods.semisfl_settings import SemiSFLSettings
from semisfl.settings.catalog import METHODS

class Mine(SemiSFL):
    entry = replace(METHODS["semisfl"], name="mine", title="Mine")

class MoreSettings(SemiSFLSettings):
    added: float = 1.5

class More(SemiSFL):
    # A built-in method and its settings, with one setting more.

    entry = replace(METHODS["semisfl"], name="more", section="more", settings="other:MoreSettings")

    def __init__(self, setup):
        super().__init__(setup)
        self.added = setup.config.settings(MoreSettings).added

class Bare(SemiSFL):
    pass
"""


def test_a_derived_method_may_add_settings_to_those_of_its_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other.py").write_text(DERIVED)
    monkeypatch.syspath_prepend(str(tmp_path))
    changes = ("rounds=1", *toy.FLAT)
    more = toy.values("other:More", "more.temperature=0.5", "more.added=2.5", *changes)
    assert (more.more.added, more.more.temperature) == (2.5, 0.5)  # type: ignore[attr-defined]
    assert config.parse(tomllib.loads(to_toml(more))) == more
    result = train(more, data=toy.dataset(), device="cpu")
    ours = toy.values("semisfl", "semisfl.temperature=0.5", *changes)
    assert result.accuracy == train(ours, data=toy.dataset(), device="cpu").accuracy
    with pytest.raises(ConfigError, match=r"unknown key 'more\.adde'; did you mean 'more\.added'"):
        toy.values("other:More", "more.adde=1")


def test_what_a_class_does_wrong_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = toy.values("supervised", "rounds=1", *toy.FLAT)
    monkeypatch.setattr(Supervised, "round", lambda self, round_index: {"loss": 1.0})
    with pytest.raises(
        ValueError, match=r"round\(\) of Supervised returned a dict; it must return"
    ):
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


# --- data sets and codecs -------------------------------------------------------------------------

SHAPES = """
from semisfl.settings.catalog import NamedAggregate, NamedCodec, NamedData

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

"""


@pytest.fixture
def brought(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    monkeypatch.syspath_prepend(str(folder))


@pytest.mark.usefixtures("brought")
def test_a_data_set_of_another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = sources.load("other_rows:SET", cache=tmp_path / "cache")
    assert (dataset.shape, dataset.classes, dataset.mean) == (
        (1, 8, 8),
        ("circle", "square"),
        (0.25,),
    )
    monkeypatch.delenv("SEMISFL_DATA", raising=False)
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=None))  # no hub
    with pytest.raises(ValueError, match=r"elsewhere could not be fetched .*SEMISFL_DATA"):
        sources.load("other_rows:ELSEWHERE")


def test_the_packed_file_of_the_page(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "own-images.md").read_text(encoding="utf-8")
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


@pytest.mark.usefixtures("brought")
def test_a_codec_of_another_package() -> None:
    chosen = config.parse({"wire": {"gradients": "other_rows:CODEC"}}).wire.gradients
    crossed = codec_named(chosen).roundtrip(torch.tensor([0.3, 0.7, 1.2]))
    assert crossed.tolist() == [0.5, 0.5, 1.0]
    with pytest.raises(ConfigError, match="codec 'other_rows:WRONG' is dict, not a semisfl"):
        codec_named("other_rows:WRONG")


@pytest.mark.usefixtures("brought")
def test_a_codec_sends_what_its_layout_says_and_gives_the_shape_back() -> None:
    """Bytes are counted by the layout: a wrong one would be a wrong result, without an error."""
    with pytest.raises(
        ConfigError,
        match=r"codec 'other_rows:SHORT': encode makes .*float32.*, its layout .*float16",
    ):
        codec_named("other_rows:SHORT")
    with pytest.raises(
        ConfigError, match=r"codec 'other_rows:FLAT': decode makes .*\[12\].*\[3, 4\]"
    ):
        codec_named("other_rows:FLAT")


@pytest.mark.usefixtures("brought")
def test_an_aggregation_rule_returns_one_update() -> None:
    states = {client: {"w": torch.full((2, 2), float(client))} for client in range(3)}
    settings = config.parse({"robust": {"aggregate": "other_rows:MEAN"}}).robust
    with pytest.raises(
        ConfigError, match=r"robust.aggregate = 'other_rows:MEAN' returned .*\[\]; .*\[4\]"
    ):
        combine(settings, states, states[0], HeldBack())


def test_an_aggregate_of_the_docs_has_settings_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its section is written, read again and refused where it is wrong."""
    written_in_the_documentation(tmp_path, "rules")
    monkeypatch.syspath_prepend(str(tmp_path))
    rule = "mypackage.rules:NEAREST"
    chosen = (f"robust.aggregate={rule}", "robust.nearest.kept=1", "robust.krum.attackers=0.1")
    experiment = toy.assemble("semisfl", "rounds=1", "clients.active=3", *chosen)
    (row,) = run_rounds(experiment).rounds
    assert list(row["held_back"].values()) == ["its update is far from the mean"] * 2
    text = to_toml(experiment.config)
    assert "[robust.nearest]\nkept = 1" in text and "krum" not in text
    assert config.parse(tomllib.loads(text)) == experiment.config
    with pytest.raises(ConfigError, match=r"unknown key 'robust\.nearest\.keep'; did you mean"):
        config.parse({"robust": {"aggregate": rule, "nearest": {"keep": 1}}})
