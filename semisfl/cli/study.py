"""``semisfl compare`` and ``semisfl report``: tables and curves over runs."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from semisfl.cli import console, watching
from semisfl.cli.options import (
    Device,
    Engine,
    Jobs,
    Json,
    Preset,
    Quiet,
    Settings,
    finite,
    name_of,
    values_of,
)
from semisfl.runs import plots, report, sweeps
from semisfl.runs.report import Group, Summary, accuracy_of
from semisfl.runs.sweeps import Sweep, Swept
from semisfl.runs.variants import PLAIN, read_variants
from semisfl.settings.lookup import note_of, title_of

Target = Annotated[
    float | None,
    typer.Option(help="Also: what it took to reach this accuracy, in percent.", callback=finite),
]

UNKNOWN = "–"


def register(app: typer.Typer) -> None:
    app.command("compare")(compare)
    app.command("report")(report_)


def compare(
    preset: Preset = "digits",
    methods: Annotated[
        str, typer.Option(help="Methods, comma between; or all.")
    ] = "supervised,semisfl",
    seeds: Annotated[int, typer.Option(min=1, help="Runs per method: seed, seed + 1, ...")] = 3,
    settings: Settings = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=V1,V2,...",
            help="Every run at each of these values; given twice: at all pairs of them.",
        ),
    ] = None,
    variants: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.toml",
            help='Every run with each group of settings there: name = ["key=value", ...].',
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the runs; finished ones there are reused.")
    ] = None,
    target: Target = None,
    at_once: Jobs = 1,
    engine: Engine = None,
    device: Device = "auto",
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train several methods with several seeds; mean ± standard error, and a picture."""
    from semisfl.cli.jobs import carry_out
    from semisfl.runs import compare as comparison

    folder = out or Path("runs") / f"compare-{name_of(preset)}"
    chosen = comparison.choose_methods(methods)
    swept = [Sweep.parse(text) for text in sweep or ()]
    groups = read_variants(variants) if variants else [PLAIN]
    values = values_of(preset, settings)
    jobs = comparison.list_jobs(values, chosen, seeds, folder, swept, groups)
    if reused := sum(job.status == "finished" for job in jobs):
        console.say(f"{reused} of {len(jobs)} runs are finished in {folder} and are reused")
    if not carry_out(jobs, engine=engine, at_once=at_once, device=device, quiet=quiet):
        print("stopped; the same command continues")
        return
    results = comparison.results(jobs, target)
    keys = [one.key for one in swept]
    _tell(results, target, folder / "compare.png", plots.ACCURACY, keys, json_)


def report_(
    runs: Annotated[
        list[Path], typer.Argument(help="Run directories or records, or folders of them.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Picture; default: report.png in the folder given, or here if several."),
    ] = None,
    target: Target = None,
    html: Annotated[
        Path | None,
        typer.Option(help="Write the page of `semisfl watch` as one file, and nothing else."),
    ] = None,
    json_: Json = False,
) -> None:
    """Draw curves and a table from run directories. Runs that differ only in seed are averaged.

    Where runs of a method differ in one or two settings, also accuracy over the first of them.
    """
    if html is not None:
        watching.write_html(runs, html)
        return
    groups = report.group_runs(report.find_runs(runs))
    place = out or (runs[0] if len(runs) == 1 and runs[0].is_dir() else Path()) / "report.png"
    results = [(group, report.summarise(group, target)) for group in groups]
    keys = sweeps.keys_swept(groups)
    _tell(results, target, place, plots.ACCURACY + plots.TRAINING, keys, json_)


