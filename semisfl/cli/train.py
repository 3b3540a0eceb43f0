"""``semisfl run`` and ``compare``: train one run, or several methods with several seeds.

Both parse the settings here and leave the training to `semisfl.cli.runner`.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from semisfl.cli import console, results
from semisfl.cli.options import (
    AllowMethod,
    Data,
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
    refuse_beside_resume,
    values_of,
    warn_of_unread,
    with_data,
)
from semisfl.runs import plots


def run(
    context: typer.Context,
    preset: Preset = "",
    data: Data = None,
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
) -> None:
    """Train one run. Ctrl-C stops it cleanly, and --resume continues it exactly.

    Under torchrun the clients are spread over all ranks; only rank 0 writes and prints.
    """
    from semisfl.cli import runner
    from semisfl.fleet.cluster.ranks import launch
    from semisfl.runs.start import begin, go_on
    from semisfl.settings import config as configs

    # None unless torchrun started this process. Rank 0 goes on below as a run of one process does.
    launched = launch()
    if launched is not None and launched.rank > 0:
        runner.take_part(launched, device, context.obj)
        return
    # What a new and a resumed run share; all else of a resumed run is in its directory.
    arguments: dict[str, Any] = {"device": device, "stop": context.obj.flag}
    settings = with_data(settings, data)
    limits = settings or ()
    if resume is not None:
        refuse_beside_resume(preset, out)
    else:
        preset = chosen_preset(preset, settings, quiet=quiet)
        config = configs.parse(values_of(preset, settings))
        warn_of_unread(config, settings)
        if launched is not None:
            config, resume = runner.lead(launched, config, out)
            limits = ()  # a resumed run keeps its own limits
    if resume is not None:
        prepared = go_on(resume, settings=limits, cluster=launched is not None, **arguments)
    else:
        stem = f"{Path(preset).stem}-{config.method}-seed{config.seed}"
        prepared = begin(config, out=out or runner.free_directory(stem), **arguments)
    result = runner.train(prepared, context.obj, quiet=quiet)
    again = f"semisfl run --resume {console.quoted(result.directory)}"
    runner.print_result(result, again, as_json=json_)


def compare(
    context: typer.Context,
    preset: Preset = "",
    methods: Annotated[
        str, typer.Option(help="Methods, separated by commas, or all.")
    ] = "supervised,semisfl",
    seeds: Annotated[int, typer.Option(min=1, help="Runs per method: seed, seed + 1, ...")] = 3,
    data: Data = None,
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
    take: Annotated[
        bool,
        typer.Option(
            help="Train only runs that no other process has taken: start the same command many times at once."
        ),
    ] = False,
    device: Device = "auto",
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train several methods with several seeds; print mean ± standard error and draw curves.

    The same command continues an interrupted comparison. Finished runs in --out are not repeated.
    """
    from semisfl.cli import runner
    from semisfl.runs import compare as comparison

    settings = with_data(settings, data)
    preset = chosen_preset(preset, settings, quiet=quiet)
    folder = out or Path("runs") / f"compare-{Path(preset).stem}"
    values = values_of(preset, settings)
    chosen = comparison.choose_methods(methods, values)
    swept = [comparison.Sweep.parse(text) for text in sweep or ()]
    groups = comparison.read_variants(variants) if variants else []
    # The runs of all methods, settings and seeds, each with its directory; some may be finished already.
    jobs = comparison.list_jobs(values, chosen, seeds, folder, swept, groups)
    if reused := sum(job.status == "finished" for job in jobs):
        console.say(f"{reused} of {len(jobs)} runs are finished in {folder} and are reused")
    finished = runner.run_all(
        jobs,
        context.obj,
        engine=engine,
        at_once=at_once,
        device=device,
        quiet=quiet,
        share=take,
        apart=take,
    )
    left = sum(job.status != "finished" for job in jobs)
    if not finished or left:
        others = f"{left} of {len(jobs)} runs are with other processes; in the end the same command shows the results"
        print(others if finished else "stopped; the same command continues")
        return
    summaries = comparison.results(jobs, target)
    place = folder / "compare.png"
    results.show(summaries, target, place, plots.ACCURACIES, json_, tables or ())
    runner.leave_if_diverged([run.diverged for group, _ in summaries for run in group.runs])
