"""``semisfl``: the commands, and how their errors are told."""

import re
import sys
import traceback
from typing import Annotated, Any

import typer

from semisfl import __version__
from semisfl.cli import certificates, console, deploy, look, study, train

app = typer.Typer(
    name="semisfl",
    help="Semi-supervised split federated learning: SemiSFL and its baselines.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
train.register(app)
study.register(app)
look.register(app)
certificates.register(app)
deploy.register(app)

# typer brings its own copy of click or depends on it, by version; this is click's class in either.
UsageError: Any = typer.BadParameter.__mro__[1]
ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*=")


@app.callback(invoke_without_command=True)
def options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    debug: Annotated[
        bool,
        typer.Option("--debug", help="Show the traceback of an error; works after a command too."),
    ] = False,
) -> None:
    if version:
        print(f"semisfl {__version__}")
        raise typer.Exit


def main(arguments: list[str] | None = None) -> int:
    """Exit codes: 0 done or stopped cleanly, 2 a mistake in what was asked, 1 anything else."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    given = _spread_settings([word for word in given if word != "--debug"])
    console.set_up_logging()
    try:
        code = app(given or ["--help"], prog_name="semisfl", standalone_mode=False)
        return _fail("interrupted", code, False) if code == 130 else int(code or 0)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", 130, debug)
    except UsageError as error:
        return _fail(f"{error.format_message()} Try `semisfl --help`.", 2, debug)
    except ValueError as error:
        return _fail(str(error), 2, debug)
    except (OSError, ImportError) as error:
        return _fail(str(error), 1, debug)
    except Exception as error:
        hint = "" if debug else " (this is unexpected; --debug shows where)"
        return _fail(f"{type(error).__name__}: {error}{hint}", 1, debug)


def _fail(message: str, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    console.say("error: " + " ".join(message.split()))
    return code


def _spread_settings(words: list[str]) -> list[str]:
    """``--set a=1 b=2`` as ``--set a=1 --set b=2``, so that one ``--set`` is enough."""
    spread: list[str] = []
    setting = False
    for word in words:
        if setting and ASSIGNMENT.match(word) and spread[-1] != "--set":
            spread.append("--set")
        elif word != "--set" and not (spread and spread[-1] == "--set"):
            setting = False
        setting = setting or word == "--set"
        spread.append(word)
    return spread


if __name__ == "__main__":
    sys.exit(main())
