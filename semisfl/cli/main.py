"""``semisfl``: lists the commands, and turns errors into one line and an exit code.

A command line goes through these steps:

1. `main` writes ``--set a=1 b=2`` as two options, because click reads one value per option.
2. `click_command` parses it. The functions in `COMMANDS` are plain typer commands: their parameters are the options.
3. The command parses settings once into a `Config` and passes it to the package, which does the work.
4. The command prints the result on stdout, for people or with ``--json`` for programs. Progress and warnings go to
   stderr (`semisfl.cli.console`).
5. If an exception comes out of the command, `explained` gives the line to print and the exit code. A command does not
   catch errors to word them again: the code that raised one has named the value, the limit and the fix.

The modules of commands import torch, matplotlib and gRPC only inside the functions that need them, so that `--help`,
`list`, `show` and `report` start at once. To add a command, write its function in the file of its group and name it
in `COMMANDS`.
"""

import sys
import traceback
from collections.abc import Callable
from typing import Annotated, Any, Literal

import typer

from semisfl.cli import (
    attack,
    certificates,
    console,
    devices,
    look,
    planning,
    results,
    train,
    use_model,
    watching,
)
from semisfl.cli.options import EXIT_CODES, spread_settings
from semisfl.cli.signals import StopSignals
from semisfl.runs import advice
from semisfl.runs.lock import EXIT_CODE, Taken
from semisfl.settings.version import VERSION
from semisfl.stopping import Stopped

DONE = 0
"""The command did what was asked, or a signal stopped it cleanly."""
FAILED = 1
"""Anything else went wrong, for example a full disk."""
MISTAKE = 2
"""The command line, a setting or the data is wrong; the message names the fix."""
IN_USE = EXIT_CODE
"""3: the run directory is in use by another process, or already holds a run."""
DIVERGED = advice.DIVERGED
"""4: the run ended with NaN or Inf in its losses or weights."""
INTERRUPTED = 130
"""The command was interrupted: by a second signal, or by the first if it trains nothing."""

EXTRAS = {
    **dict.fromkeys(("grpc", "msgpack", "cryptography"), "network"),
    **dict.fromkeys(("plotly", "starlette", "uvicorn"), "watch"),
    "prometheus_client": "metrics",
}
"""The extra of this package that installs a module, for the error if the module is missing."""
SMALLER = (
    "lower what is large: data.size, clients.batch, clients.active, clients.steps, server.batch, server.steps, or a "
    "method's queue"
)
"""The settings that decide how much memory a run takes, for the error if there is not enough."""

app = typer.Typer(
    name="semisfl",
    help="Semi-supervised split federated learning: SemiSFL and its baselines.",
    epilog="Start with `semisfl run`: it trains on embedded digits in a minute or two.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
COMMANDS: dict[str, dict[str, Callable[..., None]]] = {
    "Train": {"run": train.run, "compare": train.compare},
    "Before training": {"list": look.list_, "show": look.show, "plan": planning.plan},
    "Results": {"report": results.report_, "replay": planning.replay, "watch": watching.watch},
    "Use a trained model": {
        "predict": use_model.predict,
        "evaluate": use_model.evaluate,
        "export": use_model.export,
        "classify": devices.classify,
    },
    "Train with real devices": {
        "serve": devices.serve,
        "join": devices.join,
        "inspect": devices.inspect,
        "fleet": devices.fleet,
    },
    "Attack a run to see how safe it is": {"leakage": attack.leakage},
}
"""The commands, by their groups in `semisfl --help`. `certs` is a group of commands itself."""
for group, commands in COMMANDS.items():
    for name, function in commands.items():
        app.command(name, rich_help_panel=group)(function)
app.add_typer(certificates.app, name="certs", rich_help_panel="Train with real devices")
STOPPABLE = ("run", "compare", "serve", "join", "watch")
"""Commands that a signal stops cleanly. The ``obj`` of their context is a `StopSignals`, which handles signals from the
start of the command to its end.
"""


def _set_log_format(chosen: str | None) -> None:
    """Obey ``--log-format``; None: the option is not used here, but it may be used before the command."""
    if chosen is not None:
        console.set_up_logging(chosen)


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error.", expose_value=False)
    ] = False,
    log_format: Annotated[
        Literal["text", "json"] | None,
        typer.Option(
            help="How lines on stderr are written.", callback=_set_log_format, expose_value=False
        ),
    ] = None,
) -> None:
    """Act on the options of `semisfl` itself, before its command runs.

    ``--debug`` is only declared here: `main` looks for it if an error comes.
    """
    if version:
        print(f"semisfl {VERSION}")
    elif context.invoked_subcommand is None:
        print(context.get_help())
    elif context.invoked_subcommand in STOPPABLE:
        context.obj = context.with_resource(StopSignals())


