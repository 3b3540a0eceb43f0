"""``semisfl run`` and ``compare``: training in this process or in several."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from semisfl.cli import console, results
from semisfl.cli.options import (
    AllowMethod,
    Device,
    Engine,
    Jobs,
    Json,
    Preset,
    Quiet,
    Settings,
    Tables,
    Target,
    chosen_preset,
    name_of,
    refuse_beside_resume,
    values_of,
    warn_of_unread,
)
from semisfl.runs import plots, sweeps
from semisfl.runs.grouping import judged_on
from semisfl.runs.sweeps import PLAIN, read_variants
from semisfl.settings.counts import amount


def run(
    preset: Preset = "",
    settings: Settings = None,
    out: Annotated[
        Path | None, typer.Option(help="Run directory; default: a new one under runs/.")
    ] = None,
    device: Device = "auto",
    resume: Annotated[
        Path | None,
        typer.Option(help="Continue the run in this directory, or from this checkpoint."),
    ] = None,
    allow_method: AllowMethod = None,
    json_: Json = False,
    quiet: Quiet = False,
    context: typer.Context = None,  # type: ignore[assignment]  # typer fills it in
) -> None:
    """Train one run. Ctrl-C stops it cleanly, and --resume continues it exactly."""
    from semisfl.cli import one_run, torchrun
    from semisfl.cli.signals import StopSignals
    from semisfl.fleet.cluster.ranks import launch
    from semisfl.settings import config as configs

    launched = launch()
    if launched is not None and launched.rank > 0:
        torchrun.take_part(launched, device)
        return
    limits = settings or ()
    if resume is not None:
        refuse_beside_resume(context)
    else:
        preset = chosen_preset(preset, settings, quiet=quiet)
        config = configs.parse(values_of(preset, settings))
        warn_of_unread(config, settings)
        if launched is not None:
            config, resume = torchrun.lead(launched, config, out)
            limits = ()  # a resumed run keeps its own limits
    with StopSignals() as signals:
        if resume is not None:
            result = one_run.resume(
                resume,
                signals,
                settings=limits,
                cluster=launched is not None,
                device=device,
                quiet=quiet,
            )
        else:
            stem = f"{name_of(preset)}-{config.method}-seed{config.seed}"
            result = one_run.start(
                config, out or one_run.free_directory(stem), signals, device=device, quiet=quiet
            )
    assert result.directory is not None
    _print_run(result, json_)
    one_run.leave_if_diverged(result)


def _print_run(result: Any, as_json: bool) -> None:
    from semisfl.cli import one_run
    from semisfl.runs.directory import RunDirectory

    config = RunDirectory.open(result.directory).config()
    done = len(result.rounds)
    tested = any("accuracy" in one for one in result.rounds)
    if as_json:
        print(
            json.dumps(
                {
                    "directory": str(result.directory),
                    "method": config.method,
                    "seed": config.seed,
                    "rounds": done,
                    "stopped": result.stopped,
                    "stopped_by": result.stopped_by,
                    "diverged": result.diverged,
                    "warnings": result.warnings,
                    "accuracy": result.accuracy if tested else None,
                    "best": result.best if tested else None,
                    "judged_on": judged_on(config.model_dump()),
                    "test_accuracy": result.test_accuracy,
                    "bytes": result.rounds[-1]["bytes_total"] if done else 0,
                    "seconds": sum(one["seconds"] for one in result.rounds),
                }
            )
        )
        return
    if tested:
        sent = amount(result.rounds[-1]["bytes_total"])
        print(
            f"{config.method}: {one_run.judged(config)} {result.accuracy:.1f} % after the last round ({done} of "
            f"{config.rounds}; best {result.best:.1f} %){one_run.at_the_end(result)}, {sent} sent, "
            f"{console.clock(sum(row['seconds'] for row in result.rounds))} min"
        )
    place = console.quoted(result.directory)
    resume = f"semisfl run --resume {place}"
    if ending := one_run.how_it_ended(result, config, resume):
        print(ending)
    if not result.stopped:
        print(f"saved in {result.directory}; draw it with: semisfl report {place}")


def compare(
    preset: Preset = "",
    methods: Annotated[
        str, typer.Option(help="Methods, separated by commas, or all.")
    ] = "supervised,semisfl",
    seeds: Annotated[int, typer.Option(min=1, help="Runs per method: seed, seed + 1, ...")] = 3,
    settings: Settings = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=V1,V2,...",
            help="Train every run at each of these values; with two --sweep, at every pair of values.",
        ),
    ] = None,
    variants: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.toml",
            help='Train every run with each group of settings in a file: name = ["key=value", ...].',
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the runs; finished ones there are reused.")
    ] = None,
    target: Target = None,
    tables: Tables = None,
    at_once: Jobs = 1,
    engine: Engine = None,
    device: Device = "auto",
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train several methods with several seeds; print mean ± standard error and draw curves."""
    from semisfl.cli import one_run
    from semisfl.cli.many_runs import run_all
    from semisfl.runs import compare as comparison

    preset = chosen_preset(preset, settings, quiet=quiet)
    folder = out or Path("runs") / f"compare-{name_of(preset)}"
    for file in tables or ():
        if file.parent != folder:
            console.check_file(file, "--table")
    chosen = comparison.choose_methods(methods)
    swept = [sweeps.Sweep.parse(text) for text in sweep or ()]
    groups = read_variants(variants) if variants else [PLAIN]
    values = values_of(preset, settings)
    jobs = comparison.list_jobs(values, chosen, seeds, folder, swept, groups)
    if reused := sum(job.status == "finished" for job in jobs):
        console.say(f"{reused} of {len(jobs)} runs are finished in {folder} and are reused")
    if not run_all(jobs, engine=engine, at_once=at_once, device=device, quiet=quiet):
        print("stopped; the same command continues")
        return
    summaries = comparison.results(jobs, target)
    keys = [one.key for one in swept]
    place = folder / "compare.png"
    results.show(summaries, target, place, plots.ACCURACIES, keys, json_, tables or ())
    one_run.leave_if_any_diverged([run for group, _ in summaries for run in group.runs])


COMMANDS = {"run": run, "compare": compare}
