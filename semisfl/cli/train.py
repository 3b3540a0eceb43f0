"""``semisfl run``, and the benchmark."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from semisfl.cli import console
from semisfl.cli.options import (
    Device,
    Json,
    Preset,
    Quiet,
    Settings,
    name_of,
    refuse_beside_resume,
    values_of,
)


def register(app: typer.Typer) -> None:
    app.command("run")(run)
    app.command("bench")(bench)


def run(
    preset: Preset = "digits",
    settings: Settings = None,
    out: Annotated[
        Path | None, typer.Option(help="Run directory; default: a new one under runs/.")
    ] = None,
    device: Device = "auto",
    resume: Annotated[
        Path | None,
        typer.Option(help="Continue the run in this directory (or at this checkpoint)."),
    ] = None,
    json_: Json = False,
    quiet: Quiet = False,
    context: typer.Context = None,  # type: ignore[assignment]  # typer fills it in
) -> None:
    """Train once. Ctrl-C stops cleanly; --resume continues exactly where it stopped."""
    from semisfl.cli import torchrun, training
    from semisfl.cli.signals import StopSignals
    from semisfl.fleet.cluster.ranks import launch
    from semisfl.settings import config as configs

    told = launch()
    if told is not None and told.rank > 0:
        torchrun.take_part(told, device)
        return
    limits = settings or ()
    if resume is not None:
        refuse_beside_resume(context)
    else:
        config = configs.parse(values_of(preset, settings))
        if told is not None:
            config, resume = torchrun.lead(told, config, out)
            limits = ()  # those of a run that goes on are its own
    with StopSignals() as signals:
        if resume is not None:
            result = training.carry_on(
                resume,
                signals,
                settings=limits,
                cluster=told is not None,
                device=device,
                quiet=quiet,
            )
        else:
            stem = f"{name_of(preset)}-{config.method}-seed{config.seed}"
            result = training.start(
                config, out or training.free_directory(stem), signals, device=device, quiet=quiet
            )
    assert result.directory is not None
    _tell(result, json_)


def _tell(result: Any, as_json: bool) -> None:
    from semisfl.cli import training
    from semisfl.runs.directory import RunDirectory

    config = RunDirectory.open(result.directory).config()
    done = len(result.rounds)
    tested = any("accuracy" in row for row in result.rounds)
    judged = "test" if config.data.validation is None else "validation"
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
                    "accuracy": result.accuracy if tested else None,
                    "best": result.best if tested else None,
                    "judged_on": judged,
                    "test_accuracy": result.test_accuracy,
                    "bytes": result.rounds[-1]["bytes_total"] if done else 0,
                    "seconds": sum(row["seconds"] for row in result.rounds),
                }
            )
        )
        return
    if tested:
        sent = console.amount(result.rounds[-1]["bytes_total"])
        print(
            f"{config.method}: {training.judged(config)} {result.accuracy:.1f} % after {done} of {config.rounds} rounds "
            f"(best {result.best:.1f} %){training.at_the_end(result)}, {sent} sent, "
            f"{console.clock(sum(row['seconds'] for row in result.rounds))} min"
        )
    resume = f"semisfl run --resume {result.directory}"
    if ending := training.how_it_ended(result, config, resume):
        print(ending)
    if not result.stopped:
        print(f"saved in {result.directory}; draw it with: semisfl report {result.directory}")


def bench(
    device: Device = "auto",
    as_json: Json = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Only SemiSFL and Supervised-only, no growth.")
    ] = False,
    client: Annotated[
        bool, typer.Option("--client", help="How fast this device is as a client; nothing else.")
    ] = False,
    preset: Annotated[str, typer.Option(help="With --client: whose model and batch.")] = "cifar10",
    out: Annotated[
        Path | None,
        typer.Option(help="With --client: a profile to write, for plan and cost --profile."),
    ] = None,
) -> None:
    """Seconds per round on this machine, where they go, and how they grow with the clients."""
    from semisfl.costs.bench import main

    if client:
        _bench_client(preset, device, out, as_json)
        return
    result = main(device, quick)
    if as_json:
        print(json.dumps(result, indent=2))
        return
    product = result["matrix_product_tflops"]
    share = f"% of {product:.1f}" if product >= 1 else f"% of {product:.2f}"
    rounds = Table("preset", "method", "s per round", "TFLOP/s", share, "start-up s", "peak GiB")
    for row in result["rounds"]:
        rounds.add_row(
            row["preset"],
            row["method"],
            f"{row['seconds_a_round']:.3f}",
            f"{row['tflops']:.3g}",
            f"{row['share_of_matrix_product_percent']:.0f}",
            *(f"{row[key]:.1f}" if key in row else "" for key in ("start_up_seconds", "peak_gib")),
        )
    console.out.print(rounds)
    for row in result["rounds"]:
        if "shares_percent" in row:
            shares = ", ".join(
                f"{kind} {share:.0f} %" for kind, share in row["shares_percent"].items()
            )
            console.out.print(f"{row['preset']}: {shares}")
    if "growth" in result:
        grown = Table("clients", "active", "s per round", "peak GiB")
        for row in result["growth"]:
            grown.add_row(
                str(row["clients"]),
                str(row["active"]),
                f"{row['seconds_a_round']:.3f}",
                f"{row.get('peak_gib', 0):.2f}",
            )
        console.out.print(grown)


def _bench_client(preset: str, device: str, out: Path | None, as_json: bool) -> None:
    from semisfl.costs.client_speed import client_speed
    from semisfl.settings.catalog import DATA
    from semisfl.settings.presets import PRESETS

    if preset not in PRESETS.keys() & DATA.keys():
        raise ValueError(f"--preset {preset!r} is not known; use one of {', '.join(PRESETS)}")
    if out is not None and out.suffix != ".toml":
        raise ValueError(f"--out {out} must end in .toml, as plan and cost --profile want it")
    found = client_speed(preset, device)
    if out is not None:
        out.write_text(_as_profile(found), encoding="utf-8")
    if as_json:
        print(json.dumps(found))
        return
    print(
        f"{found['gflops']:.1f} GFLOP/s in iterations of {found['model']} with {found['batch']} images, "
        f"{found['seconds_an_iteration']:.3f} s each, on {found['device']}"
    )
    if out is not None:
        print(f"profile: {out}; use it with: semisfl plan {preset} --profile {out}")


def _as_profile(found: dict[str, Any]) -> str:
    about = f"measured with {found['model']}, batch {found['batch']}, on {found['device']}"
    device = f'name = "this device", gflops = {found["gflops"]:.3f}, memory_gb = {found["memory_gb"]:.1f}'
    return (
        f'[measured]\nabout = "{about}"\n'
        "# Of the server, which was not measured: assumed, as in jetson-mix.\n"
        f"server_gflops = 11600\ndevices = [{{ {device} }}]\n"
    )
