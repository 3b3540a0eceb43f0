"""``semisfl``: the commands, and how their errors are told."""

import os
import sys
import traceback
from typing import Annotated, Any

import typer

from semisfl.cli import (
    answering,
    certificates,
    console,
    deploy,
    leakage,
    look,
    pricing,
    recording,
    recosting,
    reproduce,
    spoilers,
    study,
    train,
    using,
    watching,
)
from semisfl.cli.options import fill_in_watch, spread_settings
from semisfl.runs.lock import EXIT_CODE, Taken
from semisfl.settings.version import VERSION
from semisfl.stopping import Stopped

app = typer.Typer(
    name="semisfl",
    help="Semi-supervised split federated learning: SemiSFL and its baselines.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
train.register(app)
study.register(app)
reproduce.register(app)
spoilers.register(app)
look.register(app)
pricing.register(app)
recosting.register(app)
recording.register(app)
certificates.register(app)
deploy.register(app)
watching.register(app)
using.register(app)
answering.register(app)
leakage.register(app)


@app.callback(invoke_without_command=True)
def options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    debug: Annotated[
        bool,
        typer.Option("--debug", help="Show the traceback of an error; works after a command too."),
    ] = False,
) -> None:
    if version:
        print(f"semisfl {VERSION}")
        raise typer.Exit


def main(arguments: list[str] | None = None) -> int:
    """Exit codes: 0 done or stopped cleanly, 2 a mistake in what was asked, 3 a run's directory is
    another's, 1 anything else."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    given = spread_settings([word for word in given if word != "--debug"])
    given = fill_in_watch(given, watching.LISTEN)
    console.set_up_logging()
    results = console.results_file()
    try:
        words = given or ["--help"]
        code = app(words, prog_name="semisfl", standalone_mode=False, obj=words)
        return _fail("interrupted", code, False) if code == 130 else int(code or 0)
    except Stopped:
        console.say("stopped before the first round; nothing was begun")
        return 0
    except SystemExit as leaving:  # so click answers a broken pipe, whichever it is
        if not isinstance(leaving.__context__, BrokenPipeError):
            raise
        return _broken_pipe(leaving.__context__, results, debug)
    except BrokenPipeError as error:
        return _broken_pipe(error, results, debug)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", 130, debug)
    except Taken as error:
        return _fail(str(error), EXIT_CODE, debug)
    except ValueError as error:
        return _fail(str(error), 2, debug)
    except OSError as error:
        return _fail(_about_file(error), 1, debug)
    except ImportError as error:
        return _fail(str(error), 1, debug)
    except Exception as error:
        if hasattr(error, "format_message"):
            return _fail(_about_usage(error), 2, debug)
        hint = "" if debug else " (this is unexpected; --debug shows where)"
        return _fail(f"{type(error).__name__}: {error}{hint}", 1, debug)


def _broken_pipe(error: BrokenPipeError, results: os.stat_result | None, debug: bool) -> int:
    """No failure if it is that of the results; another one, as to a worker that died, is."""
    return 0 if console.reader_left(results) else _fail(_about_file(error), 1, debug)


def _fail(message: str, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    console.say("error: " + " ".join(message.split()))
    return code


def _about_file(error: OSError) -> str:
    named = error.filename is not None and error.strerror
    return f"{error.filename}: {error.strerror}" if named else str(error)


def _about_usage(error: Any) -> str:
    """What click says of a command line it cannot read, and where to look.

    typer depends on click or holds a copy of it, by version, and names the class of these errors in
    neither; click's documented ``format_message`` and ``ctx`` are the same in all.
    """
    command = error.ctx.command_path if getattr(error, "ctx", None) else "semisfl"
    said = error.format_message().rstrip(".")
    return f"{said}; try `{command} --help`"
