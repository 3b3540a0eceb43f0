"""``semisfl watch``, and the pages of ``report --html`` and ``serve --watch``.

The page only reads run directories. It is served on a loopback address, or beyond it with a token and TLS.
"""

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
"""The usual address of the page."""

Token = Annotated[
    Path | None,
    typer.Option("--token-file", help="File with a token that readers of the page must give."),
]
"""The file with the token of the page and of /metrics."""


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
    """Write the page of runs with its data and its chart library as one file that needs no server.

    Args:
        runs: run directories, or folders of them.
        place: the file to write.
    """
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
    """Serve the page of ``runs`` inside the block, and print its URL.

    Args:
        option: the option that has the address, for errors.
        listen: the address, HOST:PORT.
        runs: run directories, or folders of them; runs that begin later appear too.
        token_file: the file with the token that readers must give; needed beyond loopback.
        certs: the folder with server.crt and server.key; used beyond loopback.
    """
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
    """Serve /metrics of a fleet for Prometheus inside the block; yield the sink that takes the metrics of each round.

    Args:
        fleet: the devices of the run.
        listen: the address, HOST:PORT.
        token_file: the file with the token that readers must give; needed beyond loopback.
        certs: the folder with server.crt and server.key; used beyond loopback.
    """
    from semisfl.watch.address import Address, serve_app
    from semisfl.watch.exporter import Exporter

    made = Exporter(fleet)
    with serve_app(made.app, Address.parse("--metrics", listen, token_file, certs)) as url:
        console.say(f"metrics on {url}metrics")
        yield made
