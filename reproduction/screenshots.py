"""The pictures of the page in the documentation, from results of this repository.

    python -m reproduction.screenshots

Needs Chromium and Pillow. The deployment is shown as it was when its files were copied, under way.
"""

import os
import tempfile
import time
from pathlib import Path

from PIL import Image

from reproduction import records
from semisfl.data.holdings import count
from semisfl.runs.directory import RunDirectory
from semisfl.runs.run_data import load_data
from semisfl.watch.address import Address, serve_app
from semisfl.watch.app import make_app
from semisfl.watch.views import Runs
from tests.watch.browser import Browser, browser

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
DRAWN_SECONDS = 2.0
COLOURS = 256
WIDE, PHONE = (1280, 860), (390, 844)
PICTURES = (
    ("overview", "compare", "overview", WIDE, False),
    ("training", "compare", "training", WIDE, True),
    ("clients", "demo", "clients", WIDE, False),
    ("devices", "served", "devices", WIDE, False),
    ("phone", "served", "overview", PHONE, True),
)
"""Name, folder, view, size, dark."""


def folders(place: Path) -> None:
    """Return copies of runs with what the results lack."""
    for one in records.entries("compare"):
        records.unpack(f"compare/{one['name']}", place / "compare" / one["name"])
    demo = place / "demo" / "semisfl-seed0"
    records.unpack("demo/semisfl-seed0", demo)
    data, partition = load_data(RunDirectory.open(demo).config())
    holdings = count(partition, data.labels.numpy(), data.classes)
    (demo / "holdings.json").write_text(holdings.as_json())
    served = place / "served" / "cameras"
    served.mkdir(parents=True)
    for name, text in records.entry("watch/served")["files"].items():
        (served / name).write_text(text)
        # A run of another machine is under way if it has just written.
        os.utime(served / name, (0, 0))
    (served / "run.lock").write_text("process 4242 on train.example.org")


def take(page: Browser, url: str, view: str, size: tuple[int, int], dark: bool, file: Path) -> None:
    page.look(*size, dark=dark)
    page.open(url)
    page.until("document.body && document.body.dataset.shown")
    page.text_of(view)
    time.sleep(DRAWN_SECONDS)
    page.picture(file)
    with Image.open(file) as image:
        image.convert("RGB").quantize(COLOURS).save(file, optimize=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary, browser() as page:
        folders(Path(temporary))
        for name, folder, view, size, dark in PICTURES:
            app = make_app(Runs([Path(temporary) / folder]))
            with serve_app(app, Address("127.0.0.1", 0)) as url:
                take(page, url, view, size, dark, DOCS / f"watch-{name}.png")
                page.call("Page.navigate", url="about:blank")
            print(DOCS / f"watch-{name}.png")


if __name__ == "__main__":
    main()
