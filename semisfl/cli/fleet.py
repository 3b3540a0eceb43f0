"""``semisfl fleet``: list the devices of a running server, or remove one."""

import enum
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from semisfl.cli import output
from semisfl.cli.options import Json
from semisfl.files import read_json
from semisfl.settings.counts import amount


class Action(enum.StrEnum):
    list = "list"
    remove = "remove"


def fleet(
    run: Annotated[Path, typer.Argument(help="Directory of a run that `semisfl serve` works on.")],
    action: Annotated[Action, typer.Argument(help="What to do.")],
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="The device to remove.")] = "",
    as_json: Json = False,
) -> None:
    """List a server's devices as it last wrote them down, or remove one before its next round."""
    from semisfl.net.server.roster import remove_device

    if (action is Action.remove) != bool(name):
        raise ValueError("remove needs the NAME of a device, and nothing else takes one")
    status = read_json(run / "fleet.json")
    if not status:
        raise ValueError(f"{run} has no fleet.json; name the directory of a run of `semisfl serve`")
    if action is Action.remove:
        if name not in (known := [device["name"] for device in status["clients"]]):
            raise ValueError(
                f"{name!r} has no place; the devices that have one: {', '.join(known)}"
            )
        remove_device(run, name)
        print(
            f"{name} leaves its place before the next round, and stays out while {run / 'removed.txt'} names it; "
            "revoke its certificate to keep it out of other runs too"
        )
    elif as_json:
        print(json.dumps(status))
    else:
        _show(status)


def _show(status: dict[str, Any]) -> None:
    columns = ("device", "state", "last seen", "place", "images", "sent", "received")
    table = output.table("", columns, text=3)
    for device in status["clients"]:
        table.add_row(
            device["name"],
            "here" if "since" in device else "away",
            device.get("seen", output.UNKNOWN),
            str(device["client"]),
            str(device.get("images", output.UNKNOWN)),
            amount(device["bytes_up"]),
            amount(device["bytes_down"]),
        )
    output.show(table)
    here = sum("since" in device for device in status["clients"])
    state = status.get("waiting", "training" if here else "no device is here")
    taken = f"{len(status['clients'])} of {status.get('total', '?')} places taken"
    print(f"{here} here, {taken}; {state}; written at {status['time']}")
    answered = [one for one in status["clients"] if "answer_seconds" in one]
    if answered:
        slowest = max(answered, key=lambda one: one["answer_seconds"])
        seconds = f"{slowest['answer_seconds']:.2f} s"
        print(f"longest to answer in the last round: {slowest['name']}, {seconds}")
