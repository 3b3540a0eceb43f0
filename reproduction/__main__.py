"""``python -m reproduction``: train and write the paper's tables, and everything that the records are made with.

The name of a table or figure, such as ``table3``, stands for the command ``make table3``.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from reproduction import document, make, records
from reproduction.benchmarks import rounds as timing
from reproduction.paper.exhibits import EXHIBITS
from reproduction.poisoning import grid as attack_grid
from reproduction.poisoning.attacks import ATTACKS
from semisfl.cli import console
from semisfl.cli.options import Device, Engine, Jobs, Quiet, Settings, spread_settings, values_of
from semisfl.settings.plain_values import words_of

app = typer.Typer(
    name="python -m reproduction",
    help=__doc__,
    add_completion=False,
    pretty_exceptions_enable=False,
)
Rounds = Annotated[int | None, typer.Option(min=1, help="Rounds per run; default: the paper's.")]
Seeds = Annotated[int, typer.Option(min=1, help="Runs per cell: seed 0, 1, ...")]
Only = Annotated[
    list[str] | None,
    typer.Option(
        help="Only cells of this method, data set, row, column or setting. A comma means or; a "
        "repeated --only means and."
    ),
]
Out = Annotated[Path, typer.Option(help="Folder for new runs, tables and figures.")]
StandIns = Annotated[
    bool, typer.Option("--stand-ins", help="Use public stand-ins for data that are not public.")
]
Names = Annotated[list[str], typer.Argument(help="Names of `list`, such as table3 fig8; or all.")]
RUNS = Path("runs/reproduction")


@app.command("list")
def list_(out: Out = RUNS) -> None:
    """List every table and figure, and how many of its runs exist."""
    make.show_list(out)


@app.command("make")
def make_(
    names: Names,
    rounds: Rounds = None,
    seeds: Seeds = 1,
    only: Only = None,
    out: Out = RUNS,
    no_run: Annotated[
        bool, typer.Option("--no-run", help="Train nothing; use the runs that exist.")
    ] = False,
    stand_ins: StandIns = False,
    jobs: Jobs = 1,
    engine: Engine = None,
    device: Device = "auto",
    quiet: Quiet = False,
) -> None:
    """Train the missing runs of tables or figures, and write them beside the paper's values."""
    grid = make.Grid.of(names, out, only or (), rounds, seeds, stand_ins)
    if no_run or make.train(grid, jobs=jobs, engine=engine, device=device, quiet=quiet):
        make.write(grid)


@app.command()
def estimate(
    names: Names,
    rounds: Rounds = None,
    seeds: Seeds = 1,
    only: Only = None,
    out: Out = RUNS,
    stand_ins: StandIns = False,
    device: Device = "auto",
) -> None:
    """Time a round of each method here, and print how long the missing runs would take."""
    grid = make.Grid.of(names, out, only or (), rounds, seeds, stand_ins)
    make.show_estimate(grid.missing, device)


@app.command()
def results() -> None:
    """Write every table and figure of the pages from the records."""
    for page in document.write_pages():
        print(f"written: {page}")


@app.command()
def record(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    path: Annotated[str, typer.Argument(metavar="STUDY/NAME", help="A study and a new name.")],
    data: Annotated[
        str, typer.Option(help="What the images were, if not the data set of that name.")
    ] = "",
) -> None:
    """Append a run to the records, without its metrics per client and per class."""
    records.record(run, path, data)


@app.command()
def unpack(
    path: Annotated[str, typer.Argument(metavar="STUDY[/NAME]", help="A study, or one run.")],
    folder: Annotated[Path, typer.Argument(help="Folder for the run directories.")],
) -> None:
    """Write recorded runs as run directories, which `semisfl report`, `replay` and `watch` read."""
    study, _, name = path.partition("/")
    for one in [name] if name else [one["name"] for one in records.entries(study)]:
        print(records.unpack(f"{study}/{one}", folder / one.replace("/", "-")))


@app.command()
def bench(
    items: Annotated[
        list[str] | None,
        typer.Argument(
            help="PRESET[:MODEL[:METHOD]] or frozen[:MODEL]...; default: every method on several presets."
        ),
    ] = None,
    images: Annotated[int, typer.Option(help="Synthetic images.")] = 3000,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to time.")] = 3,
    device: Device = "auto",
) -> None:
    """Time rounds with synthetic images; print a line of JSON per item."""
    for row in timing.measure(items, device, images, rounds):
        print(json.dumps(row), flush=True)


@app.command()
def client(
    preset: Annotated[str, typer.Argument(help="A preset.")] = "cifar10", device: Device = "auto"
) -> None:
    """Measure this machine as one client; print a profile for `semisfl plan --profile`."""
    print(timing.client_profile(preset, device))


@app.command()
def poisoning(
    preset: Annotated[str, typer.Argument(help="A preset or FILE.toml.")] = "digits",
    attacks: Annotated[str, typer.Option(help="Attacks, separated by commas, or all.")] = "all",
    rules: Annotated[
        str, typer.Option(help="Aggregates of `semisfl list`; NAME+limited also limits features.")
    ] = "mean,clipped_mean+limited",
    shares: Annotated[str, typer.Option(help="Shares of clients that attack.")] = "0,0.2",
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each: seed, seed + 1, ...")] = 1,
    settings: Settings = None,
    out: Annotated[
        Path, typer.Option(help="One line per run; finished runs are not repeated.")
    ] = Path("runs/poisoning.jsonl"),
    device: Device = "auto",
) -> None:
    """Train with attackers among the simulated clients; print the accuracy lost by attack and rule."""
    values = values_of(preset, settings)
    first = int(values.get("seed", 0))
    jobs = attack_grid.listed(
        attack_grid.choose(attacks, ATTACKS),
        attack_grid.choose(rules, attack_grid.rules()),
        [float(share) for share in words_of(shares)],
        range(first, first + seeds),
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    attack_grid.show(attack_grid.run_grid(values, jobs, out, device=device, tell=console.say))


def main(words: list[str]) -> int:
    """Run a command line; return 0, or 2 after a mistake, whose message names the fix."""
    if words and (words[0] in EXHIBITS or words[0] == "all"):
        words = ["make", *words]
    console.set_up_logging()
    try:
        app(spread_settings(words) or ["--help"])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return os.EX_OK


if __name__ == "__main__":
    # Ctrl-C ends a command at once, also in a long computation; `make.train` alone finishes its iteration.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(main(sys.argv[1:]))
