"""``semisfl watch``, and the pages of ``report --html`` and ``serve --watch``."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from semisfl.cli import console

if TYPE_CHECKING:
    from semisfl.net.server.fleet import NetworkFleet
    from semisfl.runs.sinks import Sink

LISTEN = "127.0.0.1:8780"

Token = Annotated[
    Path | None,
    typer.Option("--token-file", help="File with a token that readers of the page must give."),
]


def watch(
    context: typer.Context,
    runs: Annotated[list[Path], typer.Argument(help="Run directories, or folders of them.")],
    listen: Annotated[str, typer.Option(help="HOST:PORT of the page.")] = LISTEN,
    token_file: Token = None,
    certs: Annotated[
        Path | None,
        typer.Option(help="Folder with server.crt and server.key; needed off loopback."),
    ] = None,
) -> None:
    """Serve a web page that follows runs. It only reads them; Ctrl-C ends it."""
    with serve_page("--listen", listen, runs, token_file, certs):
        context.obj.wait()


def write_html(runs: list[Path], place: Path) -> None:
    """Write the page as one file."""
    from semisfl.runs.reading import no_run
    from semisfl.watch.inline import write_page
    from semisfl.watch.views import Runs

    views = Runs(runs)
    if not views.listing()["runs"]:
        raise no_run(", ".join(map(str, runs)))
    write_page(views, place)
    print(f"page: {place}")


@contextlib.contextmanager
def serve_page(
    option: str, listen: str, runs: list[Path], token_file: Path | None, certs: Path | None
) -> Iterator[None]:
    """Serve the page of ``runs`` inside the block, at the address that ``option`` has."""
    from semisfl.watch.address import Address, serve_app
    from semisfl.watch.app import make_app
    from semisfl.watch.views import Runs

    address = Address.parse(option, listen, token_file, certs)
    with serve_app(make_app(Runs(runs)), address) as url:
        token = "?token=TOKEN with the token of --token-file" if token_file else ""
        console.say(f"watch on {url}{token}")
        yield


@contextlib.contextmanager
def serve_metrics(
    fleet: "NetworkFleet", listen: str, token_file: Path | None, certs: Path | None
) -> Iterator["Sink"]:
    """Serve a fleet's /metrics inside the block, and yield the sink that counts the rounds for it."""
    from semisfl.watch.address import Address, serve_app
    from semisfl.watch.exporter import Exporter

    made = Exporter(fleet)
    with serve_app(made.app, Address.parse("--metrics", listen, token_file, certs)) as url:
        console.say(f"metrics on {url}metrics")
        yield made