def _tell(
    results: Sequence[tuple[Group, Summary]],
    target: float | None,
    place: Path,
    panels: Sequence[plots.Panel],
    keys: Sequence[str],
    as_json: bool,
) -> None:
    summaries = [summary for _, summary in results]
    notes = [note_of(summary.method) for summary in summaries]
    swept = Swept.of(results, keys) if keys else None
    if not as_json:  # at once: drawing takes seconds
        _print_results(summaries, notes, target)
        if swept:
            _print_swept(swept)
    picture = console.picture_at(place)
    over = picture.with_name(f"{picture.stem}-sweep.png") if picture and swept else None
    if picture:
        plots.draw([group for group, _ in results], picture, panels)
    if swept and over:
        sweeps.draw(swept, over)
    if as_json:
        told = [
            report.as_json(summary) | {"note": note}
            for summary, note in zip(summaries, notes, strict=True)
        ]
        drawn = str(picture) if picture else None
        whole: dict[str, Any] = {"results": told, "target": target, "picture": drawn}
        if swept:
            whole["sweep"] = sweeps.as_json(swept) | {"picture": str(over) if over else None}
        print(json.dumps(whole))
    elif picture:
        print(f"curves: {picture}" + (f"; over {keys[0]}: {over}" if over else ""))


def _print_results(
    summaries: Sequence[Summary], notes: Sequence[str], target: float | None
) -> None:
    names = [s.label + ("*" if note else "") for s, note in zip(summaries, notes, strict=True)]
    _print_table(summaries, names, target)
    for method, note in dict.fromkeys(zip([s.method for s in summaries], notes, strict=True)):
        if note:
            print(f"* {title_of(method)}: {note}")
    for summary in summaries:
        if summary.remark:
            print(f"! {summary.label}: {summary.remark}")
    sys.stdout.flush()


def _print_table(summaries: Sequence[Summary], names: Sequence[str], target: float | None) -> None:
    several = any(len(summary.runs) > 1 for summary in summaries)
    kinds = {summary.judged_on for summary in summaries}
    validated = "validation" in kinds
    judged = accuracy_of(kinds)
    table = _table(
        judged + (", mean ± standard error" if several else ""),
        (
            *("seeds", "rounds", "accuracy %", "best %"),
            *(("on",) if len(kinds) > 1 else ()),
            *(("test %",) if validated else ()),
            *("sent", "time"),
        ),
    )
    for summary, name in zip(summaries, names, strict=True):
        at_the_end = UNKNOWN if summary.test is None else str(summary.test)
        table.add_row(
            name,
            str(len(summary.runs)),
            str(summary.rounds),
            str(summary.accuracy),
            str(summary.best),
            *((summary.judged_on,) if len(kinds) > 1 else ()),
            *((at_the_end,) if validated else ()),
            *_cost_cells(summary.bytes, summary.seconds),
        )
    console.out.print(table)
    if target is None:
        return
    reached = f"to reach {target:g} %" + (f" {judged}" if validated else "")
    table = _table(reached, ("seeds that did", "rounds", "sent", "time"))
    for summary, name in zip(summaries, names, strict=True):
        table.add_row(name, *_target_cells(summary))
    console.out.print(table)


def _print_swept(swept: Swept) -> None:
    several = any(
        point.stderr is not None for line in swept.lines for point in line.points.values()
    )
    table = _table(
        f"{swept.accuracy} over {swept.key}" + (", mean ± standard error" if several else ""),
        swept.values,
    )
    for line in swept.lines:
        cells = (line.points.get(value) for value in swept.values)
        mark = "*" if note_of(line.method) else ""
        table.add_row(line.label + mark, *(str(cell) if cell else UNKNOWN for cell in cells))
    console.out.print(table)


def _table(title: str, headings: Sequence[str]) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),  # what tells methods apart may be long
        pad_edge=False,
        min_width=len(title),
    )
    table.add_column("method", overflow="fold", no_wrap=console.is_narrow())
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _target_cells(summary: Summary) -> list[str]:
    cost = summary.to_target
    assert cost is not None
    rounds = UNKNOWN if cost.rounds is None else f"{cost.rounds:.0f}"
    costs = _cost_cells(cost.bytes, cost.seconds)
    return [f"{cost.reached} of {len(summary.runs)}", rounds, *costs]


def _cost_cells(size: float | None, seconds: float | None) -> list[str]:
    return [
        UNKNOWN if size is None else console.amount(size),
        UNKNOWN if seconds is None else console.clock(seconds),
    ]
