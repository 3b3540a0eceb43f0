"""Sinks by name: TensorBoard's, and those of other packages, as a configuration asks for them."""

import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from semisfl.cli.main import main
from semisfl.net.terms import Terms
from semisfl.runs.directory import RunDirectory
from semisfl.runs.start import resume, train
from semisfl.settings import config
from semisfl.settings.config import ConfigError
from semisfl.settings.toml import to_toml
from tests import toy
from tests.toy import own


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder)).Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_tensorboard_has_every_number_of_every_round_once(tmp_path: Path) -> None:
    path = tmp_path / "run"
    settings = toy.values("semisfl", 'sinks=["tensorboard"]', "stop.gigabytes=1e-9")
    train(settings, out=path, **own())
    rows = resume(path, settings=["stop.gigabytes=none"], **own()).rounds
    tags = EventAccumulator(str(path / "tensorboard")).Reload().Tags()["scalars"]
    assert {"loss/semi", "accuracy/all", "accuracy/teacher", "mask_rate", "supervised_steps"} <= {
        *tags
    }
    assert "bytes/features_up" in tags and "bytes/total" in tags and "round" not in tags
    losses = scalars(path / "tensorboard", "loss/semi")
    assert losses == [(row["round"], pytest.approx(row["loss_semi"], rel=1e-6)) for row in rows]
    assert len(losses) == 3


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("wandb", "'wandb' is not known; use tensorboard, or package.module:NAME"),
        (":Sink", "':Sink' is not known"),
        ("nowhere.module:Sink", "nowhere.module:Sink' cannot be imported .*install its package"),
        ("json:Sink", "json:Sink' cannot be imported"),
    ],
)
def test_a_wrong_sink_is_refused_before_the_run_begins(
    name: str, error: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=error):
        train(toy.values("supervised", f'sinks=["{name}"]'), out=tmp_path / "run", **own())
    assert not (tmp_path / "run").exists()


def test_what_a_sink_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "semisfl.runs.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    error = r"this needs further packages: pip install 'semisfl\[tensorboard\]'"
    with pytest.raises(ValueError, match=error):
        train(toy.values("supervised", 'sinks=["tensorboard"]'), **own())


def test_a_device_is_not_told_and_imports_nothing_of_it() -> None:
    def terms(*settings: str) -> Terms:
        return Terms(toy.values("semisfl", *settings), (3, 12, 12), 4, (0.5,) * 3, (0.5,) * 3)

    mine = terms('sinks=["nowhere.module:Sink"]')
    assert "nowhere" not in mine.to_json() and mine.run == terms().run


def test_the_key_survives_its_file_and_may_be_changed_on_resume(tmp_path: Path) -> None:
    settings = toy.values("supervised", 'sinks=["tensorboard", "a.b:C"]')
    file = tmp_path / "run.toml"
    file.write_text(to_toml(settings))
    assert config.parse(config.read(file)).sinks == ("tensorboard", "a.b:C")
    RunDirectory.create(tmp_path / "run", settings).unlock()
    changed = RunDirectory.open(tmp_path / "run").changed(["sinks=[]"])
    assert changed == settings.model_copy(update={"sinks": ()})


def test_a_run_directory_of_somebody_else_imports_no_sink(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The directory names a module on Python's path; importing the module would run its code."""
    path, evil = tmp_path / "run", tmp_path / "code" / "planted_sink.py"
    evil.parent.mkdir()
    evil.write_text(
        "from pathlib import Path\n"
        f"Path({str(tmp_path / 'owned')!r}).touch()\n"
        "class Sink:\n"
        "    def start(self, run): ...\n"
        "    def write(self, metrics): ...\n"
        "    def close(self): ...\n"
    )
    monkeypatch.syspath_prepend(str(evil.parent))
    train(toy.values("supervised", "stop.gigabytes=1e-9"), out=path, **own())
    config = (path / "config.toml").read_text()
    (path / "config.toml").write_text(config.replace("sinks = []", 'sinks = ["planted_sink:Sink"]'))
    with pytest.raises(ConfigError, match="add --allow-method planted_sink:Sink"):
        resume(path, settings=["stop.gigabytes=none"], **own())
    assert main(["run", "--resume", str(path), "--quiet"]) == 2
    assert "--allow-method planted_sink:Sink" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "owned").exists()
    resume(path, settings=['sinks=["planted_sink:Sink"]'], **own())
    assert (tmp_path / "owned").exists(), "what the user typed is imported"
