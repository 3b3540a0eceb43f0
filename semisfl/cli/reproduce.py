"""``semisfl reproduce``: the paper's tables and figures, made from runs."""

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from semisfl.cli import console, output
from semisfl.cli.options import Device, Engine, Jobs, Json, Quiet
from semisfl.files import write_whole
from semisfl.paper.grid import Exhibit
from semisfl.paper.missing import Missing
from semisfl.paper.run_index import RunIndex
from semisfl.settings.config import ConfigError
from semisfl.settings.counts import counted

RECORDS = Path("results")
"""Searched for finished runs if it exists and --from is not used."""


def reproduce(
    context: typer.Context,
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TABLE|FIGURE]...", help="Names of --list, for example table3 fig8; or all."
        ),
    ] = None,
    list_: Annotated[
        bool,
        typer.Option("--list", help="List every table and figure, and how many of its runs exist."),
    ] = False,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Rounds per run; default: the paper's.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs per cell: seed 0, 1, ...")] = 1,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Run only cells of this method, data set, row, column or setting. A comma means or; "
            "a repeated --only means and."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for new runs, tables and figures.")] = Path(
        "runs/reproduce"
    ),
    from_: Annotated[
        list[Path] | None,
        typer.Option("--from", help="Folder with finished runs; default: results, if it exists."),
    ] = None,
    into: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.md",
            help="Write into the marked parts of this document, and pictures into paper/ beside it.",
        ),
    ] = None,
    no_run: Annotated[
        bool, typer.Option("--no-run", help="Train nothing; use the runs that exist.")
    ] = False,
    stand_ins: Annotated[
        bool,
        typer.Option("--stand-ins", help="Use public stand-ins for data sets that are not public."),
    ] = False,
    estimate: Annotated[
        bool,
        typer.Option(
            "--estimate", help="Print how long the missing runs would take on this machine."
        ),
    ] = False,
    bench: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json",
            help="Output of `semisfl bench --json` on this machine; default: measure now, keep in --out.",
        ),
    ] = None,
    at_once: Jobs = 1,
    engine: Engine = None,
    device: Device = "auto",
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train the missing runs of a table or figure of the paper; write it beside the paper's values."""
    from semisfl.paper import exhibits
    from semisfl.paper.missing import chosen, missing

    if list_ == bool(names):
        raise ConfigError("name a table or figure, or use --list to see them all")
    others = from_ if from_ is not None else [RECORDS] if RECORDS.is_dir() else []
    index = RunIndex(out, others)
    if list_:
        _list(index, json_)
        return
    selected = exhibits.choose(names or [])
    cells = chosen([cell for exhibit in selected for cell in exhibit.cells], only or ())
    left = missing(cells, index, rounds=rounds, seeds=seeds, stand_ins=stand_ins)
    if estimate:
        _estimate(left, bench or out / "bench.json", bench is None, device, json_)
        return
    trained = [] if no_run else left
    if trained:
        from semisfl.cli import runner
        from semisfl.runs.compare import Job

        jobs = [Job.of(one.config, one.path) for one in trained]
        if not runner.run_all(
            jobs,
            context.obj,
            engine=engine,
            at_once=at_once,
            device=device,
            quiet=quiet,
            share=True,
        ):
            print("stopped; the same command continues")
            return
        index = RunIndex(out, others)
    if into is not None:
        _write_into(into, selected, index, rounds)
    else:
        _write(selected, index, rounds, out, json_)
    if trained:
        from semisfl.cli import runner

        runs = [index.one(each.config) for each in trained]
        runner.leave_if_diverged([indexed.run.diverged for indexed in runs if indexed])


