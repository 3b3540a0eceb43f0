"""Draw the pictures of commands."""

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path

from semisfl.cli.console import say

SUFFIXES = (".png", ".svg", ".pdf", ".jpg", ".jpeg")


def can_draw() -> bool:
    """Return whether matplotlib, an extra, is installed; warn if it is not."""
    if importlib.util.find_spec("matplotlib") is not None:
        return True
    say("no picture, as matplotlib is not installed; pip install 'semisfl[plots]'", "warning")
    return False


def place_beside(runs: Sequence[Path], name: str) -> Path:
    """Return the usual place of a picture: in the run's folder, or here if there are several runs."""
    return (runs[0] if len(runs) == 1 and runs[0].is_dir() else Path()) / name


def picture_at(place: Path) -> Path | None:
    """Return the file to draw to: a PNG unless the name ends otherwise. None if nothing can be drawn."""
    if not can_draw():
        return None
    return place if place.suffix in SUFFIXES else place.with_name(f"{place.name}.png")


def draw(place: Path, save: Callable[[Path], None]) -> Path | None:
    """Draw to `picture_at` and return it; None, after a warning, if that fails: numbers are worth more."""
    picture = picture_at(place)
    if picture is None:
        return None
    try:
        save(picture)
    except OSError as error:
        say(f"no picture: {picture}: {error.strerror or error}; choose --out", "warning")
        return None
    return picture
