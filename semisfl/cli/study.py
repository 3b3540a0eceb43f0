"""``semisfl compare`` and ``semisfl report``: tables and curves over runs."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from semisfl.cli import console, watching
from semisfl.cli.options import Device, Json, Preset, Quiet, Settings, name_of, values_of
from semisfl.lookup import note_of, title_of
from semisfl.runs import plots, report
from semisfl.runs.report import Group, Summary

Target = Annotated[
    float | None,
    typer.Option(help="Also: what it took to reach this test accuracy, in percent."),
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
    out: Annotated[
        Path | None, typer.Option(help="Folder for the runs; finished ones there are reused.")
    ] = None,
    target: Target = None,
    jobs_: Annotated[
        int,
        typer.Option(
            "--jobs",
            min=1,
            help="Runs at a time, in processes of their own; with Ray: that share a GPU.",
        ),
    ] = 1,
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="ray[=ADDRESS]", help="Where runs are executed: a Ray cluster, or Ray here."
        ),
    ] = None,
    device: Device = "auto",
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train several methods with several seeds; mean ± standard error, and a picture."""
    from semisfl.cli.jobs import at_once, carry_out, pool_for
    from semisfl.runs import compare as comparison

    folder = out or Path("runs") / f"compare-{name_of(preset)}"
    chosen = comparison.choose_methods(methods)
    jobs = comparison.list_jobs(values_of(preset, settings), chosen, seeds, folder)
    if reused := sum(job.status == "finished" for job in jobs):
        console.say(f"{reused} of {len(jobs)} runs are finished in {folder} and are reused")
    if pool := pool_for(engine, jobs_, device):
        complete = at_once(jobs, pool, quiet)
    else:
        complete = carry_out(jobs, device=device, quiet=quiet)
    if not complete:
        print("stopped; the same command continues")
        return
    results = comparison.results(jobs, target)
    _tell(results, target, folder / "compare.png", plots.ACCURACY, json_)


def report_(
    runs: Annotated[list[Path], typer.Argument(help="Run directories, or folders of them.")],
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
    """Draw curves and a table from run directories. Runs that differ only in seed are averaged."""
    if html is not None:
        watching.write_html(runs, html)
        return
    groups = report.group_runs(report.find_runs(runs))
    place = out or (runs[0] if len(runs) == 1 else Path()) / "report.png"
    results = [(group, report.summarise(group, target)) for group in groups]
    _tell(results, target, place, plots.ACCURACY + plots.TRAINING, json_)


def _tell(
    results: Sequence[tuple[Group, Summary]],
    target: float | None,
    place: Path,
    panels: Sequence[plots.Panel],
    as_json: bool,
) -> None:
    summaries = [summary for _, summary in results]
    notes = [note_of(summary.method) for summary in summaries]
    if not as_json:  # at once: drawing takes seconds
        _print_results(summaries, notes, target)
    picture = place if console.can_draw() else None
    if picture:
        plots.draw([group for group, _ in results], picture, panels)
    if as_json:
        told = [
            report.as_json(summary) | {"note": note}
            for summary, note in zip(summaries, notes, strict=True)
        ]
        drawn = str(picture) if picture else None
        print(json.dumps({"results": told, "target": target, "picture": drawn}))
    elif picture:
        print(f"curves: {picture}")


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
    table = _table(
        "test accuracy" + (", mean ± standard error" if several else ""),
        ("seeds", "rounds", "accuracy %", "best %", "sent", "time"),
    )
    for summary, name in zip(summaries, names, strict=True):
        table.add_row(
            name,
            str(len(summary.runs)),
            str(summary.rounds),
            str(summary.accuracy),
            str(summary.best),
            *_cost_cells(summary.bytes, summary.seconds),
        )
    console.out.print(table)
    if target is None:
        return
    table = _table(f"to reach {target:g} %", ("seeds that did", "rounds", "sent", "time"))
    for summary, name in zip(summaries, names, strict=True):
        table.add_row(name, *_target_cells(summary))
    console.out.print(table)


def _table(title: str, headings: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("method", overflow="fold")
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
