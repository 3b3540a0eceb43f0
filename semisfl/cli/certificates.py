"""``semisfl certs``: a small authority, and certificates for a server and its devices.

The authority signs all certificates of a deployment. Its key stays in its folder, on a machine that need not be the
server. A device makes its key itself and sends a request; the key never leaves it. Its name is in its certificate, so a
server knows who talks to it. Each certificate that was made is in issued.txt, and each one that was revoked in
revoked.txt, which a running server reads again when it changes.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from semisfl.cli import output
from semisfl.cli.options import Json
from semisfl.settings.counts import plural

Directory = Annotated[Path, typer.Option("--dir", help="Folder of the authority and its keys.")]
"""The folder of the authority: its key, issued.txt, revoked.txt and the folders of devices."""
Name = Annotated[str, typer.Option("--name", help="The device's name, which is its identity.")]
"""The name of a device: letters, digits and . _ -"""

app = typer.Typer(help="Make, renew, revoke and list certificates for a server and its devices.")
"""The commands of `semisfl certs`."""


@app.command("init")
def init(directory: Directory = Path("certs")) -> None:
    """Make the authority that signs all other certificates."""
    from semisfl.net.tls import certs

    _made(certs.make_authority(directory), directory / "authority.crt")


@app.command("server")
def server(
    hosts: Annotated[
        list[str],
        typer.Option("--host", help="A host name or address that clients use; may be repeated."),
    ],
    directory: Directory = Path("certs"),
) -> None:
    """Make the server's certificate."""
    from semisfl.net.tls import certs

    _made(certs.make_server(directory, hosts), directory / "server.crt")


@app.command("client")
def client(name: Name, directory: Directory = Path("certs")) -> None:
    """Make a device's key and certificate here, for a test bench: keys of real devices stay there (request, sign)."""
    from semisfl.net.tls import certs

    _made(certs.make_client(directory, name), directory / "clients" / name)


@app.command("request")
def request(
    name: Name,
    directory: Annotated[
        Path, typer.Option("--dir", help="This device's folder, the --certs of join.")
    ] = Path("certs"),
) -> None:
    """Make this device's key, which stays here, and a request for a certificate. The same again renews it."""
    from semisfl.net.tls import certs

    file, fingerprint = certs.make_request(directory, name)
    print(
        f"made {file}, fingerprint of the key {fingerprint}; carry it to the authority, run `semisfl certs sign"
        f" {file.name}` there, and put client.crt and authority.crt into {directory}"
    )


@app.command("sign")
def sign(
    file: Annotated[Path, typer.Argument(metavar="REQUEST", help="The file of a device.")],
    directory: Directory = Path("certs"),
) -> None:
    """Sign a device's request: make the certificate that the device needs, or a new one before the old one expires."""
    from semisfl.net.tls import certs

    issued, fingerprint = certs.sign_request(directory, file)
    _made(issued, directory / "clients" / issued.name / "client.crt")
    print(
        f"{issued.name} has the key with fingerprint {fingerprint}: ask the device's owner for it, and if theirs"
        f" differs, revoke; carry client.crt and authority.crt to the device, neither is secret"
    )


@app.command("renew")
def renew(
    name: Annotated[str | None, typer.Option("--name", help="The device's name.")] = None,
    for_server: Annotated[
        bool, typer.Option("--server", help="Renew the server's certificate instead.")
    ] = False,
    hosts: Annotated[
        list[str] | None,
        typer.Option(
            "--host", help="With --server: another host name or address; may be repeated."
        ),
    ] = None,
    directory: Directory = Path("certs"),
) -> None:
    """Make a new key and certificate here for the same hosts, or for the same device of a test bench."""
    from semisfl.net.tls import certs

    if (name is None) != for_server or (hosts and not for_server):
        raise ValueError("certs renew needs --name NAME of a device, or --server [--host HOST]")
    if name is None:
        issued, place = certs.renew_server(directory, hosts or []), directory / "server.crt"
    else:
        issued, place = certs.renew_client(directory, name), directory / "clients" / name
    _made(issued, place)
    print(
        f"copy it and its key to the {issued.role}, which takes them for its next connections; the old certificate stays"
        " valid until it expires or is revoked"
    )


@app.command("revoke")
def revoke(
    name: Annotated[
        str | None, typer.Option("--name", help="The device's name; needs issued.txt.")
    ] = None,
    serial: Annotated[
        str | None, typer.Option("--serial", metavar="HEX", help="One certificate's serial.")
    ] = None,
    certificate: Annotated[
        Path | None, typer.Option("--certificate", metavar="FILE", help="One device's client.crt.")
    ] = None,
    directory: Directory = Path("certs"),
) -> None:
    """Refuse a device from now on: all of its certificates, or one of them."""
    from semisfl.net.tls import ledger

    if sum(way is not None for way in (name, serial, certificate)) != 1:
        raise ValueError("certs revoke needs one of --name NAME, --serial HEX, --certificate FILE")
    if name is not None:
        count, revoked = len(ledger.revoke(directory, name)), f"of {name}"
    elif serial is not None:
        number, fresh = ledger.revoke_serial(directory, serial)
        count, revoked = int(fresh), f"with serial {number:x}"
    elif certificate is not None:
        owner, fresh = ledger.revoke_certificate(directory, certificate)
        count, revoked = int(fresh), f"of {owner}"
    if not count:
        print(f"nothing to do: the certificate {revoked} is in {directory / 'revoked.txt'} already")
        return
    print(
        f"revoked {plural(count, 'certificate')} {revoked}; a server that reads {directory / 'revoked.txt'} obeys"
        " at once; copy that file to any other server"
    )


@app.command("list")
def list_certificates(directory: Directory = Path("certs"), as_json: Json = False) -> None:
    """List every certificate made here and how long it is valid."""
    from semisfl.net.tls import ledger

    rows = ledger.listing(directory)
    if as_json:
        print(json.dumps([_plain(row) for row in rows]))
        return
    columns = ("role", "name", "state", "serial", "valid until", "days left")
    table = output.table("", columns, text=4)
    for row in rows:
        left = str(row.days_left) if row.days_left >= 0 else "–"
        until = f"{row.valid_until:%Y-%m-%d}"
        table.add_row(row.role, row.name, row.state, f"{row.serial:x}"[:16], until, left)
    output.show(table)


def _plain(row: Any) -> dict[str, Any]:
    """Return an entry of `certs list` as values for JSON; times are in ISO 8601."""
    return vars(row) | {
        "valid_from": row.valid_from.isoformat(),
        "valid_until": row.valid_until.isoformat(),
        "days_left": row.days_left,
        "state": row.state,
        "serial_hex": f"{row.serial:x}",
    }


def _made(issued: Any, place: Path) -> None:
    """Print that a certificate was made, and until when it is valid.

    Args:
        issued: the certificate's entry in issued.txt.
        place: the file or folder that holds it.
    """
    from semisfl.net.tls.certs import LEAF_LIFE

    until = f"{issued.valid_until:%Y-%m-%d}"
    print(f"made {place}, valid until {until}, fingerprint {issued.fingerprint[:16]}")
    if issued.days_left < LEAF_LIFE.days - 2:
        print("the authority expires then too; `semisfl certs init` makes another")
