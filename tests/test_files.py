"""Letters in pictures that the usual font lacks."""

import logging
import warnings
from pathlib import Path

import pytest
from matplotlib import font_manager
from matplotlib.figure import Figure

from semisfl.files import save_picture


def font_with(letter: str, file: Path) -> Path:
    """Write a font that has one letter: a square."""
    builder = pytest.importorskip("fontTools.fontBuilder").FontBuilder(1000, isTTF=True)
    pen = pytest.importorskip("fontTools.pens.ttGlyphPen").TTGlyphPen(None)
    pen.moveTo((0, 0))
    for corner in ((0, 900), (900, 900), (900, 0)):
        pen.lineTo(corner)
    pen.closePath()
    builder.setupGlyphOrder([".notdef", "letter"])
    builder.setupCharacterMap({ord(letter): "letter"})
    builder.setupGlyf(dict.fromkeys((".notdef", "letter"), pen.glyph()))
    builder.setupHorizontalMetrics(dict.fromkeys((".notdef", "letter"), (1000, 0)))
    builder.setupHorizontalHeader(ascent=900, descent=-100)
    builder.setupNameTable({"familyName": "Own Letters", "styleName": "Regular"})
    builder.setupOS2()
    builder.setupPost()
    builder.save(file)
    return file


def test_letters_that_the_usual_font_lacks_are_drawn_by_another_or_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("semisfl"), "propagate", True)
    fonts = font_manager.fontManager.ttflist
    letter = "\ue555"  # private use: no font has it
    figure, picture = Figure(), tmp_path / "picture.svg"
    axes = figure.subplots()
    axes.set_xticks([0, 1], [f"a {letter}", "été"])
    axes.set_title(letter)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monkeypatch.setattr(font_manager.fontManager, "ttflist", list(fonts))
        save_picture(figure, picture)
        assert [one for one in caplog.messages if "boxes" in one] == [
            f"{picture} shows boxes for {letter}: install a font that has these letters"
        ]
        caplog.clear()
        font_manager.fontManager.addfont(font_with(letter, tmp_path / "own.ttf"))
        save_picture(figure, picture)
    assert not caplog.messages
    assert "Own Letters" in axes.get_xticklabels()[0].get_fontfamily()
