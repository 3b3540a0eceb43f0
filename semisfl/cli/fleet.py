"""``semisfl fleet``: administer a running server."""

import enum
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from semisfl.cli import console, output
from semisfl.cli.options import Json
from semisfl.settings.counts import amount


class Action(enum.StrEnum):
    list = "list"
    remove = "remove"
    pause = "pause"
    resume = "resume"
    drain = "drain"


DONE = {
    Action.remove: "{name} is removed and its place is free; revoke its certificate to keep it out for good",
    Action.pause: "no further round begins until `semisfl fleet {run} resume`",
    Action.resume: "rounds go on",
    Action.drain: "the server stops after this round; `semisfl serve --resume {run} --labeled DIR` goes on",
}


def fleet(
    run: Annotated[Path, typer.Argument(help="Directory of a run that `semisfl serve` works on.")],
    action: Annotated[
        Action, typer.Argument(help="What to do; `drain` stops after the current round.")
    ],
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="The device to remove.")] = "",
    as_json: Json = False,
) -> None:
    """List a running server's devices, remove one, or pause, resume or drain the run."""
    from semisfl.net.server.administration import ask

    if (action is Action.remove) != bool(name):
        raise ValueError("remove needs the NAME of a device, and nothing else takes one")
    answer = ask(run, action.value, name)
    if as_json:
        print(json.dumps(answer))
    elif action is Action.list:
        _show(answer)
    else:
        print(DONE[action].format(run=console.quoted(run), name=name))


def _show(answer: dict[str, Any]) -> None:
    columns = ("device", "state", "last seen", "place", "images", "sent", "received")
    table = output.table("", columns, text=3)
    for device in answer["clients"]:
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
    here = sum("since" in device for device in answer["clients"])
    state = answer["waiting"] or "training"
    taken = len(answer["clients"])
    print(f"{here} here, {taken} of {answer['total']} places taken; {state}")
    answered = [one for one in answer["clients"] if "answer_seconds" in one]
    if answered:
        slowest = max(answered, key=lambda one: one["answer_seconds"])
        seconds = f"{slowest['answer_seconds']:.2f} s"
        print(f"longest to answer in the last round: {slowest['name']}, {seconds}")
