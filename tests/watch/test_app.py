"""Test the page over HTTP: access, requests, and that nothing can be changed."""

import http.client
import json
import re
import ssl
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from semisfl.cli.main import main
from semisfl.metrics import RoundMetrics
from semisfl.net.tls import certs
from semisfl.runs.directory import RunDirectory
from semisfl.watch.address import Address, serve_app
from semisfl.watch.app import make_app
from semisfl.watch.views import Runs
from tests import toy
from tests.watch.directories import EVIL

TOKEN = "tokenoftwentyletters"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "runs" / "first"
    directory = RunDirectory.create(path, toy.values("semisfl"))
    directory.record.write(RoundMetrics(round=0, accuracy=40.0))
    directory.unlock()
    (path / "run.log").write_text(f"2026 INFO {EVIL}</script>\n")
    return path


@contextmanager
def page(path: Path, address: Address | None = None) -> Iterator[str]:
    with serve_app(make_app(Runs([path])), address or Address("127.0.0.1", 0)) as url:
        yield url


def ask(
    url: str, path: str = "/", method: str = "GET", **headers: str
) -> tuple[int, str, dict[str, str]]:
    where = urlsplit(url)
    assert where.port
    if where.scheme == "https":
        context = ssl._create_unverified_context()
        link: Any = http.client.HTTPSConnection("127.0.0.1", where.port, context=context)
    else:
        link = http.client.HTTPConnection("127.0.0.1", where.port)
    with closing(link):
        link.request(method, path, headers=headers)
        answer = link.getresponse()
        lower = {key.lower(): value for key, value in answer.getheaders()}
        return answer.status, answer.read().decode(), lower


def test_everything_is_there_strictly_read_only_and_needs_nobody_else(run: Path) -> None:
    before = {path: path.read_bytes() for path in run.iterdir()}
    with page(run.parent) as url:
        status, html, headers = ask(url)
        assert status == 200
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self';" in policy
        assert headers["x-content-type-options"] == "nosniff"
        for name in re.findall(r'(?:src|href)="([\w.]+)"', html):
            assert ask(url, f"/{name}")[0] == 200, name
        assert "http" not in re.sub(r"<!--.*?-->", "", html), "nothing comes from elsewhere"
        listing = json.loads(ask(url, "/api/runs")[1])
        (listed,) = listing["runs"]
        for view in ("clients", "devices", "log"):
            status, _, headers = ask(url, f"/api/{view}?run={listed['id']}")
            assert (status, headers["cache-control"]) == (200, "no-cache"), view
            assert ask(url, f"/api/{view}?run=../../etc")[0] == 404
            assert ask(url, f"/api/{view}")[0] == 404
        assert ask(url, f"/api/log?run={listed['id']}&from=x")[0] == 400
        assert ask(url, "/api/rounds?have=nonsense")[0] == 400
        assert json.loads(ask(url, "/api/rounds?have=0.0.unknown")[1]) == {"runs": {}}
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            assert ask(url, "/api/runs", method)[0] == 405
        for path in ("/../pyproject.toml", "/page.py", "/api", "/metrics.jsonl"):
            assert ask(url, path)[0] == 404, path
    assert {path: path.read_bytes() for path in run.iterdir()} == before


def test_a_request_under_another_host_name_is_refused(run: Path) -> None:
    with page(run) as url:
        for host in ("evil.example", "e{vil.example:80", "evil.example:", "evil.example:99999", ""):
            assert ask(url, host=host)[0] == 403, host
        assert ask(url, "/api/runs", host="evil.example:8780")[0] == 403
        for host in ("localhost:1", "127.0.0.1", "127.0.0.2:8780", "[::1]:8780"):
            assert ask(url, host=host)[0] == 200, host


