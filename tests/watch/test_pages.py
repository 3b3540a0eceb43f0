"""Every view as its user sees it, in Chromium: of a finished, a running and a crashed run, of nothing,
and of a thousand clients."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from semisfl.metrics import RoundMetrics
from semisfl.runs.directory import RunDirectory
from semisfl.watch.address import Address, serve_app
from semisfl.watch.app import make_app
from semisfl.watch.inline import write_page
from semisfl.watch.views import Runs
from tests.watch import browser as browsers, directories
from tests.watch.browser import Browser

pytestmark = pytest.mark.skipif(
    browsers.find() is None,
    reason="needs Chromium to look at the page: apt-get install chromium",
)
VIEWS = ("overview", "training", "clients", "devices", "settings", "log")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browsers.browser() as opened:
        opened.look(1280, 900)
        yield opened


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return directories.finished(tmp_path_factory.mktemp("runs") / "done")


@contextmanager
def opened(chromium: Browser, folder: Path) -> Iterator[Browser]:
    """Show the page of ``folder``, and check that its console stays empty."""
    chromium.complaints.clear()
    with serve_app(make_app(Runs([folder])), Address("127.0.0.1", 0)) as url:
        chromium.open(url)
        chromium.until("document.body && document.body.dataset.shown")
        yield chromium
        assert chromium.complaints == []
        chromium.call("Page.navigate", url="about:blank")  # or it goes on asking


def drawn(page: Browser, least: int) -> bool:
    """Return whether so many charts appear."""
    seen = "(node) => node.offsetParent && node.querySelector('path.js-line, .heatmaplayer image')"
    plots = f"[...document.querySelectorAll('.js-plotly-plot')].filter({seen}).length"
    return bool(page.until(f"{plots} >= {least}"))


def type_into(page: Browser, view: str, text: str) -> None:
    page.evaluate(f"document.querySelector('#panel-{view} input[type=search]').focus()")
    page.call("Input.insertText", text=text)


def fits(page: Browser) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth <= innerWidth"))


def test_a_finished_run(chromium: Browser, done: Path) -> None:
    with opened(chromium, done) as page:
        text = page.text_of("overview")
        assert "finished" in text and "3 of 3" in text.replace("\n", " ")
        assert drawn(page, 1)
        label = page.evaluate(
            "document.querySelector('.js-plotly-plot').getAttribute('aria-label')"
        )
        chance = "; guessing: 25 %"
        assert re.fullmatch(rf"Test accuracy over rounds. done: [\d.]+ at the end{chance}", label)
        page.evaluate("[...document.querySelectorAll('.choice button')][1].click()")
        page.until("document.querySelector('.js-plotly-plot').ariaLabel.includes('GB sent')")
        assert "Impurity" in page.text_of("training") and drawn(page, 8)
        text = page.text_of("clients")
        assert "Images per client" in text and "3 rounds done" in text
        assert drawn(page, 2)
        axis = "document.querySelector('#panel-clients .js-plotly-plot')._fullLayout.xaxis"
        ticks = page.evaluate(f"{axis}._vals.map((tick) => [tick.x, tick.text])")
        assert ticks == [[0, "server"], [1, "0"], [2, "1"], [3, "2"]], "each under its own column"
        assert "there are no devices" in page.text_of("devices")
        text = page.text_of("settings")
        assert text.index("Changed from the preset") < text.index("clients.total")
        assert text.index("clients.total") < text.index("As in the preset")
        type_into(page, "settings", "WARMUP")
        assert "teacher.warmup" in page.text() and "clients.total" not in page.text()
        assert "rounds 1 to 3" in page.text_of("log")
        type_into(page, "log", "Finished")
        assert "rounds 1 to 3" not in page.text() and "finished: 3 rounds" in page.text()


def test_a_running_run_is_followed(chromium: Browser, done: Path, tmp_path: Path) -> None:
    directory = RunDirectory.open(directories.unfinished(tmp_path / "going", done))
    directory.lock()
    kept = directory.keep_metrics_before(2)
    with opened(chromium, tmp_path) as page:
        text = page.text_of("overview")
        assert "running" in text and "Left, at most" in text
        row = RoundMetrics.from_dict({**kept[1], "round": 2, "accuracy": 97.25})
        directory.record.write(row)
        page.until("document.body.innerText.includes('97.3 %')")
        page.until("document.querySelector('.js-plotly-plot').data[0].y.length === 3")
        with (directory.path / "run.log").open("a") as file:
            page.text_of("log")
            file.write("2026-11-15T11:00:00Z INFO a line that came later\n")
        page.until("document.body.innerText.includes('a line that came later')")
        for view in VIEWS:
            page.text_of(view)
    directory.unlock()


def test_an_empty_folder_then_a_crashed_run_and_another_beside_it(
    chromium: Browser, done: Path, tmp_path: Path
) -> None:
    with opened(chromium, tmp_path) as page:
        for view in VIEWS:
            assert f"No run in {tmp_path} yet" in page.text_of(view), view
        page.text_of("overview")
        directories.unfinished(tmp_path / "dead", done)
        page.until("document.body.innerText.includes('crashed')")
        other = directories.toy.values("supervised", "seed=9")
        RunDirectory.create(tmp_path / "other", other).unlock()
        page.until("document.body.innerText.includes('other')")
        assert "ended without saying why in round 3; --resume goes on" in page.text_of("clients")
        assert "the disk is nearly full" in page.text_of("log")
        text = page.text_of("settings")
        assert "only what differs between runs" in text and "supervised" in text
        assert "clients.total" not in text, "it is the same in both"
        for view in VIEWS:
            page.text_of(view)


def test_devices_are_those_of_a_served_run_and_a_link_has_the_runs_name(
    chromium: Browser, tmp_path: Path
) -> None:
    RunDirectory.create(tmp_path / "a simulation", directories.toy.values("semisfl"))
    served = directories.toy.values("semisfl", "fleet.kind=network")
    RunDirectory.create(tmp_path / "served", served)
    with opened(chromium, tmp_path) as page:
        assert "there are no devices" not in page.text_of("devices")
        assert page.evaluate("document.body.dataset.shown") == "devices/served"
        page.text_of("overview")
        page.evaluate("document.querySelector('#panel-overview tbody a').click()")
        page.until("document.body.dataset.shown === 'clients/a simulation'")
        assert page.evaluate("location.hash") == "#clients/a%20simulation"
        assert "there are no devices" not in page.text_of("devices")


def test_runs_have_names_warnings_and_cards_on_a_phone(
    chromium: Browser, done: Path, tmp_path: Path
) -> None:
    directories.unfinished(tmp_path / "camera", done)
    other = RunDirectory.create(tmp_path / "begins", directories.toy.values("supervised"))
    fleet = {"waiting": "waiting for devices (1 here, 2 needed)", "clients": []}
    (other.path / "fleet.json").write_text(json.dumps(fleet))
    chromium.look(390, 844)
    with opened(chromium, tmp_path) as page:
        drawn(page, 1)
        legend = "[...document.querySelectorAll('#panel-overview .legend li')]"
        assert page.evaluate(f"{legend}.map((one) => one.innerText)") == ["begins", "camera"]
        chart = "document.querySelector('#panel-overview .js-plotly-plot')"
        texts = f"{chart}._fullLayout.annotations.map((one) => one.text)"
        assert page.evaluate(texts) == ["camera", "guessing: 25 %"], "only one has numbers yet"
        card = "[...document.querySelectorAll('#panel-overview tbody tr')][0]"
        assert page.evaluate(f"getComputedStyle({card}).display") == "grid"
        text = " ".join(page.evaluate(f"{card}.innerText").split())
        assert "begins waiting" in text and "0 / 3" in text and "0 B" not in text
        title = "getComputedStyle(document.querySelector('td[data-title=Accuracy]'), '::before')"
        assert page.evaluate(f"{title}.content") == '"Accuracy"'
        more = "document.getElementById('tabs').classList.contains('more')"
        assert page.evaluate(more), "there are tabs beyond the edge"
        page.evaluate("[...document.querySelectorAll('#panel-overview input')][1].click()")
        first = "The first accuracy comes with round 1. Now: waiting for devices (1 here, 2 needed)"
        page.until(f"({texts})[0].startsWith('{first}')")
        assert "The first numbers come when round 1 is complete" in page.text_of("training")
        other.record.write(RoundMetrics(round=0, warnings=["no image was confident; lower it"]))
        page.text_of("overview")
        page.until("document.querySelector('[role=alert]').innerText.includes('begins: no image')")
        page.text_of("log")
        assert not page.evaluate(more), "the last tab is in sight"
        chromium.look(1280, 900)
    other.unlock()


def test_a_thousand_clients_on_a_phone_in_dark_mode_by_keyboard(
    chromium: Browser, tmp_path: Path
) -> None:
    directories.crowd(tmp_path / "crowd")
    with opened(chromium, tmp_path) as page:
        chromium.look(390, 844, dark=True)
        for view in VIEWS:
            page.text_of(view)
            assert fits(page), f"{view} is wider than a phone"
            assert page.evaluate("document.title") == "crowd · semisfl watch", (
                "names are not obeyed"
            )
        assert page.evaluate("document.images.length") == 0, "names are text"
        text = page.text_of("devices")
        assert "of 1000 places" in text and directories.EVIL in text
        assert "expired" in text and "2,9" in text, "days left of each certificate"
        type_into(page, "devices", "camera-x")
        page.until(r"document.body.innerText.includes('–	camera-x	revoked')")
        text = page.text_of("clients")
        assert "1–50 of 1000" in text and drawn(page, 2)
        rows = "document.querySelectorAll('#panel-clients tbody tr').length"
        assert page.evaluate(rows) == 50
        # Filter and sort by keyboard alone.
        type_into(page, "clients", "camera-0999")
        page.until(f"{rows} === 1")
        page.evaluate("document.querySelector('#tab-clients').focus()")
        chromium.press("ArrowRight")
        page.until("document.body.dataset.shown.startsWith('devices')")
        focused = "document.activeElement.id"
        assert page.evaluate(focused) == "tab-devices"
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none", "the focus is visible"
        ground = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        assert max(map(int, re.findall(r"\d+", ground)[:3])) < 60, "dark"
        chromium.look(1280, 900)


def test_one_file_shows_the_same_without_a_server(
    chromium: Browser, done: Path, tmp_path: Path
) -> None:
    write_page(Runs([done]), tmp_path / "page.html")
    chromium.complaints.clear()
    chromium.open((tmp_path / "page.html").as_uri())
    chromium.until("document.body && document.body.dataset.shown")
    assert "as of " in chromium.text()
    for view, text in (
        *(("overview", "finished"), ("training", "Impurity"), ("clients", "Images per client")),
        *(
            ("devices", "there are no devices"),
            ("settings", "clients.total"),
            ("log", "rounds 1 to 3"),
        ),
    ):
        assert text in chromium.text_of(view), view
    assert chromium.text_of("overview") and drawn(chromium, 1)
    assert chromium.complaints == []
