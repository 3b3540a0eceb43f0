"""``semisfl certs``: a small authority, and certificates for a server and its devices."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from semisfl.cli import console
from semisfl.cli.options import Json, needs_network

Directory = Annotated[Path, typer.Option("--dir", help="Where the authority and its keys live.")]
Name = Annotated[str, typer.Option("--name", help="The device's name; it becomes its identity.")]

certificates = typer.Typer(
    help="Make a small authority, and certificates for a server and its clients.",
    no_args_is_help=True,
)


def register(app: typer.Typer) -> None:
    app.add_typer(certificates, name="certs")


@certificates.command("init")
def init(directory: Directory = Path("certs")) -> None:
    """Make the authority that signs the others."""
    with needs_network():
        from semisfl.net import certs
    _made(certs.make_authority(directory), directory / "authority.crt")


@certificates.command("server")
def server(
    names: Annotated[
        list[str], typer.Option("--name", help="A host name or address clients use; repeatable.")
    ],
    directory: Directory = Path("certs"),
) -> None:
    """Make the server's certificate."""
    with needs_network():
        from semisfl.net import certs
    _made(certs.make_server(directory, names), directory / "server.crt")


@certificates.command("client")
def client(name: Name, directory: Directory = Path("certs")) -> None:
    """Make a device's certificate: a folder to carry to it."""
    with needs_network():
        from semisfl.net import certs
    _made(certs.make_client(directory, name), directory / "clients" / name)


@certificates.command("revoke")
def revoke(name: Name, directory: Directory = Path("certs")) -> None:
    """Turn a device away from now on."""
    with needs_network():
        from semisfl.net import certs
    serials = certs.revoke(directory, name)
    print(
        f"revoked {len(serials)} certificate(s) of {name}; a running server turns it away at once"
    )


@certificates.command("list")
def list_certificates(directory: Directory = Path("certs"), as_json: Json = False) -> None:
    """Every certificate ever made."""
    with needs_network():
        from semisfl.net import certs
    rows = certs.listing(directory)
    if as_json:
        print(
            json.dumps([vars(row) | {"valid_until": row.valid_until.isoformat()} for row in rows])
        )
        return
    table = Table("role", "name", "valid until", "revoked", "fingerprint")
    for row in rows:
        mark = "revoked" if row.revoked else ""
        table.add_row(row.role, row.name, f"{row.valid_until:%Y-%m-%d}", mark, row.fingerprint[:16])
    console.out.print(table)


def _made(issued: Any, place: Path) -> None:
    print(
        f"made {place}, valid until {issued.valid_until:%Y-%m-%d}, fingerprint {issued.fingerprint[:16]}"
    )