def test_with_a_token_requests_need_it(run: Path) -> None:
    with page(run, Address("127.0.0.1", 0, TOKEN)) as url:
        for path in ("/", "/api/runs", "/page.js", "/?token=wrong", f"/api/runs?token={TOKEN}"):
            status, text, _ = ask(url, path)
            assert status == 401 and text.count("\n") == 0 and "wants a token" in text, path
        assert ask(url, authorization="Bearer wrong")[0] == 401
        assert ask(url, authorization=f"Bearer {TOKEN}")[0] == 200
        status, _, headers = ask(url, f"/?token={TOKEN}")
        assert (status, headers["location"]) == (303, "/")
        cookie = headers["set-cookie"]
        assert TOKEN not in cookie and "HttpOnly" in cookie and "SameSite=strict" in cookie
        assert ask(url, "/api/runs", cookie=cookie.partition(";")[0])[0] == 200
        assert ask(url, cookie="semisfl-watch=guess")[0] == 401


def test_strangers_may_ask_whether_it_is_ready_and_it_reads_no_run_for_them(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with page(run, Address("127.0.0.1", 0, TOKEN)) as url:
        monkeypatch.setattr(Runs, "listing", lambda _: pytest.fail("it reads all runs"))
        for path in ("/healthz", "/readyz"):
            assert ask(url, path)[0] == 200


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    certs.make_authority(tmp_path / "certs")
    certs.make_server(tmp_path / "certs", ["localhost"])
    return tmp_path / "certs"


def test_off_loopback_it_takes_a_token_and_tls(
    run: Path, tmp_path: Path, certificates: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token, short = tmp_path / "token", tmp_path / "short"
    token.write_text(TOKEN + "\n")
    short.write_text("secret\n")
    words = ["watch", str(run), "--listen", "0.0.0.0:0"]
    for more, error in (
        ([], "a token and TLS are needed"),
        (["--token-file", str(short)], "needs 16 or more letters"),
        (["--token-file", str(token)], "a token and TLS are needed"),
        (["--token-file", str(token), "--certs", str(run)], "make them with `semisfl certs"),
        (["--listen", "localhost"], r"--listen 'localhost' is not HOST:PORT"),
        (["--listen", "::1:8780"], r"--listen '::1:8780' is not HOST:PORT; IPv6 is written as"),
    ):
        assert main([*words, *more]) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert line.startswith("error: ") and error in line, line
    address = Address.parse("--listen", "0.0.0.0:0", token, certificates)
    with page(run, address) as url:
        assert url.startswith("https://")
        assert ask(url)[0] == 401
        status, _, headers = ask(url, f"/?token={TOKEN}")
        assert status == 303 and "Secure" in headers["set-cookie"]


def test_a_page_uses_a_renewed_certificate_without_a_restart(run: Path, certificates: Path) -> None:
    certificate, key = certificates / "server.crt", certificates / "server.key"
    old = certificate.read_text(), key.read_text()
    with page(run, Address("127.0.0.1", 0, TOKEN, certificates)) as url:
        where = ("127.0.0.1", urlsplit(url).port or 0)
        assert ssl.get_server_certificate(where) == old[0]
        certs.renew_server(certificates)
        new = certificate.read_text(), key.read_text()
        key.write_text(old[1])
        assert ssl.get_server_certificate(where) == old[0], "the pair is not whole yet"
        certificate.unlink()
        assert ssl.get_server_certificate(where) == old[0]
        key.write_text(new[1])
        certificate.write_text(new[0])
        assert ssl.get_server_certificate(where) == new[0] != old[0]
        assert ask(url)[0] == 401


# --- one file ------------------------------------------------------------------------------------


def test_one_file_holds_everything_and_nothing_in_it_breaks_out(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "page.html"
    assert main(["report", str(run), "--html", str(place)]) == 0
    assert capsys.readouterr().out == f"page: {place}\n"
    html = place.read_text(encoding="utf-8")
    own = re.sub(r"<script>.*?</script>", "", html, flags=re.DOTALL)
    assert not re.search(r'(src|href)="(?!data:,|#main)', own), "it needs no other file"
    data = html.partition('id="data">')[2].partition("</script>")[0]
    (log,) = json.loads(data)["log"].values()
    assert log["lines"] == [f"2026 INFO {EVIL}</script>"]
    assert EVIL not in html and "<img" not in own
    assert html.count("sha256-") == 11, "each script and the style may run, and no other"
