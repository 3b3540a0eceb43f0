"""``semisfl report``, and the tables and curves that ``compare`` prints too.

`semisfl.runs.report` computes the numbers. Here they are printed; nothing here loads torch.
"""

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from semisfl.cli import console, output, watching
from semisfl.cli.options import Json, Tables, Target
from semisfl.runs import plots, report
from semisfl.runs.long_table import write_long
from semisfl.runs.report import Difference, Group, Summary, accuracy_of
from semisfl.settings.counts import amount
from semisfl.settings.lookup import note_of, title_of


def report_(
    runs: Annotated[list[Path], typer.Argument(help="Run directories, or folders of them.")],
    out: Annotated[
        Path | None,
        typer.Option(help="Picture; default: report.png in the run's folder, or here if several."),
    ] = None,
    target: Target = None,
    table: Tables = None,
    long: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.csv|FILE.parquet",
            help="Write every number of every round, one per row, for pandas; a table and curves only if asked for.",
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            help="Write the page of `semisfl watch` as one file; a table and curves only if asked for."
        ),
    ] = None,
    json_: Json = False,
) -> None:
    """Print a table and draw curves from run directories; average runs that differ only in seed."""
    if html is not None:
        watching.write_html(runs, html)
    if long is not None:
        write_long(long, report.find_runs(runs))
    if (html or long) and not (out or table or json_ or target is not None):
        return
    groups = report.group_runs(report.find_runs(runs))
    place = out or output.picture_beside(runs, "report.png")
    results = [(group, report.summarise(group, target)) for group in groups]
    show(results, target, place, plots.all_charts(groups), json_, table or ())


def show(
    results: Sequence[tuple[Group, Summary]],
    target: float | None,
    place: Path,
    charts: Sequence[plots.Chart],
    as_json: bool,
    files: Sequence[Path] = (),
) -> None:
    """Print the results of groups of runs, write them to files, and draw their curves.

    Args:
        results: groups of runs that differ only in seed, each with its summary.
        target: an accuracy in percent whose cost is printed too; None: none.
        place: the picture to draw.
        charts: what the picture shows.
        as_json: print one JSON object instead of tables.
        files: files of ``--table`` to write.
    """
    summaries = [summary for _, summary in results]
    groups = [group for group, _ in results]
    pairs = report.differences(groups)
    notes = [note_of(summary.method) for summary in summaries]
    if not as_json:  # before the picture: drawing takes seconds
        _print_results(summaries, notes, target)
        _print_differences(pairs)
    written = [file for one in files for file in report.write_table(one, results, pairs, target)]
    if written and not as_json:
        print(f"tables: {', '.join(map(str, written))}")
    picture = output.draw(place, lambda file: plots.draw(groups, file, charts))
    if as_json:
        plain = [
            asdict(summary) | {"note": note} for summary, note in zip(summaries, notes, strict=True)
        ]
        drawn = str(picture) if picture else None
        answer: dict[str, Any] = {"results": plain, "target": target, "picture": drawn}
        answer["differences"] = [vars(pair) for pair in pairs]
        print(json.dumps(answer, default=str))
    elif picture:
        print(f"curves: {picture}")


def _print_results(
    summaries: Sequence[Summary], notes: Sequence[str], target: float | None
) -> None:
    """Print the table of results with the notes on its methods and the remarks on its runs.

    Args:
        summaries: the summary of each group of runs.
        notes: for each of them the note on its method, such as that it is reconstructed from its paper; or an empty text.
        target: an accuracy in percent whose cost is printed too; None: none.
    """
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
    """Print the accuracy, the bytes and the time of each group of runs.

    Columns appear only where they say something: ``on`` if some runs were judged on validation images and others on test
    images, ``test %`` if any were judged on validation images.
    """
    several = any(len(summary.runs) > 1 for summary in summaries)
    kinds = {summary.judged_on for summary in summaries}
    validated = "validation" in kinds
    judged = accuracy_of(kinds)
    table = output.table(
        judged + (", mean ± standard error" if several else ""),
        (
            *("method", "seeds", "rounds", "accuracy %", "best %"),
            *(("on",) if len(kinds) > 1 else ()),
            *(("test %",) if validated else ()),
            *("sent", "time"),
        ),
    )
    for summary, name in zip(summaries, names, strict=True):
        table.add_row(
            name,
            str(len(summary.runs)),
            str(summary.rounds),
            str(summary.accuracy),
            str(summary.best),
            *((summary.judged_on,) if len(kinds) > 1 else ()),
            *((output.known(summary.test),) if validated else ()),
            amount(summary.bytes),
            output.known(summary.seconds, console.clock),
        )
    output.show(table)
    if target is not None:
        reached = f"to reach {target:g} %" + (f" {judged}" if validated else "")
        print_target(reached, zip(names, summaries, strict=True), "time", console.clock)


def print_target(
    title: str, lines: Iterable[tuple[str, Summary]], unit: str, time: Callable[[float], str]
) -> None:
    """Print what reaching an accuracy took, averaged over the seeds that reached it.

    Args:
        title: the title of the table.
        lines: a name and a summary for each group of runs.
        unit: the title of the column of times.
        time: writes seconds in that unit.
    """
    table = output.table(title, ("method", "seeds that did", "rounds", "sent", unit))
    for name, summary in lines:
        cost = summary.to_target
        assert cost is not None
        table.add_row(
            name,
            f"{cost.reached} of {len(summary.runs)}",
            output.known(cost.rounds, "{:.0f}".format),
            output.known(cost.bytes, amount),
            output.known(cost.seconds, time),
        )
    output.show(table)


def _print_differences(pairs: Sequence[Difference]) -> None:
    """Print the mean difference of accuracy between two groups over the seeds that both have, with its 95 % interval.

    Pairs with one common seed have no interval and are left out.
    """
    several = [pair for pair in pairs if pair.interval is not None]
    if not several:
        return
    accuracy = accuracy_of(pair.judged_on for pair in several)
    table = output.table(
        f"paired differences over seeds, first − second, in points of {accuracy}",
        ("first", "second", "seeds", "mean", "95 % interval", "wins"),
        text=2,
    )
    for pair in several:
        low, high = pair.interval or (0.0, 0.0)
        interval = f"{low:+.1f} to {high:+.1f}"
        table.add_row(
            pair.first, pair.second, str(pair.seeds), f"{pair.mean:+.1f}", interval, str(pair.wins)
        )
    output.show(table)
