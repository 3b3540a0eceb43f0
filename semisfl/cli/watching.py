"""``semisfl watch``, and the pages of ``report --html`` and ``serve --watch``."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from semisfl.cli import console

if TYPE_CHECKING:
    from starlette.types import ASGIApp

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
    with _port("--listen", listen, token_file, certs) as serve:
        _serve_page(serve, runs, token_file)
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


Serve = Callable[["ASGIApp"], str]
"""Serves an app at the port that was taken, and returns its URL."""


@contextlib.contextmanager
def _port(option: str, listen: str, token_file: Path | None, certs: Path | None) -> Iterator[Serve]:
    """Take the port of ``option`` now, so that a wrong one fails before anything starts."""
    from semisfl.watch.address import Address, serving

    address = Address.parse(option, listen, token_file, certs)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(address.bind())
        yield lambda app: stack.enter_context(serving(app, address, listener))


def _serve_page(serve: Serve, runs: list[Path], token_file: Path | None) -> None:
    from semisfl.watch.app import make_app
    from semisfl.watch.views import Runs

    url = serve(make_app(Runs(runs)))
    token = "?token=TOKEN with the token of --token-file" if token_file else ""
    console.say(f"watch on {url}{token}")


@contextlib.contextmanager
def page_of_run(
    listen: str | None, token_file: Path | None, certs: Path | None
) -> Iterator[Callable[[Path], None]]:
    """Take the port of `serve --watch`; yield a function that shows the run in a directory there."""
    if listen is None:
        yield lambda place: None
        return
    with _port("--watch", listen, token_file, certs) as serve:
        yield lambda place: _serve_page(serve, [place], token_file)


@contextlib.contextmanager
def exporter(
    listen: str | None, token_file: Path | None, certs: Path | None
) -> Iterator[Callable[["NetworkFleet"], list["Sink"]]]:
    """Take the port of `serve --metrics`; yield a function that takes the fleet and returns its sinks."""
    if listen is None:
        yield lambda fleet: []
        return
    from semisfl.watch.exporter import Exporter

    with _port("--metrics", listen, token_file, certs) as serve:

        def tell(fleet: "NetworkFleet") -> list["Sink"]:
            exporter = Exporter(fleet)
            console.say(f"metrics on {serve(exporter.app)}metrics")
            return [exporter]

        yield tell
