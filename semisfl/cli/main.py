"""``semisfl``: registers the commands and turns errors into one line and an exit code."""

import os
import shlex
import sys
import traceback
from typing import Annotated, Any

import typer

from semisfl.cli import (
    attack,
    certificates,
    console,
    devices,
    fleet,
    look,
    planning,
    renamed,
    replays,
    reproduce,
    results,
    serve_model,
    timing,
    train,
    use_model,
    watching,
)
from semisfl.cli.options import EXIT_CODES, fill_in_watch, spread_settings
from semisfl.cli.signals import LOG_FORMATS
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
"""4: the run ended with NaN, or with losses or weights out of bounds."""
INTERRUPTED = 130
"""A second signal ended the command at once."""

app = typer.Typer(
    name="semisfl",
    help="Semi-supervised split federated learning: SemiSFL and its baselines.",
    epilog="Start with `semisfl run`: it trains on embedded digits in a minute or two.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
# The groups of `semisfl --help`; each module names its commands.
GROUPS = {
    "Train": (train, reproduce),
    "Before training": (look, planning, timing),
    "Results": (results, replays, watching),
    "Use a trained model": (use_model, serve_model),
    "Train with real devices": (devices, fleet, certificates),
    "Attack a run to see how safe it is": (attack,),
}
SMALLER = (
    "lower what is large: data.size, clients.batch, clients.active, clients.steps, server.batch, server.steps, or a "
    "method's queue"
)
for group, modules in GROUPS.items():
    for module in modules:
        for name, command in module.COMMANDS.items():
            if isinstance(command, typer.Typer):
                app.add_typer(command, name=name, rich_help_panel=group)
            else:
                app.command(name, rich_help_panel=group)(command)


@app.callback(invoke_without_command=True)
def options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    debug: Annotated[
        bool,
        typer.Option("--debug", help="Show the traceback of an error; also after a command."),
    ] = False,
    log_format: Annotated[
        str,
        typer.Option(help="How lines on stderr are written: text or json; also after a command."),
    ] = "text",
) -> None:
    if version:
        print(f"semisfl {VERSION}")
        raise typer.Exit


def main(arguments: list[str] | None = None) -> int:
    """Run a command line and return its exit code: one of the constants above."""
    typed = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in typed
    console.set_up_logging()
    stdout = console.results_file()
    try:
        words = _words(_log_format([word for word in typed if word != "--debug"]))
        code = app(words, prog_name="semisfl", standalone_mode=False, obj=words)
        return _fail("interrupted", code, False) if code == INTERRUPTED else int(code or DONE)
    except Stopped:
        console.say("stopped before the first round; nothing was written")
        return DONE
    except SystemExit as leaving:  # click raises it for any broken pipe
        if not isinstance(leaving.__context__, BrokenPipeError):
            raise
        return _broken_pipe(leaving.__context__, stdout, debug)
    except BrokenPipeError as error:
        return _broken_pipe(error, stdout, debug)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", INTERRUPTED, debug)
    except Taken as error:
        return _fail(str(error), IN_USE, debug)
    except ValueError as error:
        return _fail(str(error), EXIT_CODES[getattr(error, "kind", "setup")], debug)
    except OSError as error:
        return _fail(_about_file(error), FAILED, debug)
    except ImportError as error:
        return _fail(str(error), FAILED, debug)
    except Exception as error:
        if hasattr(error, "format_message"):
            return _fail(_about_usage(error, typed), MISTAKE, debug)
        if _lacks_memory(error):
            return _fail(f"there is not enough memory: {error}; {SMALLER}", FAILED, debug)
        hint = "" if debug else " (this is unexpected; --debug shows where)"
        return _fail(f"{type(error).__name__}: {error}{hint}", FAILED, debug)


def _log_format(typed: list[str]) -> list[str]:
    """Return the words without ``--log-format text|json``, which may stand anywhere, and obey it."""
    name = "--log-format"
    words = [
        part
        for word in typed
        for part in (word.split("=", 1) if word.startswith(f"{name}=") else [word])
    ]
    if name not in words:
        return typed
    place = words.index(name)
    chosen = (words[place + 1 :] or [""])[0]
    if chosen not in LOG_FORMATS:
        raise ValueError(f"{name} {chosen!r} is not known; it is text or json")
    console.set_up_logging(chosen)
    return words[:place] + words[place + 2 :]


def _words(typed: list[str]) -> list[str]:
    """Return the command line as click reads it, and print one line if it has old names."""
    words = renamed.today(typed)
    if words != typed:
        console.say(
            f"this is now written `semisfl {shlex.join(words)}`; "
            "the old name works until the next release",
            "warning",
        )
    return fill_in_watch(spread_settings(words), watching.LISTEN) or ["--help"]


def _broken_pipe(error: BrokenPipeError, stdout: os.stat_result | None, debug: bool) -> int:
    """Return success if stdout's reader left; any other pipe, such as a dead worker's, is a failure."""
    return DONE if console.reader_left(stdout) else _fail(_about_file(error), FAILED, debug)


def _fail(message: str, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    console.say(" ".join(message.split()), "error")
    return code


def _about_file(error: OSError) -> str:
    named = error.filename is not None and error.strerror
    return f"{error.filename}: {error.strerror}" if named else str(error)


def _lacks_memory(error: Exception) -> bool:
    """Return whether memory ran out. torch raises a plain RuntimeError for that of the CPU."""
    words = str(error).lower()
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError)
        and any(phrase in words for phrase in ("can't allocate memory", "out of memory"))
    )


def _about_usage(error: Any, typed: list[str]) -> str:
    """Return click's message about a wrong command line, with the help to read.

    typer either depends on click or has its own copy, depending on its version, and exports the class
    of these errors in neither case. `format_message` and `ctx` are documented and the same in all.
    """
    # An option without its value is reported without a context.
    first = " ".join(["semisfl", *(word for word in typed[:1] if not word.startswith("-"))])
    command = error.ctx.command_path if getattr(error, "ctx", None) else first
    message = error.format_message().rstrip(".").replace(": Value error, ", ": ")
    return f"{message}; try `{command} --help`"