def click_command() -> Any:
    """Return the whole command line, as click parses it.

    ``--debug`` and ``--log-format`` are options of `semisfl`. Every command gets them too, so that they may also stand
    behind the command's name.
    """
    root: Any = typer.main.get_command(app)
    everywhere = [option for option in root.params if option.name in ("debug", "log_format")]
    for command in (*root.commands.values(), *root.commands["certs"].commands.values()):
        command.params.extend(everywhere)
    return root


def main(arguments: list[str] | None = None) -> int:
    """Run a command line, print its errors, and return its exit code.

    Args:
        arguments: the words behind ``semisfl``; default: those of this process.

    Returns one of the constants of this module, or of `semisfl.cli.options.EXIT_CODES` where a device cannot take part.
    """
    typed = list(sys.argv[1:] if arguments is None else arguments)
    console.set_up_logging()
    try:
        words = spread_settings(typed)
        code = click_command()(words, prog_name="semisfl", standalone_mode=False)
        if code == INTERRUPTED:  # as typer returns it
            raise KeyboardInterrupt
        return int(code or DONE)
    except Stopped:
        console.say("stopped before the first round; nothing was written")
        return DONE
    except (
        SystemExit
    ):  # click and rich raise it if nobody reads stdout any more, as after ``| head``
        console.discard(sys.stdout)
        return DONE
    except (KeyboardInterrupt, typer.Abort):
        console.say("interrupted", "error")
        return INTERRUPTED
    except Exception as error:
        if "--debug" in typed:
            traceback.print_exc()
        message, code = explained(error)
        console.say(" ".join(message.split()), "error")
        return code


def explained(error: Exception) -> tuple[str, int]:
    """Return the one line that a user reads about an error, and the exit code.

    A `ValueError` is a mistake in the command line, the settings or the data; its attribute ``kind``, if it has one,
    chooses the exit code of a device. An `OSError` is a failure of the machine: a full disk, a lost connection. Anything
    else is unexpected, and the line says how to see its traceback.
    """
    # typer either depends on click or has its own copy of it, so the class of a usage error is not known here.
    if hasattr(error, "format_message"):
        context = getattr(error, "ctx", None)
        message = error.format_message().rstrip(".").replace(": Value error, ", ": ")
        return f"{message}; try `{context.command_path if context else 'semisfl'} --help`", MISTAKE
    words = str(error)
    if isinstance(error, Taken):
        return words, IN_USE
    if isinstance(error, ValueError):
        return words, EXIT_CODES[getattr(error, "kind", "setup")]
    if isinstance(error, OSError):
        named = error.filename is not None and error.strerror
        return f"{error.filename}: {error.strerror}" if named else words, FAILED
    if isinstance(error, ImportError):
        extra = EXTRAS.get((error.name or "").partition(".")[0])
        hint = f"; it comes with pip install 'semisfl[{extra}]'" if extra else ""
        return words + hint, MISTAKE
    # torch raises a plain RuntimeError if the memory of a CPU runs out.
    if isinstance(error, MemoryError) or ("memory" in words and isinstance(error, RuntimeError)):
        return f"there is not enough memory: {words}; {SMALLER}", FAILED
    return f"{type(error).__name__}: {words} (this is unexpected; --debug shows where)", FAILED
