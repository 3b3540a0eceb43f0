"""``server.labeled_view``: every method shows its labelled images as the configuration says."""

from pathlib import Path

import pytest

from semisfl.cli.main import main
from semisfl.settings.catalog import METHODS
from semisfl.settings.config import parse, read
from semisfl.settings.presets import preset
from tests import toy


def first_loss(method: str, *changes: str) -> float | None:
    experiment = toy.assemble(method, *changes)
    return experiment.method.round(0).loss_supervised


@pytest.mark.parametrize("method", [name for name in METHODS if name != "probe"])
def test_every_method_reads_the_view(method: str) -> None:
    own = "strong" if method == "semisfl" else "weak"
    views = ("strong", "weak", "both", "mixed")
    losses = {view: first_loss(method, f"server.labeled_view={view}") for view in views}
    assert len(set(losses.values())) == 4
    assert first_loss(method) == losses[own]
    assert parse({"method": method}).labeled_view == own


def test_a_view_that_the_method_has_anyway_is_the_same_configuration() -> None:
    for method, own in (("semisfl", "strong"), ("fedswitch-sl", "weak")):
        message = parse({"method": method, "server": {"labeled_view": own, "steps": 7}})
        assert message == parse({"method": method, "server": {"steps": 7}})
    assert parse({"server": {"labeled_view": "weak"}}).server.labeled_view == "weak"


def test_a_shown_preset_has_its_view_for_the_rivals_too(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["show", "photos"]) == 0
    (tmp_path / "photos.toml").write_text(capsys.readouterr().out)
    values = read(tmp_path / "photos.toml")
    assert parse({**values, "method": "supervised"}).labeled_view == "strong"
    assert parse(values) == preset("photos")
