"""Sinks by name: TensorBoard's, and those of other packages, as a configuration asks for them."""

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from semisfl.cli.main import main
from semisfl.runs.start import resume, train
from semisfl.settings.config import ConfigError
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