def _estimate(
    left: Sequence[Missing], file: Path, measure: bool, device: str, as_json: bool
) -> None:
    from semisfl.paper import estimate

    lines = estimate.estimate(left, file, measure=measure, device=device, say=console.say)
    total = sum(line.seconds for line in lines)
    if as_json:
        missing = [vars(line) | {"seconds": line.seconds} for line in lines]
        print(json.dumps({"missing": missing, "seconds": total}))
        return
    columns = ("preset", "method", "runs", "rounds", "s per round", "time")
    table = output.table("", columns, text=2)
    for line in lines:
        numbers = (line.runs, f"{line.rounds:,}", f"{line.per_round:.3g}")
        time = console.clock(line.seconds)
        table.add_row(line.preset, line.method, *map(str, numbers), time)
    output.show(table)
    print(
        f"{counted(len(left), 'run')} missing: about {console.clock(total)} one after another, tests and "
        "start-up not counted"
    )


def _write(
    selected: Sequence[Exhibit], index: RunIndex, rounds: int | None, out: Path, as_json: bool
) -> None:
    from semisfl.paper import drawn, written

    out.mkdir(parents=True, exist_ok=True)
    drawable = importlib.util.find_spec("matplotlib") is not None
    written_exhibits = []
    for exhibit in selected:
        parts = [(part, written.measured(part, index, rounds)) for part in exhibit.parts]
        pictures = drawn.draw(exhibit, parts, out) if drawable else []
        picture = pictures[0].name if pictures else None
        text = written.exhibit(exhibit, parts, out, picture)
        file = out / f"{exhibit.name}.md"
        write_whole(file, f"# {exhibit.heading}\n\n{text}".encode())
        files = [file, *pictures]
        written_exhibits.append(
            written.as_json(exhibit, parts) | {"files": [str(one) for one in files]}
        )
        if not as_json:
            print(f"# {exhibit.heading}\n\n{text}\nwritten: {', '.join(map(str, files))}\n")
    if as_json:
        print(json.dumps({"exhibits": written_exhibits}))


def _write_into(
    file: Path, selected: Sequence[Exhibit], index: RunIndex, rounds: int | None
) -> None:
    from semisfl.paper import document, drawn, written

    text = file.read_text(encoding="utf-8")
    exhibits = {exhibit.name: exhibit for exhibit in selected}
    names = [name for name in document.names_in(text, file) if name in exhibits]
    pictures = file.parent / "paper"
    pictures.mkdir(exist_ok=True)
    drawable = importlib.util.find_spec("matplotlib") is not None

    def make(name: str) -> str:
        exhibit = exhibits[name]
        parts = [(part, written.measured(part, index, rounds)) for part in exhibit.parts]
        if drawable:
            drawn.draw(exhibit, parts, pictures, ("png",))
        picture = f"paper/{name}.png" if (pictures / f"{name}.png").is_file() else None
        return written.exhibit(exhibit, parts, file.parent, picture, alone=False)

    write_whole(file, document.filled(text, make, names).encode())
    print(f"written into {file}: {', '.join(names) or 'nothing, as it has no part for these'}")


def _list(index: RunIndex, as_json: bool) -> None:
    from semisfl.paper.exhibits import EXHIBITS
    from semisfl.paper.identity import identity

    rows = []
    for exhibit in EXHIBITS.values():
        cells = {identity(cell.config()): cell for cell in exhibit.cells}
        done = sum(index.result(cell).rounds is not None for cell in cells.values())
        finished = sum(
            index.result(cell, cell.rounds).rounds is not None for cell in cells.values()
        )
        rows.append(
            {
                "name": exhibit.name,
                "label": exhibit.label,
                "title": exhibit.title,
                "runs": len(cells),
                "measured": done,
                "with_all_rounds": finished,
            }
        )
    if as_json:
        print(json.dumps({"exhibits": rows}))
        return
    columns = ("name", "in the paper", "what", "runs", "measured", "with all rounds")
    table = output.table("", columns, text=3)
    for row in rows:
        shown = (value if value != 0 or row["runs"] else output.UNKNOWN for value in row.values())
        table.add_row(*map(str, shown))
    output.show(table)
    print("runs: per seed. measured: at least one seed, with any number of rounds.")


COMMANDS = {"reproduce": reproduce}
